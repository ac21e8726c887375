"""The checks of scores: user code may return anything, and a trajectory holds finite float32 numbers."""

import math
from collections.abc import Mapping
from typing import Any

from buffers.message_fields import MAX_FLOAT32
from buffers.trajectory import GREEDY
from generators.task import Score

MAX_COMPONENTS = 64
MAX_NAME = 200
"""Characters in the name of a component."""
MAX_ERROR = 2000
"""Characters of an error that travel to the buffer."""


def check_score(score: Any) -> Score:
    """Returns the score in plain floats. Raises ValueError for a score that a trajectory cannot hold."""
    if not isinstance(score, Score):
        raise ValueError(f"score must be a generators.task.Score, got {_show_value(score)}")
    components = score.components
    if not isinstance(components, Mapping):
        raise ValueError(f"components must be a dict of numbers by name, got {_show_value(components)}")
    if len(components) > MAX_COMPONENTS:
        raise ValueError(f"components must be at most {MAX_COMPONENTS}, got {len(components)}")
    for name in components:
        if not isinstance(name, str) or len(name) > MAX_NAME or name == GREEDY or not _is_text(name):
            raise ValueError(
                f"names of components must be text of at most {MAX_NAME} characters other than {GREEDY!r}, "
                f"got {_show_value(name)}"
            )
    checked = {name: _check_number(f"components[{name!r}]", value) for name, value in components.items()}
    return Score(_check_number("reward", score.reward), checked)


def _check_number(what: str, value: Any) -> float:
    """Returns the value of anything that can be turned into one number: of Python, numpy or torch."""
    has_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    if isinstance(value, str | bytes | bytearray) or not has_number:
        raise ValueError(f"{what} must be a number, got {_show_value(value)}")
    try:
        number = float(value)
    # An integer of more than 300 digits is finite, and too large: the last check says so.
    except OverflowError:
        number = MAX_FLOAT32 * 2
    except Exception as error:
        raise ValueError(
            f"{what} must be a number, got {_show_value(value)} ({describe_error(error)})"
        ) from error
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    if abs(number) > MAX_FLOAT32:
        raise ValueError(f"{what} must be within ± 3.4e38 (it is kept in float32), got {_show_value(value)}")
    return number


def _show_value(value: Any) -> str:
    """Returns a value as an error shows it, also when its own `repr` raises."""
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({type(value).__name__})"


def _is_text(name: str) -> bool:
    """False for a string with surrogates, which cannot be encoded."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def describe_error(error: BaseException) -> str:
    """Returns an error in at most `MAX_ERROR` characters that can be encoded, also when its own `str`
    raises."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__} (its text cannot be shown)"
    return text[:MAX_ERROR].encode(errors="replace").decode()
