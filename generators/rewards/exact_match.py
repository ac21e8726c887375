"""Exact match: 1 where a reply's answer is the row's right one, or one of several, else 0."""

import re
import string
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from generators.environment import Row
from generators.rewards.answers import AnswerFinder, list_references
from generators.rewards.arguments import check_flag, check_text
from generators.rewards.part import Rating

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
NO_SIGNS = str.maketrans("", "", ",$% ")


class ExactMatchPart:
    """Compares a reply's answer with the row's right one."""

    is_async = False

    def __init__(
        self,
        reference: str | None = None,
        find: str = "all",
        compare: str = "text",
        contains: bool = False,
        after_thinking: bool = False,
    ) -> None:
        """`reference`: column of the right answer, or of a list of right ones. `find`, `after_thinking`: as
        `AnswerFinder` has them. `compare`: one of `FORMS`. `contains`: the right answer need only stand
        within the reply's.

        Raises ValueError for an argument that breaks its rule.
        """
        self._reference = None if reference is None else check_text("reference", reference)
        self._finder = AnswerFinder(find, after_thinking)
        if compare not in FORMS:
            raise ValueError(f"compare must be one of {', '.join(FORMS)}, got {compare!r}")
        self._contains = check_flag("contains", contains)
        if self._contains and compare == "number":
            raise ValueError("contains must be false with compare=number, got True")
        self._name, self._make_form = compare, FORMS[compare]

    def rate_reply(self, row: Row, reply: str) -> Rating:
        """Raises ValueError where the row has no right answer of the form that is compared."""
        rights = self._read_rights(list_references(row, self._reference))
        answer = self._finder.find_answer(reply)
        given = None if answer is None else self._make_form(answer)
        if given is None:
            return Rating(0.0)
        return Rating(float(any(right in given if self._contains else right == given for right in rights)))

    def _read_rights(self, rights: Sequence[Any]) -> list[Any]:
        forms = [self._make_form(self._finder.find_reference(str(right))) for right in rights]
        # One of several ("The The" among the names of a band) may leave nothing.
        if not (left := [form for form in forms if form is not None and form != ""]):
            raise ValueError(
                f"a right answer must have something to compare as {self._name}, got {str(rights)[:200]}"
            )
        return left


def normalize_words(text: str) -> str:
    """Returns the words in lower case, without punctuation and articles (as SQuAD and verl's search tasks
    compare them)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def read_number(text: str) -> Decimal | None:
    """Returns a number, written with or without thousands separators, a dollar or a percent sign, and a full
    stop at the end; None for anything else."""
    try:
        number = Decimal(text.translate(NO_SIGNS).rstrip("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


FORMS: dict[str, Callable[[str], Any]] = {
    "text": lambda text: text,
    "words": normalize_words,
    "number": read_number,
}
