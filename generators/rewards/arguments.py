"""Checks of a reward part's arguments: each names the field, the rule and the value."""

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit


def check_number(
    field: str,
    value: Any,
    lowest: float = -math.inf,
    *,
    above: float | None = None,
    highest: float = math.inf,
) -> float:
    """Returns a finite number within [lowest, highest], and above `above`. Raises ValueError for another."""
    rules = ["be a finite number"]
    if lowest > -math.inf:
        rules.append(f"at least {lowest:g}")
    if above is not None:
        rules.append(f"above {above:g}")
    if highest < math.inf:
        rules.append(f"at most {highest:g}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not lowest <= value <= highest or (above is not None and value <= above):
        raise ValueError(f"{field} must {', '.join(rules)}, got {value!r}")
    return float(value)


def check_count(field: str, value: Any, lowest: int = 1) -> int:
    """Returns a whole number of at least `lowest`. Raises ValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ValueError(f"{field} must be a whole number of at least {lowest}, got {value!r}")
    return value


def check_flag(field: str, value: Any) -> bool:
    """Returns a truth value. Raises ValueError for anything else."""
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be true or false, got {value!r}")
    return value


def check_text(field: str, value: Any) -> str:
    """Returns a text that is not empty. Raises ValueError for anything else."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field} must be a text that is not empty, got {value!r}")
    return value


def check_url(field: str, value: Any) -> str:
    """Returns the address of a server without a slash at its end. Raises ValueError for another text."""
    try:
        parts = urlsplit(check_text(field, value))
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ValueError(f"{field} must be the address of a server (http://HOST:PORT/…), got {value!r}")
    return str(value).rstrip("/")


def read_key(field: str, variable: Any) -> str | None:
    """Returns the key that an environment variable holds; None where no variable is named.

    Raises ValueError where the variable is not set. The key itself is in no message.
    """
    if variable is None:
        return None
    key = os.environ.get(check_text(field, variable), "")
    if not key:
        raise ValueError(f"{field} must name an environment variable that is set, got {variable!r}")
    return key


def check_names(field: str, given: Mapping[str, Any], function: Callable[..., Any], owner: str) -> None:
    """Checks the names of keyword arguments for `function`. Raises ValueError that names what is missing, or
    unknown."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    known = [one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    for name in given:
        if name not in known:
            raise ValueError(f"{field} must have arguments of {owner}: {join_names(known)}, got {name!r}")
    for one in parameters:
        if one.default is one.empty and one.name in known and one.name not in given:
            raise ValueError(f"{field}.{one.name} must be given for {owner}, got nothing")


def join_names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
