"""The attack on the gateway: forged requests, and what an honest gateway may answer to them.

A request is a damaged form of one that clients send: fields with wrong values, missing ones, damaged bytes,
wrong paths, methods and keys, bodies in pieces, clients that go away. Each gets exactly one answer in
OpenAI's form, and none is a fault of the gateway's own.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from generators.gateway.session import GatewaySession
from slipstream_bench.gateway_rig import GatewayRig

EPISODE_REQUESTS = 40
"""Requests to one episode."""
HONEST_EVERY = 100
MAX_BODY_MB = 1
OVERSIZE_SHARE = 0.002
"""Share of the bodies that are beyond the limit."""
STATUSES = frozenset({200, 400, 401, 404, 405, 413})
REFUSAL_KEYS = {"message", "type", "param", "code"}

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PATHS = ("/v1/chat/completions", "/inference/v1/generate", "/v1/models", "/health")
STRAYS = ("/", "/v1", "/v1/completions", "//v1/models", "/v1/models/../..", "/\x00", "/é", "/" + "a" * 3000)
EXTREMES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.5, 1e308, -0.0,
    "", "a", "\x00", "é\U0001f600", "<|end|>", "{{ 7 * 7 }}", "x" * 3000, "auto", "none",
    [], {}, [[]], [None], {"": None}, {"type": "text"},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    key: bytes | None
    body: bytes


class RequestForge:
    """Forges requests from one seed."""

    def __init__(self, seed: int) -> None:
        self.coin = random.Random(seed)
        self._talk: list[dict[str, Any]] = []

    def begin_episode(self) -> None:
        self._talk = []

    def note_reply(self, body: bytes) -> None:
        """Goes on with the conversation that was answered."""
        choices = json.loads(body).get("choices") or [{}]
        if message := choices[0].get("message"):
            self._talk = [*self._talk[-6:], message, {"role": "user", "content": "more"}]

    def forge_request(self, key: str) -> HttpRequest:
        coin = self.coin
        path = coin.choice(PATHS) if coin.random() < 0.97 else coin.choice(STRAYS)
        usual = "GET" if path in PATHS[2:] else "POST"
        method = usual if coin.random() < 0.97 else coin.choice(["GET", "PUT", "DELETE", "OPTIONS", "X" * 99])
        return HttpRequest(method, path, self._forge_key(key), self._forge_body(path))

    def _forge_key(self, key: str) -> bytes | None:
        draw = self.coin.random()
        if draw < 0.95:
            return f"Bearer {key}".encode()
        wrong = [None, b"", b"Bearer ", key.encode(), b"Bearer " + self.coin.randbytes(20), b"Basic x"]
        return self.coin.choice(wrong)

    def _forge_body(self, path: str) -> bytes:
        coin = self.coin
        if coin.random() < OVERSIZE_SHARE:
            return b" " * coin.randint(MAX_BODY_MB << 20, MAX_BODY_MB << 21)
        if coin.random() < 0.05:
            return coin.randbytes(coin.randint(0, 300))
        if coin.random() < 0.01:
            return coin.choice([b"[", b'{"a":', b"[[],"]) * coin.randint(1, 20_000)
        value = self._make_token_request() if path == PATHS[1] else self._make_chat_request()
        for _ in range(coin.choice([0, 1, 1, 1, 2, 4])):
            value = self._damage_value(value)
        body = json.dumps(value).encode()
        return self._damage_bytes(body) if coin.random() < 0.15 else body

    def _make_chat_request(self) -> Any:
        coin = self.coin
        self._talk = self._talk or [{"role": "user", "content": "2+2?"}]
        request: dict[str, Any] = {"model": "m", "messages": list(self._talk)}
        options: dict[str, Any] = {
            "tools": [TOOL],
            "tool_choice": "auto",
            "stream": coin.random() < 0.5,
            "stream_options": {"include_usage": True},
            "stop": coin.choice(["u", ["r", "zz"]]),
            "logprobs": True,
            "n": coin.randint(1, 2),
            "max_tokens": coin.randint(1, 50),
            "temperature": 1,
            "seed": 5,
        }
        chosen = coin.sample(list(options), coin.randint(0, 4))
        return request | {name: options[name] for name in chosen}

    def _make_token_request(self) -> Any:
        tokens = [self.coin.randrange(257) for _ in range(self.coin.randint(1, 30))]
        params = {"max_tokens": 10, "logprobs": 1, "stop_token_ids": [0], "skip_special_tokens": False}
        return {"model": "m", "token_ids": tokens, "sampling_params": params}

    def _damage_value(self, value: Any) -> Any:
        """Returns a value that differs in one place."""
        coin = self.coin
        if coin.random() < 0.2 or not isinstance(value, dict | list) or not value:
            return coin.choice(EXTREMES) if coin.random() < 0.9 else self._nest_value(coin.randint(1, 300))
        if isinstance(value, list):
            place = coin.randrange(len(value))
            changed = [self._damage_value(value[place])] if coin.random() < 0.8 else [value[place]] * 3
            return value[:place] + changed + value[place + 1 :]
        name = coin.choice(list(value))
        if coin.random() < 0.1:
            return {one: held for one, held in value.items() if one != name}
        return {**value, name: self._damage_value(value[name])}

    def _nest_value(self, depth: int) -> Any:
        value: Any = self.coin.choice(EXTREMES)
        for _ in range(depth):
            value = [value] if self.coin.random() < 0.5 else {"a": value}
        return value

    def _damage_bytes(self, body: bytes) -> bytes:
        coin, place = self.coin, self.coin.randrange(len(body))
        match coin.randrange(4):
            case 0:
                return body[:place]
            case 1:
                return body[:place] + coin.randbytes(3) + body[place + 1 :]
            case 2:
                return body[:place] + body[coin.randrange(len(body)) :]
            case _:
                return body[:place] + b"\\ud800" + body[place:]


class GatewayAttack:
    """Sends forged requests to a gateway's application, and checks its answers."""

    def __init__(self, rig: GatewayRig, seed: int) -> None:
        self._rig, self._forge = rig, RequestForge(seed)
        rig.policy.keeps_samples = False
        rig.policy.say = lambda sample: self._forge.coin.choice(
            ["four", "<think>hm</think>4", 'CALL add {"a": 1}', "CALL add {", "é\U0001f600", ""]
        )
        self.counts: Counter[str] = Counter()

    async def send_requests(self, count: int) -> None:
        """Raises AssertionError for an answer that no honest gateway gives."""
        sent = 0
        while sent < count:
            self._forge.begin_episode()
            async with self._rig.gateway.open_session(self._rig.make_player()) as (key, session):
                for _ in range(min(EPISODE_REQUESTS, count - sent)):
                    await self._send_forged(key)
                    sent += 1
                if (sent // EPISODE_REQUESTS) % max(1, HONEST_EVERY // EPISODE_REQUESTS) == 0:
                    await self._check_session(session)
            await self._ask_honestly()

    async def _send_forged(self, key: str) -> None:
        request = self._forge.forge_request(key)
        leaves = self._forge.coin.random() < 0.03
        status, body = await self._send(request, leaves)
        if leaves and status is None:
            self.counts["left"] += 1
            return
        self.counts[str(status)] += 1
        assert status in STATUSES, (status, body[:500], request)
        if status != 200:
            error = json.loads(body)["error"]
            assert set(error) == REFUSAL_KEYS and error["message"], (body[:500], request)
        elif body.startswith(b"data: "):
            assert body.endswith(b"data: [DONE]\n\n"), (body[-200:], request)
        else:
            self._forge.note_reply(body)

    async def _ask_honestly(self) -> None:
        body = b'{"messages": [{"role": "user", "content": "2+2?"}]}'
        async with self._rig.gateway.open_session(self._rig.make_player()) as (key, _):
            request = HttpRequest("POST", PATHS[0], f"Bearer {key}".encode(), body)
            status, _ = await self._send(request, leaves=False)
            assert status == 200, "an honest request must be answered"

    async def _check_session(self, session: GatewaySession) -> None:
        """No request is a fault of the gateway's own, and every sampled token is in one branch."""
        assert session.failure is None, session.failure
        branches = session.player.branches
        turns = [{turn for turn in branch.turn if turn >= 0} for branch in branches.branches]
        assert sum(map(len, turns)) == branches.num_turns == len(set[int]().union(*turns))

    async def _send(self, request: HttpRequest, leaves: bool) -> tuple[int | None, bytes]:
        """Returns status and body; no status where there was no answer."""
        coin, parts = self._forge.coin, [request.body]
        if coin.random() < 0.3 and request.body:
            cut = coin.randrange(len(request.body))
            parts = [request.body[:cut], b"", request.body[cut:]]
        waiting = [
            {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
            for number, part in enumerate(parts)
        ]
        if leaves:
            waiting = [*waiting[: coin.randrange(len(waiting) + 1)], {"type": "http.disconnect"}]
        sent: list[dict[str, Any]] = []

        async def receive() -> Any:
            if waiting:
                return waiting.pop(0)
            return await asyncio.get_running_loop().create_future()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [] if request.key is None else [(b"authorization", request.key)]
        scope = {"type": "http", "method": request.method, "path": request.path, "headers": headers}
        await self._rig.gateway.application(scope, receive, send)
        if not sent:
            return None, b""
        assert [one["type"] for one in sent].count("http.response.start") == 1 and not sent[-1]["more_body"]
        return sent[0]["status"], b"".join(one.get("body", b"") for one in sent)
