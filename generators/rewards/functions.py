"""Reward functions of a user's own, as `module:function` or `path.py:function`.

A function takes (row, reply), or has the parameters of verl's `compute_score`: data_source, solution_str,
ground_truth, extra_info. It returns a number, or a dict with a number at `score` or `reward`; the dict's
other numbers are details for the record. It may be async.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from generators.environment import Row
from generators.rewards.part import Rating
from generators.rewards.rows import read_reference

VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


class FunctionPart:
    """Rates a reply by a function."""

    def __init__(self, field: str, use: str, arguments: Mapping[str, Any]) -> None:
        """`arguments` are keyword arguments for each call. Raises ValueError that names `field`."""
        self._function = load_function(f"{field}.use", use)
        self._arguments = dict(arguments)
        self.is_async = inspect.iscoroutinefunction(self._function)
        try:
            signature = inspect.signature(self._function)
        except ValueError:
            # Some functions written in C tell nothing about their parameters.
            self._is_verl = False
            return
        self._is_verl = {"solution_str", "ground_truth"} <= set(signature.parameters)
        try:
            if self._is_verl:
                signature.bind(**dict.fromkeys(VERL_PARAMETERS), **self._arguments)
            else:
                signature.bind(None, None, **self._arguments)
        except TypeError as error:
            raise ValueError(
                f"{field}.use must name a function of (row, reply) or of ({', '.join(VERL_PARAMETERS)}) that "
                f"takes the arguments {sorted(self._arguments)}, got {use!r} with {signature}: {error}"
            ) from error

    def rate_reply(self, row: Row, reply: str) -> Rating | Awaitable[Rating]:
        result = self._call_function(row, reply)
        return _await_rating(result) if self.is_async else read_rating(result)

    def _call_function(self, row: Row, reply: str) -> Any:
        if not self._is_verl:
            return self._function(row, reply, **self._arguments)
        return self._function(
            data_source=row.get("data_source", ""),
            solution_str=reply,
            ground_truth=read_reference(row),
            extra_info=row.get("extra_info") or {},
            **self._arguments,
        )


async def _await_rating(result: Awaitable[Any]) -> Rating:
    return read_rating(await result)


def read_rating(result: Any) -> Rating:
    """Reads what a function returned. Text in a dict (verl's `pred`) is no figure, and is left out.

    Raises ValueError for a dict without `score` and `reward`.
    """
    if not isinstance(result, Mapping):
        return Rating(result)
    for name in ("score", "reward"):
        if name in result:
            others = {key: value for key, value in result.items() if key != name}
            return Rating(result[name], {key: value for key, value in others.items() if _is_figure(value)})
    raise ValueError(f"a reward's dict must have a number at score or reward, got {sorted(map(str, result))}")


def _is_figure(value: Any) -> bool:
    return not isinstance(value, str | bytes) and (hasattr(value, "__float__") or hasattr(value, "__index__"))


def load_function(field: str, name: str) -> Callable[..., Any]:
    """Returns the function that `module:function` or `path.py:function` names. Raises ValueError that names
    `field`, the rule and the value."""
    place, _, function_name = name.rpartition(":")
    try:
        module = _import_file(place) if place.endswith(".py") else importlib.import_module(place)
        function = getattr(module, function_name)
    # The user's file may raise anything while it is imported.
    except Exception as error:
        raise ValueError(
            f"{field} must name a function that can be imported, got {name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{field} must name a function, got {name!r}, which is a {type(function).__name__}")
    loaded: Callable[..., Any] = function
    return loaded


def _import_file(place: str) -> Any:
    """Imports a file under a name that follows from its path, once a process."""
    path = Path(place).expanduser().resolve()
    name = f"slipstream_rewards_{path.stem}_{xxhash.xxh3_64_hexdigest(str(path).encode())}"
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, path)
        assert specification is not None and specification.loader is not None, path
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        try:
            specification.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
