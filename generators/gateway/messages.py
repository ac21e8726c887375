"""Messages and tools as clients send them, in the one form that renderers get and that is compared.

Clients echo a reply with fields added, dropped or set to null: `refusal`, `audio`, `annotations`, ids,
arguments written with other spaces. None of that changes what the reply was.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from generators.environment import Message, ToolSpec
from generators.gateway.fields import BodyFields
from generators.gateway.refusals import RequestRefused
from generators.turn_checks import check_tools

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""By the role that a client writes: the one that chat templates know."""
MAX_MESSAGES = 10_000


def read_messages(body: BodyFields) -> list[Message]:
    values = body.read_list("messages")
    if not 1 <= len(values) <= MAX_MESSAGES:
        raise RequestRefused(
            400, f"messages must be 1 to {MAX_MESSAGES}, got {len(values)}", field="messages"
        )
    return [read_message(value, f"messages[{number}].") for number, value in enumerate(values)]


def read_message(value: Any, path: str) -> Message:
    """Returns a message of role, text, and where there are any tool calls, reasoning, name and
    tool_call_id."""
    fields = BodyFields(value, path)
    role = fields.read_text("role", "")
    if role not in ROLES:
        raise fields.refuse("role", f"one of {', '.join(ROLES)}")
    message: Message = {"role": ROLES[role], "content": _read_content(fields, role)}
    for name in ("name", "tool_call_id"):
        if text := fields.read_text(name, ""):
            message[name] = text
    if role == "assistant":
        # vLLM gives `reasoning` beside the older `reasoning_content`, and clients echo either.
        reasoning = fields.read_text("reasoning_content", "") or fields.read_text("reasoning", "")
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = fields.read_list("tool_calls")
        if calls:
            message["tool_calls"] = [
                _read_call(call, f"{path}tool_calls[{number}].") for number, call in enumerate(calls)
            ]
    return message


def read_tools(body: BodyFields) -> list[ToolSpec]:
    values = body.read_list("tools")
    try:
        return check_tools(values)
    except ValueError as error:
        raise RequestRefused(400, str(error), field="tools") from None


def _read_content(fields: BodyFields, role: str) -> str:
    content = fields.read_any("content")
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.refuse("content", "text, or a list of text parts")
    texts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise fields.refuse("content", 'text, or a list of {"type": "text", "text": ...}')
        texts.append(part["text"])
    return "".join(texts)


def _read_call(value: Any, path: str) -> dict[str, Any]:
    fields = BodyFields(value, path)
    function = BodyFields(fields.read_any("function"), f"{path}function.")
    name = function.read_text("name", "")
    if not name:
        raise function.refuse("name", "the name of a tool")
    call = {
        "type": "function",
        "function": {"name": name, "arguments": function.read_text("arguments", "")},
    }
    return {"id": identity, **call} if (identity := fields.read_text("id", "")) else call


class ConversationKeys:
    """Digests of the beginnings of a conversation: one for each message, of it and all before it.

    Two beginnings have the same digest when they mean the same to a template. Ids of calls and reasoning are
    left out: clients drop them.
    """

    def __init__(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        self.keys: list[bytes] = []
        key = _digest(b"", msgspec.json.encode(list(tools), order="deterministic"))
        for message in messages:
            key = _digest(key, _write_compared(message))
            self.keys.append(key)

    def append_reply(self, reply: Message) -> bytes:
        """Returns the digest of the conversation with a reply behind it."""
        return _digest(self.keys[-1], _write_compared(reply))


def _write_compared(message: Message) -> bytes:
    calls = [
        [call["function"]["name"], _parse_arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls") or []
    ]
    compared = [
        message["role"],
        message.get("content") or "",
        message.get("name"),
        message.get("tool_call_id"),
        calls,
    ]
    return msgspec.json.encode(compared, order="deterministic")


def _parse_arguments(arguments: Any) -> Any:
    """Returns the value that the arguments spell, or their text where they are no JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
        return arguments


def _digest(before: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16, key=before).digest()
