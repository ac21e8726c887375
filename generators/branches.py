"""The token sequences of an episode, as its turns make them.

A turn's prompt goes on with the branch whose tokens it begins with, to the last token; where no branch does,
a new one begins. Nothing is realigned and nothing is patched, so every sampled token stands in exactly one
branch, as the engine sampled it.
"""

from dataclasses import dataclass, field

import numpy as np

from generators.engine import Completion


@dataclass(slots=True, eq=False)
class Branch:
    """A token sequence of T tokens, with the columns of `buffers.trajectory`."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    """[T]: number of the episode's turn that sampled the token; -1 where not sampled."""
    finish_reason: str = ""
    """The last turn's."""
    experts: np.ndarray | None = None
    """[T, layers · k] int16; None where the engine does not record them."""

    def append_context(self, tokens: list[int]) -> None:
        """Appends tokens that the policy did not sample."""
        self._append(tokens, False, [0.0] * len(tokens), [-1] * len(tokens), -1)

    def append_reply(self, completion: Completion, turn: int) -> None:
        """Appends a turn's reply. The branch holds the turn's prompt."""
        self._append(completion.tokens, True, completion.logprobs, completion.versions, turn)
        self.finish_reason = completion.finish_reason
        if completion.experts is not None:
            self.experts = merge_experts(self.experts, completion.experts)

    def _append(
        self, tokens: list[int], sampled: bool, logprobs: list[float], versions: list[int], turn: int
    ) -> None:
        self.tokens += tokens
        self.sampled += [sampled] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions
        self.turn += [turn] * len(tokens)


class EpisodeBranches:
    """The branches of one episode, in the order in which they began."""

    def __init__(self) -> None:
        self.branches: list[Branch] = []
        self.turn_rewards: dict[int, float] = {}
        """By number of the turn, ascending."""
        self._last_places: dict[int, tuple[int, int]] = {}
        """By number of the turn: its branch, and the place of its last token in it."""

    @property
    def num_turns(self) -> int:
        return len(self.turn_rewards)

    def append_turn(self, prompt: list[int], completion: Completion, turn: int) -> None:
        """Appends a turn to the branch that its prompt goes on with, or begins a branch with it.

        The longest such branch is taken, and of equally long ones the youngest. Turns that were asked side by
        side may come in another order than that of their numbers.
        """
        found = [one for one in self.branches if prompt[: len(one.tokens)] == one.tokens]
        branch = max(reversed(found), key=lambda one: len(one.tokens), default=None)
        if branch is None:
            branch = Branch()
            self.branches.append(branch)
        branch.append_context(prompt[len(branch.tokens) :])
        branch.append_reply(completion, turn)
        self._last_places[turn] = self.branches.index(branch), len(branch.tokens) - 1
        self.turn_rewards = dict(sorted({**self.turn_rewards, turn: 0.0}.items()))

    def list_tokens(self, turn: int) -> list[int]:
        """Returns the prompt and the reply of a turn."""
        branch, place = self._last_places[turn]
        return self.branches[branch].tokens[: place + 1]

    def list_last_reply(self) -> list[int]:
        """Returns the tokens that the turn with the highest number has sampled."""
        number = max(self.turn_rewards)
        branch = self.branches[self._last_places[number][0]]
        return [token for token, turn in zip(branch.tokens, branch.turn, strict=True) if turn == number]

    def pay_last_turn(self, reward: float) -> None:
        """Adds a reward to that of the turn with the highest number."""
        self.turn_rewards[max(self.turn_rewards)] += reward

    def place_rewards(self) -> list[list[float]]:
        """Returns the rewards at their tokens, by branch: each turn's at its last token.

        Empty lists where all of the reward is the last turn's.
        """
        *earlier, _ = self.turn_rewards.values()
        if not any(earlier):
            return [[] for _ in self.branches]
        placed = [[0.0] * len(branch.tokens) for branch in self.branches]
        for turn, reward in self.turn_rewards.items():
            branch, place = self._last_places[turn]
            placed[branch][place] += reward
        return placed


def merge_experts(held: np.ndarray | None, found: np.ndarray) -> np.ndarray:
    """Returns the experts of a longer sequence: those that were recorded when a token was sampled stay.

    Shapes: held [T, layers · k], found [T + n, layers · k], -1 where nothing was recorded -> [T + n, layers ·
    k].
    """
    if held is None:
        return found
    merged = found.copy()
    merged[: len(held)] = np.where(held >= 0, held, found[: len(held)])
    return merged
