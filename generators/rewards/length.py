"""The length of replies, and how much they repeat themselves. Only groups come with their tokens."""

from collections.abc import Sequence
from typing import Any

from generators.environment import Row
from generators.rewards.arguments import check_count, check_number
from generators.rewards.part import GroupReply, Rating

UNITS = ("tokens", "words", "characters")


class LengthPart:
    """Gives 1 within bounds, and less the farther a reply is beyond them; without bounds the length."""

    is_async = needs_tokens = False

    def __init__(
        self,
        unit: str = "tokens",
        least: int | None = None,
        most: int | None = None,
        falloff: float | None = None,
    ) -> None:
        """`least`, `most`: bounds, either or both. `falloff`: how far beyond them the number falls to 0;
        None: at once.

        Raises ValueError for an argument that breaks its rule.
        """
        self._unit = check_unit(unit, UNITS)
        self._least = None if least is None else check_count("least", least, 0)
        self._most = None if most is None else check_count("most", most, self._least or 0)
        self._falloff = None if falloff is None else check_number("falloff", falloff, above=0)
        if falloff is not None and least is None and most is None:
            raise ValueError(f"falloff must be null without least and most, got {falloff!r}")

    def rate_group(self, row: Row, replies: Sequence[GroupReply]) -> list[Rating | None]:
        return [Rating(self._rate_length(self._measure(one))) for one in replies]

    def _measure(self, reply: GroupReply) -> int:
        if self._unit == "tokens":
            return reply.num_tokens
        return len(reply.text.split()) if self._unit == "words" else len(reply.text)

    def _rate_length(self, length: int) -> float:
        if self._least is None and self._most is None:
            return float(length)
        beyond = max((self._least or 0) - length, 0 if self._most is None else length - self._most, 0)
        return float(beyond == 0) if self._falloff is None else max(0.0, 1 - beyond / self._falloff)


class RepetitionPart:
    """Gives the share of a reply's n-grams that have occurred in it before: 0 where none has."""

    is_async = False

    def __init__(self, unit: str = "tokens", ngram: int = 3) -> None:
        """Raises ValueError for an argument that breaks its rule."""
        self._unit, self._ngram = check_unit(unit, UNITS[:2]), check_count("ngram", ngram)
        self.needs_tokens = self._unit == "tokens"

    def rate_group(self, row: Row, replies: Sequence[GroupReply]) -> list[Rating | None]:
        return [
            Rating(share_repeated(one.tokens if self.needs_tokens else one.text.lower().split(), self._ngram))
            for one in replies
        ]


def share_repeated(items: Sequence[Any], ngram: int) -> float:
    """Returns 1 − different n-grams / n-grams; 0 where there are no n-grams (Yeo et al., 2025, arXiv
    2502.03373, appendix C.2)."""
    ngrams = [tuple(items[start : start + ngram]) for start in range(len(items) - ngram + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def check_unit(unit: Any, units: Sequence[str]) -> str:
    if unit not in units:
        raise ValueError(f"unit must be one of {', '.join(units)}, got {unit!r}")
    return str(unit)
