"""Names to keep sorted: each turn brings more of them, and the policy writes the whole list again.

    "Sort these names … by LAST name: EnginDurgun" ─▶ "<alphabetical_sorted>…</alphabetical_sorted>"
    "Now sort ALL of these names …: DenizCakir"    ─▶ "<combined_alphabetical_sorted>…" ─▶ …

Prompts and rewards are those of the environment `alphabet-sort` of verifiers. Its names come from a data
set; here they are drawn.
"""

import difflib
import random
import re
from itertools import accumulate, pairwise

from generators.environment import Message, Row, Turn
from generators.environments._replies import read_text, say
from generators.splits import draw_for_split

FIRST_NAMES = (  # noqa: SIM905
    "Aisha Akira Alan Amara Ana Andrei Anil Ben Carla Chen Clara Daniel Deniz Diego Elif Emma Engin Erik "
    "Fatima Grace Hana Hugo Ines Ivan Jamal Jonas Julia Kenji Lars Leila Lena Luca Maria Mei Mina Nadia "
    "Nina Noah Nurten Olga Omar Paul Priya Rosa Sara Sofia Tariq Tomas Vera Wei Yuki Zoe"
).split()
LAST_NAMES = (  # noqa: SIM905
    "Abe Adams Akman Alvarez Bauer Becker Braun Cakir Castro Chen Cohen Costa Diaz Dubois Durgun Evans "
    "Fischer Fuchs Garcia Gupta Haddad Hansen Ito Ivanov Jensen Kaya Kim Klein Kumar Lang Lopez Martin "
    "Meyer Mori Nguyen Novak Okafor Ortiz Park Patel Petrov Quinn Rossi Sato Schmidt Silva Singh Suzuki "
    "Tanaka Torres Usman Vogel Wang Weber Yilmaz Zhang"
).split()


class Task:
    """Episodes of `min_turns` to `max_turns` turns. No list of names is in both splits."""

    name = "alphabet_sort"

    def __init__(
        self,
        min_turns: int = 1,
        max_turns: int = 3,
        min_names_per_turn: int = 1,
        max_names_per_turn: int = 5,
        similarity_power: int = 4,
        power_per_turn: bool = True,
    ) -> None:
        """`power_per_turn`: each turn's similarity is raised to `similarity_power`, and not their mean."""
        for low, high, key in [
            (min_turns, max_turns, "turns"),
            (min_names_per_turn, max_names_per_turn, "names_per_turn"),
        ]:
            if not 1 <= low <= high:
                raise ValueError(f"min_{key} must be from 1 to max_{key}, got {low} and {high}")
        if max_turns * max_names_per_turn > len(FIRST_NAMES):
            raise ValueError(
                f"max_turns × max_names_per_turn must be at most {len(FIRST_NAMES)} (no "
                f"two people share a name), got {max_turns} × {max_names_per_turn}"
            )
        self._turns, self._counts = (min_turns, max_turns), (min_names_per_turn, max_names_per_turn)
        self._scoring = similarity_power, power_per_turn

    def make_row(self, split: str, index: int, seed: int) -> Row:
        rng = random.Random(f"{seed}/{split}/{index}")
        turns = draw_for_split(self._draw_turns, lambda turns: " ".join(sum(turns, [])), split, rng)
        return {"turns": turns, "by_first": rng.random() < 0.5}

    def make_environment(self, row: Row) -> "SortingTalk":
        return SortingTalk(*self._scoring)

    def _draw_turns(self, rng: random.Random) -> list[list[str]]:
        """Returns the new names of each turn."""
        counts = [rng.randint(*self._counts) for _ in range(rng.randint(*self._turns))]
        firsts, lasts = rng.sample(FIRST_NAMES, sum(counts)), rng.sample(LAST_NAMES, sum(counts))
        names = [first + last for first, last in zip(firsts, lasts, strict=True)]
        return [names[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


class SortingTalk:
    """One episode. It pays at its end, by how similar each turn's list was to the right one."""

    def __init__(self, similarity_power: int, power_per_turn: bool) -> None:
        self._power, self._power_per_turn = similarity_power, power_per_turn
        self._scores = list[float]()

    def reset(self, row: Row, seed: int) -> Turn:
        self._turns, self._by_first = row["turns"], row["by_first"]
        self._rng = random.Random(seed)
        return Turn(messages=say(self._ask_first()))

    def step(self, reply: Message) -> Turn:
        number = len(self._scores)
        tag = "combined_alphabetical_sorted" if number else "alphabetical_sorted"
        attempts = [
            self._rate_list(written, self._list_right_answer(number))
            for written in re.findall(f"<{tag}>(.*?)</{tag}>", read_text(reply), re.DOTALL)
        ]
        # Several lists in one reply count only where each is better than the one before it.
        counts = bool(attempts) and all(after > before for before, after in pairwise(attempts))
        self._scores.append(attempts[-1] if counts else 0.0)
        if len(self._scores) < len(self._turns):
            return Turn(messages=say(self._ask_next()))
        mean = sum(self._scores) / len(self._scores)
        reward = mean if self._power_per_turn else mean**self._power
        return Turn(reward=reward, components={"perfect": float(mean == 1.0), "similarity": mean}, done=True)

    def close(self) -> None:
        """Does nothing: an episode holds nothing."""

    def _rate_list(self, written: str, right: list[str]) -> float:
        lines = "\n".join(line.strip().lower() for line in written.split("\n") if line.strip())
        if not lines:
            return 0.0
        similarity = difflib.SequenceMatcher(None, lines, "\n".join(right).lower()).ratio()
        return similarity**self._power if self._power_per_turn else similarity

    def _list_right_answer(self, number: int) -> list[str]:
        """Returns the lines of the right list of a turn."""
        new = self._turns[number]
        ranked = sorted(sum(self._turns[: number + 1], []), key=self._read_sorted_part)
        return [f"{name} // new name!" if number and name in new else name for name in ranked]

    def _read_sorted_part(self, name: str) -> str:
        """Returns the first name, or the rest: a capital letter divides them."""
        cut = next((place for place in range(1, len(name)) if name[place].isupper()), len(name))
        return name[:cut] if self._by_first else name[cut:]

    def _ask_first(self) -> str:
        names = self._shuffle_names(0)
        example = "\n".join(f"Name{number}" for number in range(1, len(names) + 1))
        return (
            f"Sort these names in alphabetical order by {self._name_part()} name: {', '.join(names)}\n\n"
            f"Use exactly this format:\n<alphabetical_sorted>\n{example}\n</alphabetical_sorted>"
        )

    def _ask_next(self) -> str:
        number = len(self._scores)
        question = (
            f"Now sort ALL of these names alphabetically by {self._name_part()} name: "
            f"{', '.join(self._shuffle_names(number))}\n\nThese are in addition to the prior list. Mark any "
            "NEW names (that weren't in the prior list) with `// new name!` at the end."
        )
        if number > 1:
            return f"{question} Follow the same format as before."
        shown = self._rng.randint(1, sum(map(len, self._turns[: number + 1])))
        old = self._rng.randint(0, shown - 1)
        example = "\n".join(
            f"Name{place}" + (" // new name!" if place > old else "") for place in range(1, shown + 1)
        )
        return (
            f"{question}\n\nUse exactly this format:\n<combined_alphabetical_sorted>\n{example}\n"
            "</combined_alphabetical_sorted>"
        )

    def _shuffle_names(self, number: int) -> list[str]:
        return self._rng.sample(self._turns[number], len(self._turns[number]))

    def _name_part(self) -> str:
        return "FIRST" if self._by_first else "LAST"
