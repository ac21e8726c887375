"""The answer to a chat request in OpenAI's form, whole or as the chunks of a stream.

The text of a plain reply is sent as it comes. A reply in which calls or reasoning are looked for, or whose
log-probabilities are asked for, is sent when it is complete: only its end says what its beginning is.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from generators.engine import Completion
from generators.environment import Message
from generators.gateway.chat_request import ChatRequest

STREAM_END = b"data: [DONE]\n\n"
CHUNK = "chat.completion.chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    message: Message
    """As the client gets it."""
    completion: Completion
    """As it is recorded."""
    parse_error: str | None
    shown: str = ""
    """The beginning of the content that was sent while the reply was sampled."""

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.message.get("tool_calls") else self.completion.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    id: str
    num_prompt_tokens: int
    choices: list[ChatChoice]

    @property
    def usage(self) -> dict[str, int]:
        sampled = sum(len(choice.completion.tokens) for choice in self.choices)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.num_prompt_tokens + sampled,
        }


def make_chat_completion(request: ChatRequest, answer: ChatAnswer, tokenizer: Any) -> dict[str, Any]:
    return {
        **_make_head(request, answer.id, "chat.completion"),
        "choices": [
            {
                "index": number,
                "message": write_message(choice.message),
                "finish_reason": choice.finish_reason,
                "logprobs": _make_logprobs(request, choice, tokenizer),
                **_note_parse_error(choice),
            }
            for number, choice in enumerate(answer.choices)
        ],
        "usage": answer.usage,
    }


class ChunkEncoder:
    """Encodes the server-sent events of one stream: for each choice its role, what it says, its tool calls
    and its end."""

    def __init__(self, request: ChatRequest, tokenizer: Any) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._begun: set[int] = set()

    def encode_text(self, answer_id: str, number: int, text: str) -> bytes:
        """Encodes text that a choice goes on with."""
        return self._encode_begin(answer_id, number) + self._encode_choice(
            answer_id, number, {"content": text}
        )

    def encode_rest(self, answer: ChatAnswer) -> Iterator[bytes]:
        """Encodes what has not been sent of an answer."""
        for number, choice in enumerate(answer.choices):
            yield self._encode_begin(answer.id, number)
            for delta, more in self._list_deltas(choice):
                yield self._encode_choice(answer.id, number, delta, **more)
            yield self._encode_choice(
                answer.id, number, {}, choice.finish_reason, **_note_parse_error(choice)
            )
        if self._request.streams_usage:
            head = _make_head(self._request, answer.id, CHUNK)
            yield _encode_event({**head, "choices": [], "usage": answer.usage})
        yield STREAM_END

    def _list_deltas(self, choice: ChatChoice) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yields what is left of a choice to say, each with what stands beside it."""
        message = choice.message
        if reasoning := message.get("reasoning_content"):
            yield {"reasoning_content": reasoning}, {}
        logprobs = _make_logprobs(self._request, choice, self._tokenizer)
        content = (message.get("content") or "")[len(choice.shown) :]
        if content or logprobs:
            yield {"content": content}, {"logprobs": logprobs}
        for place, call in enumerate(message.get("tool_calls") or []):
            function = call["function"]
            begun = {**call, "index": place, "function": {"name": function["name"], "arguments": ""}}
            yield {"tool_calls": [begun]}, {}
            rest = {"index": place, "function": {"arguments": function["arguments"]}}
            yield {"tool_calls": [rest]}, {}

    def _encode_begin(self, answer_id: str, number: int) -> bytes:
        """Encodes the role of a choice, once."""
        if number in self._begun:
            return b""
        self._begun.add(number)
        return self._encode_choice(answer_id, number, {"role": "assistant", "content": ""})

    def _encode_choice(
        self, answer_id: str, number: int, delta: dict[str, Any], end: str | None = None, **more: Any
    ) -> bytes:
        choice = {"index": number, "delta": delta, "finish_reason": end, "logprobs": None, **more}
        usage = {"usage": None} if self._request.streams_usage else {}
        return _encode_event({**_make_head(self._request, answer_id, CHUNK), "choices": [choice], **usage})


def write_message(message: Message) -> dict[str, Any]:
    """Returns a reply as clients expect it: no content beside tool calls is null."""
    content = message.get("content")
    written: dict[str, Any] = {"role": "assistant", "content": content}
    if message.get("tool_calls"):
        written |= {"content": content or None, "tool_calls": message["tool_calls"]}
    if message.get("reasoning_content"):
        written["reasoning_content"] = message["reasoning_content"]
    return written


def _make_head(request: ChatRequest, answer_id: str, kind: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": request.model}


def _note_parse_error(choice: ChatChoice) -> dict[str, str]:
    return {} if choice.parse_error is None else {"parse_error": choice.parse_error}


def _make_logprobs(request: ChatRequest, choice: ChatChoice, tokenizer: Any) -> dict[str, Any] | None:
    """Returns the log-probabilities of all sampled tokens, those of reasoning and of the end included.

    No other candidates are listed, because the engine computes none.
    """
    if not request.has_logprobs:
        return None
    completion = choice.completion
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in completion.tokens]
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, completion.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _encode_event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
