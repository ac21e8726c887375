"""Refused requests, in OpenAI's form: a status, and a sentence with field, rule and value."""

from typing import Any

import msgspec

MAX_TEXT = 1000
"""Characters of a refusal."""


class RequestRefused(Exception):
    """A request that gets an error for an answer. The text says which field breaks which rule."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.field, self.headers = status, code, field, headers

    def encode_body(self) -> bytes:
        """Returns the JSON that clients of OpenAI understand."""
        error: dict[str, Any] = {
            "message": str(self)[:MAX_TEXT].encode(errors="replace").decode(),
            "type": "server_error" if self.status >= 500 else "invalid_request_error",
            "param": self.field,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def refuse_field(field: str, rule: str, got: Any) -> RequestRefused:
    """Returns the refusal of a field's value. `got` is shown in at most 200 characters."""
    return RequestRefused(400, f"{field} must be {rule}, got {show_json(got)}", field=field)


def show_json(value: Any) -> str:
    """Returns a value of JSON as its sender wrote it, cut to 200 characters."""
    try:
        text = msgspec.json.encode(value).decode(errors="replace")
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}…"
