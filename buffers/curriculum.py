"""The choice of prompts by what the policy has made of them.

    choose ─▶ start: under way ─┬─ finish (a mean reward) ─▶ its pool, or its level's window
                                └─ drop (no result) ───────▶ among those that came back

A choice depends on what has come in, so each lease's prompt is on the record, and a book that is made again
starts the recorded prompts: it never chooses anew.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import inf
from statistics import fmean

import numpy as np
import xxhash

from buffers.prompts import PromptOrder, decode_index, encode_index
from buffers.state import CurriculumState
from buffers.terms import CurriculumTerms, Terms
from configs.curriculum import CurriculumKind

POOLS = ("unseen", "hard", "normal", "easy")
"""Names of the pools. Unseen prompts were never asked."""
RETURNED = "unseen"
"""Queue of the prompts that came back without a result. No queue holds those that were never asked."""
TOLERANCE = 1e-6
"""Rewards are 32-bit numbers: 0.8 is 0.800000012. Means that are this close to a bound are equal to it."""


class Curriculum(ABC):
    """Chooses the prompt of each fresh group, and learns what becomes of it."""

    def __init__(self, terms: Terms) -> None:
        self.terms: CurriculumTerms = terms.curriculum
        """May be exchanged for others of the same kind."""
        self._seed = terms.seed
        self.order = PromptOrder(terms.list_sources(), terms.seed)
        self._sources = self.order.sources
        self._next_row = [0] * len(self._sources)
        """By source: how many rows of its own order were begun."""

    @abstractmethod
    def choose_prompt(self, group: int, *, may_repeat: bool = False) -> int | None:
        """Returns the index of the prompt that a fresh group asks.

        None: it waits for a prompt to come back. With `may_repeat` it never waits. After a rewind, groups of
        later steps hold prompts that no generator works on, and the steps before must go on.
        """

    @abstractmethod
    def start_prompt(self, index: int) -> None:
        """A group that asks this prompt has been leased."""

    @abstractmethod
    def end_prompt(self, index: int, reward_mean: float | None) -> None:
        """The prompt's group is complete and has this mean reward, or will not be made."""

    @abstractmethod
    def list_figures(self) -> dict[str, float]:
        """Returns figures for those who watch the run."""

    @abstractmethod
    def export_state(self) -> CurriculumState: ...

    def restore_state(self, state: CurriculumState) -> None:
        self._next_row = list(state.next_row)

    def _draw_share(self, group: int, purpose: str) -> float:
        """Returns a number in [0, 1) that follows from seed, group and purpose."""
        return xxhash.xxh3_64_intdigest(f"{self._seed}/{group}/{purpose}".encode()) / 2**64

    def _find_next_row(self, source: int) -> int:
        return encode_index(source, self.order.find_row(source, self._next_row[source]), len(self._sources))


class FixedOrder(Curriculum):
    """`curriculum.kind=none`: the order of prompts alone (`buffers.prompts`)."""

    def choose_prompt(self, group: int, *, may_repeat: bool = False) -> int:
        return self.order.prompt_index(group)

    def start_prompt(self, index: int) -> None:
        """Does nothing: the group's number tells the prompt."""

    def end_prompt(self, index: int, reward_mean: float | None) -> None:
        """Does nothing."""

    def list_figures(self) -> dict[str, float]:
        return {}

    def export_state(self) -> CurriculumState:
        return CurriculumState()


class PoolCurriculum(Curriculum):
    """`curriculum.kind=pools`. The sources share the groups as without a curriculum; a source that has no
    prompt to give passes its turn on. A prompt is under way at most once at a time, unless the run would
    stand still otherwise.

    A pool is a queue: the prompt that has waited longest is the next, so none of a pool that is drawn from is
    left behind. Prompts that came back without a result are asked about as often as the average prompt, even
    while all others are under way: one that always fails would hold the run up otherwise.
    """

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        endless = [one.name for one in self._sources if one.size is None]
        if endless and self.terms.weights[0] is None:
            raise ValueError(
                "curriculum.pools.unseen_weight must be a number for a source without end (its unseen "
                f"prompts would always come first), got null with the source {endless[0]!r}"
            )
        self._queues = [{pool: deque[int]() for pool in POOLS} for _ in self._sources]
        """By source: the prompts of each pool, the longest waiting first, and those that came back at
        `RETURNED`. Prompts that were never asked follow from `_next_row`."""
        self._under_way: dict[int, str] = {}
        """Prompts under way, the oldest first. The values say nothing."""
        self._again: Counter[int] = Counter()
        """Groups beyond the first that ask a prompt under way."""
        self._begun_early: set[int] = set()
        """Unseen prompts that were begun out of their turn, which only a log that has lost lines tells."""

    def choose_prompt(self, group: int, *, may_repeat: bool = False) -> int | None:
        first, count = self.order.find_source(group), len(self._sources)
        turns = [(first + step) % count for step in range(count)]
        if (index := self._find_returned(group, first)) is not None:
            return index
        for source in turns:
            if (index := self._draw_prompt(group, source)) is not None:
                return index
        for source in turns:
            for pool in reversed(POOLS):  # those of weight 0, which only an empty rest brings up
                if self._count_waiting(source, pool):
                    return self._peek_prompt(source, pool)
        if not may_repeat:
            return None
        rest = [*self._under_way, *(index for queues in self._queues for index in queues[RETURNED])]
        return rest[int(self._draw_share(group, "repeat") * len(rest))]

    def _find_returned(self, group: int, source: int) -> int | None:
        """Returns the prompt that came back first, in its part of the groups."""
        returned, size = self._queues[source][RETURNED], self._sources[source].size
        if not returned or size is None:
            return None
        if self.terms.weights[0] is None and self._count_waiting(source, "unseen"):
            return None
        return returned[0] if self._draw_share(group, "returned") < len(returned) / size else None

    def _draw_prompt(self, group: int, source: int) -> int | None:
        """Returns a prompt of a pool with a weight; None where none waits."""
        weights = dict(zip(POOLS, self.terms.weights, strict=True))
        given = [pool for pool in POOLS if weights[pool] != 0 and self._count_waiting(source, pool)]
        if not given:
            return None
        if weights[given[0]] is None:
            return self._find_next_row(source)
        drawn = draw_place([weights[pool] or 0.0 for pool in given], self._draw_share(group, "pool"))
        return self._peek_prompt(source, given[drawn])

    def _count_waiting(self, source: int, pool: str) -> float:
        if pool != "unseen":
            return len(self._queues[source][pool])
        size = self._sources[source].size
        return inf if size is None else size - self._next_row[source]

    def _peek_prompt(self, source: int, pool: str) -> int:
        return self._find_next_row(source) if pool == "unseen" else self._queues[source][pool][0]

    def start_prompt(self, index: int) -> None:
        self._take_prompt(decode_index(index, len(self._sources))[0], index)
        if index in self._under_way:
            self._again[index] += 1
        else:
            self._under_way[index] = ""

    def end_prompt(self, index: int, reward_mean: float | None) -> None:
        source, _ = decode_index(index, len(self._sources))
        if self._again[index] > 0:
            self._again[index] -= 1
            self._again += Counter()  # drops counts that have come to zero
        elif index in self._under_way:
            del self._under_way[index]
            if reward_mean is not None:
                self._queues[source][self._name_pool(reward_mean)].append(index)
            elif self._sources[source].size is not None:  # else others that were never asked never end
                self._queues[source][RETURNED].append(index)

    def _take_prompt(self, source: int, index: int) -> None:
        """Takes a prompt from where it stands."""
        if self._is_next_row(source, index):
            self._next_row[source] += 1
            while self._begun_early and self._count_waiting(source, "unseen"):
                if (following := self._find_next_row(source)) not in self._begun_early:
                    break
                self._begun_early.discard(following)
                self._next_row[source] += 1
            return
        queues = self._queues[source].values()
        # Not at a head where the log has lost lines.
        for queue in sorted(queues, key=lambda queue: not (queue and queue[0] == index)):
            if index in queue:
                queue.remove(index)
                return
        if index not in self._under_way:
            self._begun_early.add(index)

    def _is_next_row(self, source: int, index: int) -> bool:
        return self._count_waiting(source, "unseen") > 0 and self._find_next_row(source) == index

    def _name_pool(self, reward_mean: float) -> str:
        if is_at_most(reward_mean, self.terms.hard_up_to):
            return "hard"
        return "normal" if is_at_most(reward_mean, self.terms.normal_up_to) else "easy"

    def list_figures(self) -> dict[str, float]:
        sizes = {
            f"pool_{pool}": float(sum(len(queues[pool]) for queues in self._queues)) for pool in POOLS[1:]
        }
        if all(source.size is not None for source in self._sources):
            left = sum((one.size or 0) - row for one, row in zip(self._sources, self._next_row, strict=True))
            sizes["pool_unseen"] = float(left + sum(len(queues[RETURNED]) for queues in self._queues))
        return sizes | {"under_way": float(len(self._under_way))}

    def export_state(self) -> CurriculumState:
        queues = [
            {pool: np.array(queue, dtype="<i8").tobytes() for pool, queue in of_source.items()}
            for of_source in self._queues
        ]
        return CurriculumState(
            list(self._next_row),
            dict(self._under_way),
            dict(self._again),
            queues,
            sorted(self._begun_early),
        )

    def restore_state(self, state: CurriculumState) -> None:
        super().restore_state(state)
        self._queues = [
            {pool: deque(np.frombuffer(data, dtype="<i8").tolist()) for pool, data in of_source.items()}
            for of_source in state.queues
        ]
        self._under_way, self._again = dict(state.origins), Counter(state.again)
        self._begun_early = set(state.begun_early)


class LevelCurriculum(Curriculum):
    """`curriculum.kind=levels`. Each source keeps its own order of rows, at whatever level the run is.

    The level rises and falls by the latest groups of the present level, counted anew after each change.
    """

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self._levels = sorted({one.level for one in self._sources if one.level is not None})
        if not self._levels:
            raise ValueError(
                "curriculum.kind=levels must have a task whose sources have levels "
                "(task=reasoning_gym task.args.levels=[0,1,2]), got one without"
            )
        self._present = 0
        """Place of the present level among the levels."""
        self._recent: deque[float] = deque()
        """Mean rewards of the latest groups of the present level."""

    def choose_prompt(self, group: int, *, may_repeat: bool = False) -> int:
        source = draw_place(self._weigh_sources(), self._draw_share(group, "source"))
        return self._find_next_row(source)

    def _weigh_sources(self) -> list[float]:
        """Returns the share of each source: those of the levels below the present one have `review` of what
        all levels have together."""
        present = self._levels[self._present]
        below = sum(one.weight for one in self._sources if one.level is not None and one.level < present)
        level = sum(one.weight for one in self._sources if one.level == present)
        review = self.terms.review if below else 0.0
        shares = []
        for one in self._sources:
            if one.level is None:
                shares.append(one.weight)
            elif one.level == present:
                shares.append(one.weight * (1 - review))
            else:
                shares.append(one.weight / below * level * review if one.level < present else 0.0)
        return shares

    def start_prompt(self, index: int) -> None:
        self._next_row[decode_index(index, len(self._sources))[0]] += 1

    def end_prompt(self, index: int, reward_mean: float | None) -> None:
        source, _ = decode_index(index, len(self._sources))
        if reward_mean is None or self._sources[source].level != self._levels[self._present]:
            return
        self._recent.append(reward_mean)
        while len(self._recent) > self.terms.window:
            self._recent.popleft()
        if len(self._recent) < self.terms.window:
            return
        mean = fmean(self._recent)
        if is_at_most(self.terms.raise_at, mean) and self._present + 1 < len(self._levels):
            self._change_level(1)
        elif is_at_most(mean, self.terms.lower_at) and self._present:
            self._change_level(-1)

    def _change_level(self, change: int) -> None:
        self._present += change
        self._recent.clear()

    def list_figures(self) -> dict[str, float]:
        return {"level": float(self._levels[self._present])}

    def export_state(self) -> CurriculumState:
        return CurriculumState(list(self._next_row), level=self._present, recent=list(self._recent))

    def restore_state(self, state: CurriculumState) -> None:
        super().restore_state(state)
        self._present, self._recent = state.level, deque(state.recent)


CURRICULA: dict[CurriculumKind, Callable[[Terms], Curriculum]] = {
    CurriculumKind.none: FixedOrder,
    CurriculumKind.pools: PoolCurriculum,
    CurriculumKind.levels: LevelCurriculum,
}


def is_at_most(value: float, bound: float) -> bool:
    """True for a mean reward, or a bound of such, that is not above another."""
    return value <= bound + TOLERANCE * max(1.0, abs(bound))


def draw_place(weights: Sequence[float], share: float) -> int:
    """Returns the place at which `share` in [0, 1) falls when weights, not all 0, lie end to end."""
    left = share * sum(weights)
    last = 0
    for place, weight in enumerate(weights):
        if weight:
            last = place
            if left < weight:
                return place
            left -= weight
    return last
