"""Answers of an engine's ranks, which are processes: each says whether it has done what it was asked, or
which error it has met.

vLLM hands an exception of a worker on as a RuntimeError, of the first rank that has one, and leaves the other
ranks' answers where the next question would find them. So ranks raise nothing; they answer.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sync.manifest import DigestMismatch, EngineMismatch

GRAVEST_FIRST: tuple[type[Exception], ...] = (RuntimeError, EngineMismatch, DigestMismatch, FileNotFoundError)
"""Errors that keep their kind on the way. All others become RuntimeError."""


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """The answer of one rank. It holds plain values only."""

    value: Any = None
    error: str = ""
    """Name of the error's class; empty where there is none."""
    message: str = ""


def answer_call(call: Callable[[], Any]) -> RankAnswer:
    """Calls, and returns what came of it."""
    try:
        return RankAnswer(call())
    except (EngineMismatch, DigestMismatch, FileNotFoundError) as error:
        return RankAnswer(error=type(error).__name__, message=str(error))
    except Exception as error:
        return RankAnswer(error=RuntimeError.__name__, message=f"{error!r}\n{traceback.format_exc()}")


def read_answers(answers: Sequence[RankAnswer]) -> list[Any]:
    """Returns the values, by rank. Raises the gravest error that any rank has met, with the ranks that have
    met it."""
    for kind in GRAVEST_FIRST:
        ranks: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            if answer.error == kind.__name__:
                ranks.setdefault(answer.message, []).append(rank)
        if ranks:
            raise kind("; ".join(f"rank {_list_ranks(some)}: {message}" for message, some in ranks.items()))
    return [answer.value for answer in answers]


def _list_ranks(ranks: Sequence[int]) -> str:
    return " and ".join(map(str, ranks))
