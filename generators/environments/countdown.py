"""The countdown game: an equation that makes a number of three or four others, each used once.

    "Using the numbers [44, 19, 35], create an equation that equals 98 …"
        ─▶ "<think>…</think>\n<answer>44 + 19 + 35</answer>"

Prompt and rewards are those of nano-aha-moment (McGill NLP, 2025), halved so that they are at most 1. Its
problems come from a data set; here they are drawn in the way that made it.
"""

import operator
import random
import re
from fractions import Fraction

from generators.environment import Message, Row, Turn
from generators.environments._arithmetic import compute_expression
from generators.environments._replies import read_text, say
from generators.splits import draw_for_split

SYSTEM = (
    "You are a helpful assistant. You first think about the reasoning process in the mind and then provide "
    "the user with the answer."
)
QUESTION = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic "
    "operations (+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. "
    "And return the final equation and answer in <answer> </answer> tags, for example "
    "<answer>(1 + 2) / (3 * 5)</answer>."
)
LARGEST, TARGETS = 99, range(10, 101)
FORM = re.compile(r"(?:<think>)?(?:(?!</?think>).)*</think>\n<answer>(.*?)</answer>", re.DOTALL)
"""A whole reply that keeps the form. The words before its thinking may be the prompt's."""
ALLOWED = re.compile(r"[0-9+\-*/().\s]+")


class Task:
    """Problems of `min_numbers` to `max_numbers` numbers. None of `eval` is one of `train`."""

    name = "countdown"

    def __init__(self, min_numbers: int = 3, max_numbers: int = 4) -> None:
        if not 2 <= min_numbers <= max_numbers <= 6:
            raise ValueError(
                "min_numbers must be from 2 to max_numbers, which is at most 6, got "
                f"{min_numbers} and {max_numbers}"
            )
        self._counts = min_numbers, max_numbers

    def make_row(self, split: str, index: int, seed: int) -> Row:
        return draw_for_split(self._draw_problem, str, split, random.Random(f"{seed}/{split}/{index}"))

    def make_environment(self, row: Row) -> "Problem":
        return Problem()

    def _draw_problem(self, rng: random.Random) -> Row:
        """Returns numbers and a target that they can make: the value of an expression that is drawn."""
        while True:
            numbers = [rng.randint(1, LARGEST) for _ in range(rng.randint(*self._counts))]
            value = combine_numbers([Fraction(number) for number in numbers], rng)
            if value.denominator == 1 and int(value) in TARGETS:
                return {"nums": numbers, "target": int(value)}


def combine_numbers(values: list[Fraction], rng: random.Random) -> Fraction:
    """Joins two of the values by an operation, again and again, until one is left."""
    values = list(values)
    while len(values) > 1:
        rng.shuffle(values)
        one, other = values.pop(), values.pop()
        choices = [operator.add, operator.sub, operator.mul, *([operator.truediv] if other else [])]
        values.append(rng.choice(choices)(one, other))
    return values[0]


class Problem:
    """One problem and its answer."""

    def reset(self, row: Row, seed: int) -> Turn:
        self._numbers, self._target = row["nums"], row["target"]
        question = QUESTION.format(numbers=self._numbers, target=self._target)
        return Turn(messages=[{"role": "system", "content": SYSTEM}, *say(question)])

    def step(self, reply: Message) -> Turn:
        text = read_text(reply)
        parts = {"format": rate_form(text), "equation": self._rate_equation(text)}
        return Turn(reward=sum(parts.values()) / 2, components=parts, done=True)

    def close(self) -> None:
        """Does nothing: a problem holds nothing."""

    def _rate_equation(self, text: str) -> float:
        """Returns 1 for an equation that uses each number once and makes the target."""
        found = re.search(r"<answer>(.*?)</answer>", text)
        equation = found.group(1).strip() if found else ""
        used = sorted(map(int, re.findall(r"[0-9]{1,9}", equation)))
        if used != sorted(self._numbers) or not ALLOWED.fullmatch(equation):
            return 0.0
        try:
            return float(compute_expression(equation) == str(self._target))
        except ValueError:
            return 0.0


def rate_form(text: str) -> float:
    """Returns 1 for thinking and then an equation, ½ where the answer is no equation, else 0."""
    found = FORM.fullmatch(text)
    return 0.0 if found is None else 1.0 if ALLOWED.fullmatch(found.group(1).strip()) else 0.5
