"""The places of steps: which fall due when, which wait for a group, and which are filled.

Places are numbered in the order in which they are opened; `Terms.due` says when a place falls due. A group that is
rejected frees its place for a fresh group, which inherits the due step.
"""

import heapq
from collections import Counter

from buffers.groups import Terms
from buffers.state import PlacesState


class Places:
    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.next_place = 0
        """The first place that no group has had yet."""
        self.freed: list[int] = []
        """Heap of the due steps of places whose groups are gone."""
        self._extra: Counter[int] = Counter()  # places beyond `Terms.num_places`, by due step
        self._filled: Counter[int] = Counter()  # places whose group is complete or was, by due step
        self.filled_through = 0
        """All places due before this step are filled."""

    def next_opening(self) -> tuple[int, bool]:
        """(due step, whether it was freed) of the place to be given to the next fresh group."""
        fresh = self.terms.due(self.next_place)
        return (self.freed[0], True) if self.freed and self.freed[0] <= fresh else (fresh, False)

    def num_open(self, last_due: int) -> int:
        """Places that wait for a fresh group, and fall due at `last_due` at the latest; freed ones whenever they do."""
        return max(0, self.terms.num_places_through(last_due) - self.next_place) + len(self.freed)

    def take_place(self, due: int) -> None:
        """A fresh group has a place that falls due at this step."""
        if self.freed and self.freed[0] == due:
            heapq.heappop(self.freed)
        else:
            self.next_place += 1

    def free_place(self, due: int) -> None:
        """The group of a place is gone: a fresh one takes it."""
        heapq.heappush(self.freed, due)

    def fill_place(self, due: int, by: int = 1) -> None:
        """The group of a place is complete; `by=-1`: it was, and is not any more."""
        self._filled[due] += by
        if by < 0:
            self.filled_through = min(self.filled_through, due)
        self._fill_through()

    def add_places(self, step: int, count: int) -> None:
        """More places fall due at a step than its terms give it."""
        self._extra[step] += count
        self.filled_through = min(self.filled_through, step)
        for _ in range(count):
            heapq.heappush(self.freed, step)

    def forget_before(self, oldest: int) -> None:
        """Steps before this one cannot be undone any more."""
        for step in [step for step in self._filled if step < min(oldest, self.filled_through)]:
            del self._filled[step]
            self._extra.pop(step, None)

    def _num_places(self, due: int) -> int:
        return self.terms.num_places(due) + self._extra[due]

    def reopen_missing(
        self, first: int, held: Counter[int], unfinished: Counter[int], overtakes: bool
    ) -> int:
        """For a log that has lost lines: frees the places, due from step `first` on, that no group has, and counts the
        filled ones anew. Else the steps would wait for those groups for ever. Returns how many places were freed.

        `held`: groups by due step; `unfinished`: those of them that are not complete. `overtakes`: steps train groups of
        other due steps too, so that only their whole number can be held against that of the places.
        """
        last = self.terms.due(self.next_place - 1) if self.next_place else -1
        freed = Counter(self.freed)
        if overtakes:
            trained = first * self.terms.groups_per_step
            missing = self.next_place + self._extra.total() - trained - held.total() - len(self.freed)
            wanting = [max(first, last)] * max(0, missing)
        else:
            wanting = []
            for due in range(first, last + 1):
                wanting += [due] * max(0, self._num_opened(due) - held[due] - freed[due])
        for due in wanting:
            self.free_place(due)
        freed.update(wanting)
        self.filled_through = min([self.filled_through, first, *freed, *unfinished])
        for due in range(self.filled_through, last + 1):  # what no group is on its way to is filled, or was
            self._filled[due] = self._num_opened(due) - unfinished[due] - freed[due]
        self._fill_through()
        return len(wanting)

    def _num_opened(self, due: int) -> int:
        """Places that fall due at this step, and that a group has had."""
        return min(self._num_places(due), self.next_place - self._first_place(due) + self._extra[due])

    def _first_place(self, due: int) -> int:
        return 0 if due == 0 else self.terms.num_places_through(due - 1)

    def _fill_through(self) -> None:
        while self._filled[self.filled_through] >= self._num_places(self.filled_through):
            self.filled_through += 1

    def export_state(self) -> PlacesState:
        kept = {step: n for step, n in self._filled.items() if n}
        return PlacesState(self.next_place, list(self.freed), dict(+self._extra), kept, self.filled_through)

    def restore_state(self, state: PlacesState) -> None:
        self.next_place, self.filled_through = state.next_place, state.filled_through
        self.freed, self._extra, self._filled = list(state.freed), Counter(state.extra), Counter(state.filled)
