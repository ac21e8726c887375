"""The places of steps: how many groups each step needs, which places wait for a group, and which are filled.

Places are numbered in the order in which they are opened. `Terms.due_step` says when a place falls due. A
group that is rejected frees its place for a fresh group, which inherits the due step.
"""

import heapq
from collections import Counter

from buffers.state import PlacesState
from buffers.terms import Terms


class Places:
    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.next_place = 0
        """The first place that no group has had yet."""
        self.freed: list[int] = []
        """Heap of the due steps of places whose groups are gone."""
        self._extra: Counter[int] = Counter()
        """Number of places beyond `Terms.num_places`, by due step."""
        self._filled: Counter[int] = Counter()
        """Number of places whose group is complete, or was trained, by due step."""
        self.filled_through = 0
        """All places that fall due before this step are filled."""

    def next_opening(self) -> tuple[int, bool]:
        """Returns (due step, whether it was freed) of the place that the next fresh group gets."""
        fresh = self.terms.due_step(self.next_place)
        return (self.freed[0], True) if self.freed and self.freed[0] <= fresh else (fresh, False)

    def num_open(self, last_due: int) -> int:
        """Returns how many places wait for a fresh group: all freed ones, and those that fall due at
        `last_due` or before."""
        return max(0, self.terms.num_places_through(last_due) - self.next_place) + len(self.freed)

    def take_place(self, due: int) -> None:
        """A fresh group takes a place that falls due at this step."""
        if self.freed and self.freed[0] == due:
            heapq.heappop(self.freed)
        else:
            self.next_place += 1

    def free_place(self, due: int) -> None:
        """The group of a place is gone, so that a fresh one may take the place."""
        heapq.heappush(self.freed, due)

    def fill_place(self, due: int) -> None:
        """The group of a place is complete."""
        self._filled[due] += 1
        self._advance_filled()

    def empty_place(self, due: int) -> None:
        """The group of a filled place is lost."""
        self._filled[due] -= 1
        self.filled_through = min(self.filled_through, due)
        self._advance_filled()

    def add_places(self, step: int, count: int) -> None:
        """Lets more places fall due at a step than the terms give it."""
        self._extra[step] += count
        self.filled_through = min(self.filled_through, step)
        for _ in range(count):
            heapq.heappush(self.freed, step)

    def forget_before(self, oldest: int) -> None:
        """Forgets steps before this one, which cannot be undone any more."""
        for step in [step for step in self._filled if step < min(oldest, self.filled_through)]:
            del self._filled[step]
            self._extra.pop(step, None)

    def reopen_missing(
        self, first: int, held: Counter[int], unfinished: Counter[int], overtakes: bool
    ) -> int:
        """Mends the places after a log has lost lines; returns how many places it has freed.

        Places that fall due from step `first` on and that no group has are freed, and filled places are
        counted anew. Otherwise the steps would wait for those groups for ever.

        `held` counts groups by due step; `unfinished` counts those of them that are not complete. With
        `overtakes`, steps train groups of other due steps too, so that only the sums of groups and of places
        can be compared.
        """
        last = self.terms.due_step(self.next_place - 1) if self.next_place else -1
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
        # A place that no group is on its way to is filled, or its group was trained.
        for due in range(self.filled_through, last + 1):
            self._filled[due] = self._num_opened(due) - unfinished[due] - freed[due]
        self._advance_filled()
        return len(wanting)

    def _num_places(self, due: int) -> int:
        return self.terms.num_places(due) + self._extra[due]

    def _num_opened(self, due: int) -> int:
        """Returns how many places fall due at this step and have had a group."""
        first_place = 0 if due == 0 else self.terms.num_places_through(due - 1)
        return min(self._num_places(due), self.next_place - first_place + self._extra[due])

    def _advance_filled(self) -> None:
        while self._filled[self.filled_through] >= self._num_places(self.filled_through):
            self.filled_through += 1

    def export_state(self) -> PlacesState:
        kept = {step: count for step, count in self._filled.items() if count}
        return PlacesState(self.next_place, list(self.freed), dict(+self._extra), kept, self.filled_through)

    def restore_state(self, state: PlacesState) -> None:
        self.next_place, self.filled_through = state.next_place, state.filled_through
        self.freed, self._extra, self._filled = list(state.freed), Counter(state.extra), Counter(state.filled)
