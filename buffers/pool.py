"""The pool: complete groups that may still be trained, how many bytes they hold, and the choice among
them."""

from collections.abc import Collection

import numpy as np

from buffers import events as e
from buffers.groups import GroupRecord, Handout
from buffers.samplers import Fifo, Sampler, draw_groups
from buffers.terms import Terms
from configs.staleness import OnLate


class GroupPool:
    def __init__(self, terms: Terms, sampler: Sampler) -> None:
        self.terms = terms
        self.groups: dict[int, GroupRecord] = {}
        """Complete groups that are not used up, by number."""
        self.num_bytes = 0
        """Bytes of journal that these groups hold."""
        self._sampler = sampler

    def add_group(self, number: int, group: GroupRecord) -> None:
        self.groups[number] = group
        self.num_bytes += self.get_content(number).size

    def remove_group(self, number: int) -> GroupRecord:
        self.num_bytes -= self.get_content(number).size
        return self.groups.pop(number)

    def get_content(self, number: int) -> e.Accepted:
        """Returns where the rows of a group of the pool are."""
        content = self.groups[number].content
        assert content is not None, f"group {number} is in the pool and not complete"
        return content

    def find_expired(self, step: int, promised: Collection[int]) -> list[int]:
        """Returns the groups that the staleness bound forbids from `step` on, those of `promised` left out.

        A sampler that is not first in, first out leaves such groups; so does one that a run used before,
        `max_uses` above 1, and a repair. Without them every group is trained at the step that it is due at.
        Such a group stays, and what is late in it is masked and named.
        """
        in_order = isinstance(self._sampler, Fifo) and self.terms.max_uses == 1
        masks = self.terms.on_late is OnLate.mask
        if in_order and masks:
            return []
        expired = []
        for number, group in self.groups.items():
            content = self.get_content(number)
            # Under `mask` a group is of use while any token is within the bound; else while all are.
            version = content.newest if masks else content.oldest
            is_left = not in_order or group.due < step
            if is_left and version < step - self.terms.max_versions and number not in promised:
                expired.append(number)
        return expired

    def find_newer_than(self, version: int) -> set[int]:
        """Returns the groups with a token that a version above this one has sampled."""
        return {number for number in self.groups if self.get_content(number).newest > version}

    def list_candidates(self, barred: Collection[int]) -> list[int]:
        """Returns the groups that are not barred, in order of due step and number."""
        rows = ((group.due, number) for number, group in self.groups.items() if number not in barred)
        return [number for _, number in sorted(rows)]

    def choose_groups(self, step: int, candidates: list[int]) -> Handout:
        """Returns what the sampler chooses for `step` among at least `groups_per_step` candidates, in their
        order.

        The choice depends on seed and step alone, so that a restart chooses the same.
        """
        count = self.terms.groups_per_step
        if isinstance(self._sampler, Fifo):  # its rule, without the columns that other samplers need
            return Handout(sorted(candidates[:count]), [])
        contents = [self.get_content(number) for number in candidates]
        uses = [self.groups[number].num_uses for number in candidates]
        rng = np.random.default_rng([self.terms.seed, step])
        rows, group_weights = draw_groups(self._sampler, contents, uses, count, rng)
        chosen = sorted((candidates[row], weight) for row, weight in zip(rows, group_weights, strict=True))
        are_equal = all(weight == 1.0 for weight in group_weights)
        return Handout(
            [number for number, _ in chosen], [] if are_equal else [weight for _, weight in chosen]
        )
