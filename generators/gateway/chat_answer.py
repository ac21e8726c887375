"""The answer to a chat request in OpenAI's form, whole or as the chunks of a stream.

The tokens of a reply are all known when its first chunk is sent: a stream has the form that clients expect,
and begins when the reply is complete.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    message: Message
    """As the client gets it."""
    completion: Completion
    """As it is recorded."""
    parse_error: str | None

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
        **_make_head(request, answer, "chat.completion"),
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


def encode_chunks(request: ChatRequest, answer: ChatAnswer, tokenizer: Any) -> Iterator[bytes]:
    """Yields server-sent events: for each choice its role, what it says, its tool calls and its end."""
    head = _make_head(request, answer, "chat.completion.chunk")
    usage = {"usage": None} if request.streams_usage else {}

    def encode_event(number: int, delta: dict[str, Any], end: str | None = None, **more: Any) -> bytes:
        choice = {"index": number, "delta": delta, "finish_reason": end, "logprobs": None, **more}
        return _encode_event({**head, "choices": [choice], **usage})

    for number, choice in enumerate(answer.choices):
        message = choice.message
        yield encode_event(number, {"role": "assistant", "content": ""})
        if reasoning := message.get("reasoning_content"):
            yield encode_event(number, {"reasoning_content": reasoning})
        logprobs = _make_logprobs(request, choice, tokenizer)
        if message.get("content") or logprobs:
            yield encode_event(number, {"content": message.get("content") or ""}, logprobs=logprobs)
        for place, call in enumerate(message.get("tool_calls") or []):
            function = call["function"]
            begun = {**call, "index": place, "function": {"name": function["name"], "arguments": ""}}
            yield encode_event(number, {"tool_calls": [begun]})
            rest = {"index": place, "function": {"arguments": function["arguments"]}}
            yield encode_event(number, {"tool_calls": [rest]})
        yield encode_event(number, {}, choice.finish_reason, **_note_parse_error(choice))
    if request.streams_usage:
        yield _encode_event({**head, "choices": [], "usage": answer.usage})
    yield STREAM_END


def write_message(message: Message) -> dict[str, Any]:
    """Returns a reply as clients expect it: no content beside tool calls is null."""
    content = message.get("content")
    written: dict[str, Any] = {"role": "assistant", "content": content}
    if message.get("tool_calls"):
        written |= {"content": content or None, "tool_calls": message["tool_calls"]}
    if message.get("reasoning_content"):
        written["reasoning_content"] = message["reasoning_content"]
    return written


def _make_head(request: ChatRequest, answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": int(time.time()), "model": request.model}


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
