"""A number game: the policy guesses all digits at once, and hears for each whether it was low, high or right.

    "Guess my 3 digits, 4 tries:" ─▶ "551" ─▶ "5 low, 5 right, 1 high:" ─▶ "850" ─▶ …

Who halves what is left of each digit wins every game in four tries. Who does not listen wins one in 250.
"""

import random
import re
from collections.abc import Iterator

from generators.environment import Message, Row, Turn
from generators.environments._replies import read_text, say
from generators.splits import draw_for_split

NOISE = 0.2
"""Share of the digits that the weak player of `example_conversations` guesses blindly."""


class Task:
    """Games of one length. The secret numbers of `eval` are never those of `train`."""

    name = "guess_number"

    def __init__(self, digits: int = 3, tries: int = 4) -> None:
        if not 2 <= digits <= 9:
            raise ValueError(f"digits must be from 2 to 9, got {digits}")
        if tries < 1:
            raise ValueError(f"tries must be at least 1, got {tries}")
        self._digits, self._tries = digits, tries

    def make_row(self, split: str, index: int, seed: int) -> Row:
        return {"secret": self._draw_secret(split, random.Random(f"{seed}/{split}/{index}"))}

    def make_environment(self, row: Row) -> "NumberGame":
        return NumberGame(self._tries)

    def example_conversations(self, split: str, seed: int) -> Iterator[list[Message]]:
        """Yields games of a weak player without end. It knows the way, but guesses one digit in five
        blindly."""
        rng = random.Random(seed)
        while True:
            row = {"secret": self._draw_secret(split, rng)}
            yield _play_weakly(self.make_environment(row), row, rng)

    def _draw_secret(self, split: str, rng: random.Random) -> str:
        return draw_for_split(self._draw_number, str, split, rng)

    def _draw_number(self, rng: random.Random) -> str:
        return f"{rng.randrange(10**self._digits):0{self._digits}d}"


class NumberGame:
    """One game. A reply counts as a guess when it holds as many digits as the secret, whatever stands between
    them. Any other reply is a lost try."""

    def __init__(self, tries: int) -> None:
        self._tries_left = tries
        self._secret = ""

    def reset(self, row: Row, seed: int) -> Turn:
        self._secret = row["secret"]
        return Turn(messages=say(f"Guess my {len(self._secret)} digits, {self._tries_left} tries:"))

    def step(self, reply: Message) -> Turn:
        guess = "".join(re.findall("[0-9]", read_text(reply)))
        self._tries_left -= 1
        won = float(guess == self._secret)
        if won or not self._tries_left:
            return Turn(reward=won, components={"won": won}, done=True)
        if len(guess) != len(self._secret):
            return Turn(messages=say(f"{len(self._secret)} digits:"))
        hints = (
            f"{digit} {_compare(digit, right)}" for digit, right in zip(guess, self._secret, strict=True)
        )
        return Turn(messages=say(f"{', '.join(hints)}:"))

    def close(self) -> None:
        """Does nothing: a game holds nothing."""


def _compare(digit: str, right: str) -> str:
    return "right" if digit == right else "low" if digit < right else "high"


def _play_weakly(game: NumberGame, row: Row, rng: random.Random) -> list[Message]:
    """Plays a game, and returns the conversation. Each digit is the middle of what is left for it, or any
    digit at all."""
    turn = game.reset(row, seed=0)
    conversation, left = list(turn.messages), [(0, 9) for _ in row["secret"]]
    while not turn.done:
        guess = [rng.randrange(10) if rng.random() < NOISE else (low + high + 1) // 2 for low, high in left]
        reply: Message = {"role": "assistant", "content": "".join(map(str, guess))}
        turn = game.step(reply)
        conversation += [reply, *turn.messages]
        left = [
            _narrow(span, digit, int(right))
            for span, digit, right in zip(left, guess, row["secret"], strict=True)
        ]
    return conversation


def _narrow(span: tuple[int, int], digit: int, right: int) -> tuple[int, int]:
    """Returns what is left of a digit's span after a guess."""
    low, high = span
    if digit == right:
        return digit, digit
    return (max(low, digit + 1), high) if digit < right else (low, min(high, digit - 1))
