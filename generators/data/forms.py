"""Forms of rows: how benchmarks keep question and answer, and the prompt that is made of them.

A form gets a row as its file has it, and adds `prompt` and `ground_truth`. `data.form` names it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from generators.environment import Row

Form = Callable[[Row], Row]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
CHOOSE = (
    "Answer the following multiple-choice question. Think step by step. The last line of your reply must be "
    '"Answer: X", where X is the letter of the right choice.\n\n'
)
SHUFFLE_SEED = 0
"""The choices of GPQA stand in an order that this decides: the same in every run."""


def shape_gsm8k(row: Row) -> Row:
    """`question`, and `answer`: a solution whose last line is `#### NUMBER`."""
    solution = _read_text(row, "answer")
    if "####" not in solution:
        raise ValueError(f"answer must end with `#### NUMBER` in rows of gsm8k, got {solution[-200:]!r}")
    answer = solution.rpartition("####")[2].strip().replace(",", "")
    return {**row, "prompt": _read_text(row, "question") + BOXED, "ground_truth": answer}


def shape_problem(row: Row) -> Row:
    """`problem` or `question`, and `answer`: MATH-500, AIME, AMC."""
    question = _read_text(row, "problem" if "problem" in row else "question")
    answer = row.get("answer")
    if not isinstance(answer, str | int | float) or answer == "":
        raise ValueError(f"answer must be a text or a number, got {str(answer)[:200]!r}")
    # AMC keeps whole numbers as 27.0.
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return {**row, "prompt": question + BOXED, "ground_truth": str(answer)}


def shape_mmlu_pro(row: Row) -> Row:
    """`question`, `options` in their order, and `answer`, a letter."""
    options, letter = row.get("options"), _read_text(row, "answer").strip()
    if not isinstance(options, Sequence) or isinstance(options, str) or not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"options must be a list of 2 to {len(LETTERS)} texts, got {str(options)[:200]}")
    # Version 1.1 fills up to ten options.
    choices = [str(option) for option in options if option != "N/A"]
    if letter not in list(LETTERS[: len(choices)]):
        raise ValueError(f"answer must be the letter of one of {len(choices)} options, got {letter!r}")
    prompt = write_choices(_read_text(row, "question"), choices)
    return {**row, "prompt": prompt, "ground_truth": letter}


def shape_gpqa(row: Row) -> Row:
    """`Question`, `Correct Answer` and `Incorrect Answer 1` to `3`.

    The choices are sorted by a digest of the question and the choice, so their order depends on nothing else.
    """
    question = _read_text(row, "Question").strip()
    names = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
    choices = [_read_text(row, name).strip() for name in names]

    def sort_key(number: int) -> tuple[int, int]:
        text = f"{SHUFFLE_SEED}\n{question}\n{choices[number]}"
        return xxhash.xxh3_64_intdigest(text.encode()), number

    order = sorted(range(len(choices)), key=sort_key)
    prompt = write_choices(question, [choices[number] for number in order])
    return {**row, "prompt": prompt, "ground_truth": LETTERS[order.index(0)]}


FORMS: dict[str, Form] = {
    "gsm8k": shape_gsm8k,
    "problem": shape_problem,
    "mmlu_pro": shape_mmlu_pro,
    "gpqa": shape_gpqa,
}


def find_form(name: str) -> Form:
    """Raises ValueError for a name that there is not."""
    if name not in FORMS:
        raise ValueError(f"data.form must be one of {', '.join(FORMS)}, got {name!r}")
    return FORMS[name]


def write_choices(question: str, choices: Sequence[str]) -> str:
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
    return f"{CHOOSE}{question}\n\n{listed}"


def _read_text(row: Row, column: str) -> str:
    value: Any = row.get(column)
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"rows of this form must have a text in {column!r}, got the columns {', '.join(row)}"
        )
    return value
