"""Wordle: the policy guesses a word of five letters in six tries, and hears for each letter how near it was.

    "… Enter your guess to begin." ─▶ "[crane]" ─▶ "| C R A N E |, | X Y X X G |, 5 guesses left" ─▶ …

Words, marks and rewards are those of TextArena's `Wordle-v0`, with one difference: a reply that is no guess
costs a try, and never ends the game.
"""

import random
import re
from pathlib import Path

from generators.environment import Message, Row, Turn
from generators.environments._replies import read_text, say
from generators.splits import draw_for_split

LETTERS, TRIES = 5, 6
SYSTEM = (
    "You are a competitive game player. Read the game instructions carefully. Think step by step first, then "
    "give your guess as the only word in square brackets."
)
RULES = (
    "You are playing Wordle.\n"
    f"A secret {LETTERS}-letter word has been chosen. You have {TRIES} attempts to guess it.\n"
    "For each guess, wrap your word in square brackets (e.g., '[apple]').\n"
    "Feedback for each letter will be given as follows:\n"
    "  - G (green): correct letter in the correct position\n"
    "  - Y (yellow): letter exists in the word but in the wrong position\n"
    "  - X (wrong): letter is not in the word\n"
    "Enter your guess to begin."
)
WORDS = (  # noqa: SIM905
    "about after again among angle angry apple awake basin berry birth black blade blood board brain "
    "brass bread brick brown brush cause chain chalk cheap chest clean clear clock cloth cloud cough "
    "cover crack crime cruel crush curve death dirty doubt drain dress drink early earth equal error "
    "event every false field fight first fixed flame flesh floor force frame front fruit glass glove "
    "grain grass great green group guide happy heart heavy horse house jewel judge knife laugh level "
    "light limit linen loose metal money month mouth music nerve night noise north offer order other "
    "owner paint paper paste peace place plane plant plate point power price print quick quiet quite "
    "range ready right river rough round scale screw sense shade shake shame sharp sheep shelf shirt "
    "shock short skirt slope smash smell smile smoke snake solid sound south space spade spoon stage "
    "stamp start steam steel stick stiff still stone store story sugar sweet table taste there thick "
    "thing thumb tight tired tooth touch tower track trade train trick under value verse voice waste "
    "watch water wheel where while white whole woman world wound wrong young"
).split()


class Task:
    """Games with the words of a list. The secret words of `eval` are never those of `train`."""

    name = "wordle"

    def __init__(self, words: str | None = None) -> None:
        """`words`: a file with the secret words, one a line. Null: common words that come with the task."""
        self._words = WORDS if words is None else read_words(Path(words))

    def make_row(self, split: str, index: int, seed: int) -> Row:
        rng = random.Random(f"{seed}/{split}/{index}")
        return {"answer": draw_for_split(lambda rng: rng.choice(self._words), str, split, rng)}

    def make_environment(self, row: Row) -> "WordleGame":
        return WordleGame()


def read_words(path: Path) -> list[str]:
    """Raises ValueError for a file that is missing or empty, and for the first line that is no such word."""
    try:
        words = [line.strip().lower() for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(f"words must be a file of words, got {path}: {error.strerror}") from error
    for number, word in enumerate(words, 1):
        if not re.fullmatch(f"[a-z]{{{LETTERS}}}", word):
            raise ValueError(
                f"words must hold words of {LETTERS} letters, got {word!r}, word {number} of {path}"
            )
    if not words:
        raise ValueError(f"words must be a file of words, got {path}, which is empty")
    return words


class WordleGame:
    """One game. It pays 1 for the word, and otherwise, at the end, the largest share of letters that a guess
    had in their places."""

    def __init__(self) -> None:
        self._secret, self._guesses, self._tries_left = "", list[str](), TRIES

    def reset(self, row: Row, seed: int) -> Turn:
        self._secret = row["answer"]
        return Turn(messages=[{"role": "system", "content": SYSTEM}, *say(RULES)])

    def step(self, reply: Message) -> Turn:
        found = re.search(r"\[(\w+)\]", read_text(reply))
        guess = found.group(1).lower() if found else ""
        problem = self._find_problem(guess)
        self._tries_left -= 1
        if not problem:
            self._guesses.append(guess)
        if guess == self._secret or not self._tries_left:
            return self._end_game()
        if problem:
            return Turn(messages=say(f"{problem} You have {self._tries_left} guesses left."))
        marks = mark_guess(guess, self._secret)
        board = f"{' '.join(guess.upper())}\n{' '.join(marks)}"
        return Turn(messages=say(f"{board}\n\nYou have {self._tries_left} guesses left."))

    def close(self) -> None:
        """Does nothing: a game holds nothing."""

    def _find_problem(self, guess: str) -> str:
        if not guess:
            return "Wrap your word in square brackets."
        if not re.fullmatch(f"[a-z]{{{LETTERS}}}", guess):
            return f"Your word must have exactly {LETTERS} letters."
        return f"You have guessed '{guess}' before." if guess in self._guesses else ""

    def _end_game(self) -> Turn:
        best = max((mark_guess(guess, self._secret).count("G") for guess in self._guesses), default=0)
        won = float(best == LETTERS)
        return Turn(
            reward=best / LETTERS,
            components={"won": won, "tries": float(TRIES - self._tries_left)},
            done=True,
        )


def mark_guess(guess: str, secret: str) -> str:
    """Returns a mark for each letter: G in its place, X not in the word, Y elsewhere in it (as often as the
    word has it)."""
    left = [other for letter, other in zip(guess, secret, strict=True) if letter != other]
    marks = ""
    for letter, other in zip(guess, secret, strict=True):
        if letter == other:
            marks += "G"
        elif letter in left:
            left.remove(letter)
            marks += "Y"
        else:
            marks += "X"
    return marks
