"""The gateway's routes, as an ASGI application.

    the key ─▶ the route ─▶ the body, bounded ─▶ the session's answer ─▶ JSON, or server-sent events

Whoever has no key of an open episode gets 401, and no body is read from them. A client that goes away
withdraws its turn. Every refusal has OpenAI's form.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from generators.gateway.chat_answer import ChunkEncoder, make_chat_completion
from generators.gateway.chat_request import ChatRequest, read_chat_request
from generators.gateway.fields import parse_body
from generators.gateway.refusals import RequestRefused
from generators.gateway.session import GatewaySession, SessionRules
from generators.gateway.token_request import make_token_answer, read_token_request
from generators.score_checks import describe_error

log = logging.getLogger("slipstream.generator")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

BODY_S = 30.0
"""Seconds that a client may take to send its body."""
DRAINED_BODIES = 16
"""A refused body is read to its end, up to this many times the limit: a client that still sends would not
see the answer."""
JSON, EVENTS = b"application/json", b"text/event-stream"
CLOSES = b"connection", b"close"


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    parts: Iterable[bytes]
    status: int = 200
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class HttpReply:
    """The way back to one client. The answer's beginning may go out before the rest of it is known."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def begin_answer(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send_part(self, part: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": not is_last})

    async def send_answer(self, answer: HttpAnswer) -> None:
        """Sends an answer, or what is left of one that has begun."""
        parts = list(answer.parts)
        if not self.has_begun:
            headers = [(b"content-type", answer.content_type), *answer.headers]
            if answer.content_type == JSON:
                headers.append((b"content-length", str(sum(map(len, parts))).encode()))
            await self.begin_answer(answer.status, headers)
        for part in parts:
            await self.send_part(part)
        await self.send_part(b"", is_last=True)


class ClientGone(Exception):
    """The client has closed its connection."""


AnswerRoute = Callable[[GatewaySession, bytes, HttpReply], Awaitable[HttpAnswer]]
"""Answers a request to an open session. It may send the beginning of its answer itself, and returns the
rest."""


class GatewayApp:
    def __init__(
        self,
        rules: SessionRules,
        find_session: Callable[[str], GatewaySession | None],
        model: str,
        max_body: int,
    ) -> None:
        """`find_session` returns the open session of a key. `max_body` counts bytes."""
        self._rules, self._find_session, self._model, self._max_body = rules, find_session, model, max_body
        self._vocabulary = len(rules.tokenizer)
        self._routes: dict[str, tuple[str, AnswerRoute]] = {
            "/v1/chat/completions": ("POST", self._answer_chat),
            "/v1/models": ("GET", self._list_models),
            "/inference/v1/generate": ("POST", self._answer_tokens),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        reply = HttpReply(send)
        try:
            answer = await self._answer_request(scope, receive, reply)
        except RequestRefused as refusal:
            answer = _write_refusal(refusal, reply)
        except ClientGone:
            return
        # The generator's loop ends with all that runs in it.
        except asyncio.CancelledError:
            answer = _write_refusal(
                RequestRefused(503, "the run must go on, got a generator that ends"), reply
            )
        await reply.send_answer(answer)

    async def _answer_request(self, scope: Scope, receive: Receive, reply: HttpReply) -> HttpAnswer:
        path, method = scope["path"], scope["method"]
        if path == "/health" and method == "GET":
            return HttpAnswer([b'{"status":"ok"}'])
        session = self._find_caller(scope)
        if path not in self._routes:
            raise RequestRefused(404, f"the path must be one of {', '.join(self._routes)}, got {path[:200]}")
        allowed, answer_route = self._routes[path]
        if method != allowed:
            raise RequestRefused(
                405,
                f"the method must be {allowed} for {path}, got {method[:20]}",
                headers=((b"allow", allowed.encode()),),
            )
        body = await self._read_body(scope, receive)
        return await _answer_while_connected(session, answer_route(session, body, reply), receive)

    def _find_caller(self, scope: Scope) -> GatewaySession:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.decode("latin-1").partition(" ")
        session = self._find_session(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise RequestRefused(
                401,
                "the header Authorization must read `Bearer KEY` with the key of an open episode",
                code="invalid_api_key",
                # The body is not read, so the connection cannot be used again.
                headers=((b"www-authenticate", b"Bearer"), CLOSES),
            )
        return session

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Reads at most `max_body` bytes, whatever the client says about their number."""
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_S):
                has_more = True
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    has_more = message.get("more_body", False)
                    if size <= self._max_body:
                        body += part
                    else:
                        body.clear()
                        if size > self._max_body * DRAINED_BODIES:
                            break
        except TimeoutError:
            raise RequestRefused(
                408, f"the body must come within {BODY_S:g} s, got {size} bytes of it", headers=(CLOSES,)
            ) from None
        if size > self._max_body:
            raise RequestRefused(
                413,
                f"the body must have at most {self._max_body} bytes (episodes.gateway.max_body_mb), got "
                f"{size} or more",
                # Whatever follows is not read.
                headers=(CLOSES,) if has_more else (),
            )
        return bytes(body)

    async def _answer_chat(self, session: GatewaySession, body: bytes, reply: HttpReply) -> HttpAnswer:
        request = read_chat_request(parse_body(body), self._rules.sampling)
        if request.is_streamed:
            return await self._stream_chat(session, request, reply)
        answer = await session.answer_chat(request)
        return HttpAnswer([msgspec.json.encode(make_chat_completion(request, answer, self._rules.tokenizer))])

    async def _stream_chat(
        self, session: GatewaySession, request: ChatRequest, reply: HttpReply
    ) -> HttpAnswer:
        """Sends the text of a plain reply as it comes. The first text, or a refusal, decides the status."""
        encoder = ChunkEncoder(request, self._rules.tokenizer)
        chunks: asyncio.Queue[bytes | None] = asyncio.Queue()

        def show_text(answer_id: str, number: int, text: str) -> None:
            chunks.put_nowait(encoder.encode_text(answer_id, number, text))

        shows_text = self._rules.has_plain_replies(request) and not request.has_logprobs
        answering = asyncio.ensure_future(session.answer_chat(request, show_text if shows_text else None))
        answering.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                if not reply.has_begun:
                    await reply.begin_answer(200, [(b"content-type", EVENTS)])
                await reply.send_part(chunk)
            rest = list(encoder.encode_rest(answering.result()))
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        return HttpAnswer(rest, content_type=EVENTS)

    async def _answer_tokens(self, session: GatewaySession, body: bytes, reply: HttpReply) -> HttpAnswer:
        request = read_token_request(parse_body(body), self._rules.sampling, self._vocabulary)
        completions = await session.answer_tokens(request)
        request_id = f"gen-{completions[0].id.replace('/', '-')}"
        return HttpAnswer([msgspec.json.encode(make_token_answer(request_id, completions))])

    async def _list_models(self, session: GatewaySession, body: bytes, reply: HttpReply) -> HttpAnswer:
        model = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "slipstream",
            "max_model_len": self._rules.max_model_len,
        }
        return HttpAnswer([msgspec.json.encode({"object": "list", "data": [model]})])


def _write_refusal(refusal: RequestRefused, reply: HttpReply) -> HttpAnswer:
    body = refusal.encode_body()
    if reply.has_begun:
        # The status of the stream is on its way: clients read the error from an event.
        return HttpAnswer([b"data: " + body + b"\n\n"])
    return HttpAnswer([body], refusal.status, headers=refusal.headers)


async def _answer_while_connected(
    session: GatewaySession, answer: Awaitable[HttpAnswer], receive: Receive
) -> HttpAnswer:
    """Raises ClientGone when the client goes first, and RequestRefused when the session ends first."""
    answering = asyncio.ensure_future(answer)
    session.hold_request(answering)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.cancelled() or (session.is_closed and not answering.done()):
            raise RequestRefused(410, "the episode of this key must be open, got one that has ended")
        if not answering.done():
            raise ClientGone
        return answering.result()
    except (RequestRefused, ClientGone):
        raise
    except Exception as error:
        # A fault of the gateway's own: the agent may go on, and its episode fails by this name.
        session.failure = session.failure or error
        log.exception("the gateway cannot answer a request")
        raise RequestRefused(500, f"the request cannot be answered: {describe_error(error)}") from error
    finally:
        answering.cancel()
        leaving.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
