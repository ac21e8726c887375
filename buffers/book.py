"""The book of a buffer: everything that it knows of groups, in five parts that each keep a state of
their own.

    leases    open groups, the attempts at them and their fates
      │
      ▼
    history   steps: what they were handed, trained, and what a rewind has undone
      │
      ├──▶ pool     complete groups, their bytes, and the choice among them
      ├──▶ places   integers: which places fall due when, which are free and which are filled
      └──▶ supply   prompts: which a fresh group asks, and what has become of each source's groups

A part calls those below it. Every change is told as an event. `buffers.book_events` makes the same book of
the same events, and `buffers.book_state` of a state.
"""

import itertools
from collections.abc import Callable, Iterator

from buffers import events as e
from buffers.groups import GroupRecord
from buffers.history import History
from buffers.leases import Leases
from buffers.ledger import Ledger
from buffers.places import Places
from buffers.pool import GroupPool
from buffers.samplers import Fifo, Sampler
from buffers.supply import PromptSupply
from buffers.terms import Terms


class Book:
    def __init__(
        self, terms: Terms, *, sampler: Sampler | None = None, lease_ids: Iterator[int] | None = None
    ) -> None:
        """Starts empty. `lease_ids` yields a number for each lease, never one twice; by default 0, 1, 2, …"""
        self.note: Callable[[e.AnyEvent], None] = lambda event: None
        """Is called with each event. A book that is made again after a restart tells nobody."""
        self.ledger = Ledger()
        self.places = Places(terms)
        self.supply = PromptSupply(terms)
        self.pool = GroupPool(terms, Fifo() if sampler is None else sampler)
        self.history = History(terms, self.places, self.pool, self.supply, self.ledger, self._tell_event)
        self.leases = Leases(
            terms,
            self.places,
            self.pool,
            self.supply,
            self.history,
            self.ledger,
            itertools.count() if lease_ids is None else lease_ids,
            self._tell_event,
        )

    def _tell_event(self, event: e.AnyEvent) -> None:
        self.note(event)

    @property
    def terms(self) -> Terms:
        return self.places.terms

    def adopt_terms(self, terms: Terms) -> None:
        """Keeps the book by these terms from now on."""
        self.supply.adopt_terms(terms)
        self.places.terms = self.pool.terms = self.history.terms = self.leases.terms = terms

    def find_group(self, number: int) -> GroupRecord | None:
        """Returns a group that may still be trained, open or complete; None when there is none of this
        number."""
        return self.leases.open_groups.get(number) or self.pool.groups.get(number)

    def list_groups(self) -> dict[int, GroupRecord]:
        """Returns all groups that may still be trained, open or complete, in the order of their numbers."""
        groups = self.leases.open_groups | self.pool.groups
        return dict(sorted(groups.items()))

    def rewind_to(self, step: int) -> None:
        """The learner goes on from the checkpoint of `step`. Later steps are undone and will be handed the
        same groups.

        Raises ValueError as `History.check_rewind` does.
        """
        self.history.check_rewind(step)
        self.leases.revoke_beyond(step)
        self.history.undo_steps(step)
