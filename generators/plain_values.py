"""Values of user code in plain types, and texts that show them. Nothing here trusts a value's own methods."""

import math
from collections.abc import Mapping
from typing import Any

from buffers.message_fields import MAX_FLOAT32

MAX_NAME = 200
"""Characters in the name of a component."""
MAX_ERROR = 2000
"""Characters of an error that travel to the buffer."""
MAX_DEPTH = 100
"""Levels of lists and dicts inside one another."""
_MAX_INTEGER = 2**63
VALUE_COST = 16
"""Characters that a value counts as: Python takes as long for it, and the generator looks at each."""


def make_plain(value: Any, path: str, budget: int = 16 << 20) -> Any:
    """Returns the value in JSON's types: numbers of numpy become Python's, tuples become lists.

    Raises ValueError that names `path` for anything else, for numbers that are not finite, and for more than
    `budget` characters, where each value counts as `VALUE_COST` of them.
    """
    return _PlainCopy(budget).copy_value(value, path, 0)


class _PlainCopy:
    """Copies a value, and counts what it copies."""

    def __init__(self, budget: int) -> None:
        self._budget = self._left = budget

    def copy_value(self, value: Any, path: str, depth: int) -> Any:
        self._spend(VALUE_COST, path)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._copy_text(value, path)
        if isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
            raise ValueError(f"{path} must be within ± 2^63, got {show_value(value)}")
        if isinstance(value, int):
            return int(value)
        if isinstance(value, list | tuple | Mapping) and depth >= MAX_DEPTH:
            raise ValueError(f"{path[:200]} must be at most {MAX_DEPTH} levels deep, got more")
        if isinstance(value, list | tuple):
            return [self.copy_value(one, f"{path}[{index}]", depth + 1) for index, one in enumerate(value)]
        if isinstance(value, Mapping):
            return {
                self._copy_key(key, path): self.copy_value(value[key], f"{path}[{key!r}]", depth + 1)
                for key in value
            }
        if isinstance(value, float) or _is_number(value):
            return _make_number(value, path)
        raise ValueError(f"{path} must be of JSON's types, got {show_value(value)}")

    def _copy_key(self, key: Any, path: str) -> str:
        if not isinstance(key, str):
            raise ValueError(f"keys of {path} must be text, got {show_value(key)}")
        return self._copy_text(key, f"a key of {path}")

    def _copy_text(self, text: str, path: str) -> str:
        self._spend(len(text), path)
        if not is_text(text):
            raise ValueError(f"{path} must be text that can be encoded, got {show_value(text)}")
        return str(text)

    def _spend(self, count: int, path: str) -> None:
        self._left -= count
        if self._left < 0:
            root = path.partition("[")[0]
            raise ValueError(
                f"{root} must be at most {self._budget} characters (each value counts as {VALUE_COST}), got "
                "more"
            )


def _is_number(value: Any) -> bool:
    """True for a number of numpy or torch, which has one value and no items."""
    has_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    return has_number and not isinstance(value, bytes | bytearray | complex)


def _make_number(value: Any, path: str) -> int | float:
    try:
        number = value.__index__() if hasattr(value, "__index__") and _is_whole(value) else float(value)
    except Exception as error:
        raise ValueError(
            f"{path} must be of JSON's types, got {show_value(value)} ({describe_error(error)})"
        ) from error
    if not math.isfinite(number):
        raise ValueError(f"{path} must be finite, got {number}")
    return int(number) if isinstance(number, int) else float(number)


def _is_whole(value: Any) -> bool:
    """True for an integer of numpy. A torch tensor of floats has `__index__` too, which raises."""
    try:
        value.__index__()
    except TypeError:
        return False
    return True


def check_number(what: str, value: Any) -> float:
    """Returns the value of anything that can be turned into one number: of Python, numpy or torch."""
    has_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    if isinstance(value, str | bytes | bytearray) or not has_number:
        raise ValueError(f"{what} must be a number, got {show_value(value)}")
    try:
        number = float(value)
    # An integer of more than 300 digits is finite, and too large: the last check says so.
    except OverflowError:
        number = MAX_FLOAT32 * 2
    except Exception as error:
        raise ValueError(
            f"{what} must be a number, got {show_value(value)} ({describe_error(error)})"
        ) from error
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    if abs(number) > MAX_FLOAT32:
        raise ValueError(f"{what} must be within ± 3.4e38 (it is kept in float32), got {show_value(value)}")
    return number


def show_value(value: Any) -> str:
    """Returns a value as an error shows it, also when its own `repr` raises."""
    try:
        text = repr(value[:300] if type(value) in (str, bytes) else value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({type(value).__name__})"


def is_text(name: str) -> bool:
    """False for a string with surrogates, which cannot be encoded."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def keep_text(text: str) -> str:
    """Returns the text with a question mark for each character that cannot be encoded."""
    return text.encode(errors="replace").decode()


def describe_error(error: BaseException) -> str:
    """Returns an error in at most `MAX_ERROR` characters that can be encoded, also when its own `str`
    raises."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__} (its text cannot be shown)"
    return keep_text(text[:MAX_ERROR])
