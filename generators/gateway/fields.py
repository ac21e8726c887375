"""Fields of a JSON body: each reader returns a value of the right type, or refuses with field, rule and
value."""

from collections.abc import Mapping
from typing import Any

import msgspec

from generators.gateway.refusals import RequestRefused, refuse_field


class BodyFields:
    """The fields of one object. A field that is null counts as one that is missing."""

    def __init__(self, value: Any, path: str = "") -> None:
        """`path` precedes the names in errors: `sampling_params.`."""
        if not isinstance(value, dict):
            raise refuse_field(path.rstrip(".") or "the body", "a JSON object", value)
        self._values: Mapping[str, Any] = value
        self._path = path

    def read_any(self, name: str) -> Any:
        return self._values.get(name)

    def read_text(self, name: str, default: str) -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, "text")
        return value

    def read_flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def read_count(self, name: str, least: int, most: int) -> int | None:
        """Returns a whole number in [least, most]; None where the field is missing."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refuse(name, f"a whole number from {least} to {most}")
        return value

    def read_list(self, name: str) -> list[Any]:
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refuse(name, "a list")
        return value

    def require_value(self, name: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuses every value that is not allowed. Null and a missing field always are."""
        value = self._values.get(name)
        if value is None:
            return
        # True equals 1 in Python, and is no number in JSON.
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            return
        written = [msgspec.json.encode(one).decode() for one in allowed] or ["left out"]
        raise self.refuse(name, f"{' or '.join(dict.fromkeys(written))} ({why})")

    def refuse(self, name: str, rule: str) -> RequestRefused:
        return refuse_field(f"{self._path}{name}", rule, self._values.get(name))


def parse_body(body: bytes) -> BodyFields:
    """Raises RequestRefused for a body that is no JSON object."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise RequestRefused(400, f"the body must be JSON, got {len(body)} bytes: {reason}") from None
    return BodyFields(value)
