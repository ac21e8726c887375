"""The quantum lock of the `reasoning-gym` library, played button by button. The library scores the presses.

Each press changes a number and toggles a light, and some buttons work under one light only. The policy must
bring the number to the target, best with as few presses as can be.
"""

import random
import re
from typing import Any

from reasoning_gym.graphs.quantum_lock import QuantumLockConfig, QuantumLockDataset

from generators.environment import Message, Row, Turn
from generators.environments._replies import read_text, say
from generators.tasks._questions import draw_entry

MAX_DETOUR = 2
"""An episode ends after this many times the presses of the shortest way."""
_SIGNS = {"add": "+", "subtract": "-", "multiply": "*"}


class Task:
    """Locks up to a difficulty. Those of `eval` are never those of `train`."""

    name = "gym_lock"

    def __init__(self, difficulty: int = 3) -> None:
        if difficulty < 1:
            raise ValueError(f"difficulty must be at least 1, got {difficulty}")
        self._locks = QuantumLockDataset(QuantumLockConfig(difficulty=difficulty, seed=0, size=1))

    def make_row(self, split: str, index: int, seed: int) -> Row:
        rng = random.Random(f"{seed}/{split}/{index}")
        return draw_entry(self._locks, _describe_lock, split, rng)

    def make_environment(self, row: Row) -> "LockEpisode":
        return LockEpisode(self._locks)


class LockEpisode:
    """One lock. A reply presses the one button that it names, a capital letter by itself.

    A reply that names none or several counts like a press and changes nothing.
    """

    def __init__(self, locks: QuantumLockDataset) -> None:
        self._locks = locks
        self._entry: Row = {}
        self._light = ""
        self._presses: list[str] = []
        self._num_replies = 0

    def reset(self, row: Row, seed: int) -> Turn:
        self._entry, self._light = row, row["metadata"]["initial_state"]
        return Turn(messages=say(f"{_describe_lock(row)}{self._describe_state()}"))

    def step(self, reply: Message) -> Turn:
        self._num_replies += 1
        named = set(re.findall(r"\b[A-C]\b", read_text(reply)))
        if len(named) != 1:
            return self._end_or_go_on("Name one button. ")
        button = next(one for one in self._buttons if one["name"] in named)
        if button["active_state"] not in (self._light, "any"):
            return self._end_or_go_on(f"{button['name']} does nothing now. ")
        self._presses.append(button["name"])
        self._light = "green" if self._light == "red" else "red"
        return self._end_or_go_on("")

    def close(self) -> None:
        """Does nothing: an episode holds nothing."""

    @property
    def _buttons(self) -> list[dict[str, Any]]:
        buttons: list[dict[str, Any]] = self._entry["metadata"]["buttons"]
        return buttons

    @property
    def _number(self) -> int:
        return int(self._locks.simulate_sequence(self._entry["metadata"], self._presses))

    def _end_or_go_on(self, remark: str) -> Turn:
        is_open = self._number == self._entry["metadata"]["target_value"]
        shortest = len(self._entry["metadata"]["solution_path"])
        if not is_open and self._num_replies < MAX_DETOUR * shortest:
            return Turn(messages=say(f"{remark}{self._describe_state()}"))
        reward = self._locks.score_answer(" ".join(self._presses), self._entry) if is_open else 0.0
        return Turn(reward=reward, components={"opened": float(is_open)}, done=True)

    def _describe_state(self) -> str:
        return f"Number {self._number}, light {self._light}. Press:"


def _describe_lock(entry: dict[str, Any]) -> str:
    """Writes the lock in a line. The library's own words ask for the whole sequence at once."""
    buttons = ", ".join(
        f"{one['name']} {_SIGNS[one['type']]}{one['value']}"
        + ("" if one["active_state"] == "any" else f" ({one['active_state']} light)")
        for one in entry["metadata"]["buttons"]
    )
    target = entry["metadata"]["target_value"]
    return f"Reach {target} by pressing buttons: {buttons}. Each press that works toggles the light. "
