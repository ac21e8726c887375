"""The history of steps: what each step was handed, what it trained, and how far back the learner may go."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from buffers import events as e
from buffers.groups import GroupRecord, GroupUse, Handout
from buffers.ledger import Ledger
from buffers.places import Places
from buffers.pool import GroupPool
from buffers.supply import PromptSupply
from buffers.terms import Terms
from configs.staleness import OnLate


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A trained step that a rewind may undo."""

    uses: list[GroupUse]
    event: e.Trained


class History:
    """Steps in order. Step k is handed its groups once, trains them once, and may be undone and handed the
    same again.

    Every change is told to `note` as an event.
    """

    def __init__(
        self,
        terms: Terms,
        places: Places,
        pool: GroupPool,
        supply: PromptSupply,
        ledger: Ledger,
        note: Callable[[e.AnyEvent], None],
    ) -> None:
        self.terms = terms
        self._places, self._pool, self._supply = places, pool, supply
        self._ledger, self._note = ledger, note
        self.version = -1
        """The newest published version; -1 when the learner has published none since its start or its last
        rewind."""
        self.newest_version = -1
        """The newest version that any life of the learner has published."""
        self.next_step = 0
        """The step that is trained next. All steps before it are trained."""
        self.trained_twice = 0
        """Number of times that a group was trained more often than `max_uses` allows.

        Anything above 0 is a defect.
        """
        self.handed: dict[int, Handout] = {}
        """By step: what a step was handed and has not trained, or is to be handed again after a rewind."""
        self.trained: dict[int, TrainedStep] = {}
        """By step, since the oldest kept checkpoint."""
        self.oldest_checkpoint = 0
        """The step of the oldest kept checkpoint. Steps before it cannot be undone any more."""
        self.awaited: tuple[int, float] | None = None
        """The step that the learner waits for, and since when, in seconds on the buffer's clock."""
        self._may_choose = True
        """False while nothing has changed since a choice was found impossible."""

    # ---- complete groups

    def complete_group(self, number: int, group: GroupRecord, content: e.Accepted) -> None:
        """An open group is complete: it is in the journal at `content`."""
        group.content = content
        self._pool.add_group(number, group)
        # A damaged log may have lost the line that published this version.
        self.newest_version = max(self.newest_version, content.newest)
        self._may_choose = True
        self._places.fill_place(group.due)
        self._supply.finish_group(group.prompt, content.reward_mean)
        self._note(content)

    def reject_group(self, number: int, reason: str, error: str = "", *, refill: bool = True) -> None:
        """A complete group will not be trained. With `refill` its place goes to a fresh group."""
        num_tokens = self._pool.get_content(number).tokens
        group = self._pool.remove_group(number)
        self._ledger.change_fate("in_flight", reason, num_tokens)
        self._supply.reject_group(group.prompt, reason)
        self.drop_handouts(number)
        if refill:
            self._may_choose = True
            self._places.empty_place(group.due)
            self._places.free_place(group.due)
        self._note(e.Rejected(number, reason, error, group.due, num_tokens, time.time()))

    def replace_damaged(self, number: int, error: str) -> None:
        """The bytes of a complete group are lost. A fresh group takes its place.

        The place falls due at the step that the group was for, or at the next step when that one is trained
        already.
        """
        group = self._pool.groups[number]
        if group.num_uses:
            self.retire_groups([number])
            return
        is_overtaken = group.due < self.next_step
        self.reject_group(number, "damaged", error, refill=not is_overtaken)
        if is_overtaken:
            self.open_places(self.next_step, 1)

    def retire_groups(self, numbers: Sequence[int]) -> None:
        """Groups that have been trained, and could have been again, are not used any more."""
        for number in numbers:
            self._pool.remove_group(number)
            self.drop_handouts(number)
        self._note(e.Retired(list(numbers)))

    def drop_handouts(self, number: int) -> None:
        """The groups of steps that were to train group `number` are chosen anew."""
        for step in [step for step, handout in self.handed.items() if number in handout.groups]:
            del self.handed[step]
            self._may_choose = True

    # ---- steps

    def publish_version(self, version: int) -> None:
        assert version > self.version, f"version {version} was published after {self.version}"
        self.version, self.newest_version = version, max(version, self.newest_version)

    def hand_out(self, step: int, now: float) -> Handout | None:
        """Returns the groups that `step` trains; None while some of them are missing."""
        if step in self.handed:
            return self.handed[step]
        if self._may_choose and (handout := self._choose_groups(step)) is not None:
            self.handed[step] = handout
            self._note(e.Handed(step, handout.groups, handout.group_weights))
            return handout
        self._may_choose = False
        if self.awaited is None or self.awaited[0] != step:
            self.awaited = (step, now)
        return None

    def _choose_groups(self, step: int) -> Handout | None:
        """Returns the groups of a step that has not been handed any; None while too few are complete.

        Under `wait` and `cancel` a step waits for every group that is due. Under `mask` any complete groups
        will do, as long as there are enough of them.
        """
        batch = self.terms.groups_per_step
        all_due_are_complete = self._places.filled_through > step
        overtakes = self.terms.on_late is OnLate.mask and len(self._pool.groups) >= batch
        if not (all_due_are_complete or overtakes):
            return None
        self._remove_expired(step)
        candidates = self._pool.list_candidates(self._find_promised() | self._find_newer(step))
        if len(candidates) >= batch:
            return self._pool.choose_groups(step, candidates)
        if all_due_are_complete:  # no other group is on its way to this step, so the step gets more places
            self.open_places(step, batch - len(candidates))
        return None

    def _remove_expired(self, step: int) -> None:
        """Removes the groups that the staleness bound forbids from `step` on."""
        retired = []
        for number in self._pool.find_expired(step, self._find_promised()):
            if self._pool.groups[number].num_uses:
                retired.append(number)
            else:
                self.reject_group(number, "unsampled", refill=False)
        if retired:
            self.retire_groups(retired)

    def _find_promised(self) -> set[int]:
        """Returns the groups that steps were handed and have not trained, or will be handed again after a
        rewind."""
        return {number for handout in self.handed.values() for number in handout.groups}

    def _find_newer(self, step: int) -> set[int]:
        """Returns the groups that `step` may not train because a version above it has sampled a token of
        theirs.

        An earlier life of the learner published such versions. Under `mask` the tokens are masked instead.
        """
        if self.newest_version <= step or self.terms.on_late is OnLate.mask:
            return set()
        return self._pool.find_newer_than(step)

    def open_places(self, step: int, count: int) -> None:
        """Adds places to a step, for fresh groups."""
        self._places.add_places(step, count)
        self._note(e.Opened(step, count))

    def train_step(self, event: e.Trained) -> None:
        """A step has been trained."""
        assert event.step == self.next_step, f"step {event.step} was trained after {self.next_step}"
        uses = []
        for number, num_trained, num_excluded in zip(
            event.groups, event.trained, event.excluded, strict=True
        ):
            group = self._pool.groups[number]
            is_first = group.num_uses == 0
            if is_first:
                self._ledger.count_trained(num_trained, num_excluded, self.terms.excluded_fate)
                self._supply.train_group(group.prompt)
            else:
                self._ledger.replayed += num_trained
            group.num_uses += 1
            self.trained_twice += group.num_uses > self.terms.max_uses
            uses.append(GroupUse(number, group, num_trained, num_excluded, is_first))
            if group.num_uses >= self.terms.max_uses:
                self._pool.remove_group(number)
        self._ledger.staleness.update(event.staleness)
        self.trained[event.step] = TrainedStep(uses, event)
        self.handed.pop(event.step, None)
        self.next_step, self._may_choose, self.awaited = event.step + 1, True, None
        self._note(event)

    def keep_checkpoint(self, event: e.Checkpointed) -> None:
        """The learner has written a checkpoint.

        Steps before its oldest kept one cannot be undone and are forgotten.
        """
        for step in range(self.oldest_checkpoint, min(event.oldest, self.next_step)):
            self.trained.pop(step, None)
        self._places.forget_before(event.oldest)
        self.oldest_checkpoint = max(self.oldest_checkpoint, event.oldest)
        self._note(event)

    def check_rewind(self, step: int) -> None:
        """Raises ValueError for a step that is not between the oldest kept checkpoint and the newest
        trained step."""
        if not self.oldest_checkpoint <= step <= self.next_step:
            raise ValueError(
                f"step must be in {self.oldest_checkpoint}..{self.next_step} to rewind to, got {step}"
            )

    def undo_steps(self, step: int) -> None:
        """The learner goes on from the checkpoint of `step`.

        Later steps are undone, and are handed the same groups again.
        """
        for undone in range(self.next_step - 1, step - 1, -1):
            trained = self.trained.pop(undone)
            for use in trained.uses:
                if use.is_first:
                    self._ledger.undo_trained(use.num_trained, use.num_excluded, self.terms.excluded_fate)
                    self._supply.train_group(use.group.prompt, undo=True)
                else:
                    self._ledger.replayed -= use.num_trained
                use.group.num_uses -= 1
                if use.number not in self._pool.groups:
                    self._pool.add_group(use.number, use.group)
            self._ledger.staleness.subtract(trained.event.staleness)
            self.handed[undone] = Handout(trained.event.groups, trained.event.group_weights)
        self._ledger.staleness += Counter()  # drops counts that have come to zero
        self.next_step, self.version = step, -1
        self._may_choose, self.awaited = True, None
        self._note(e.Rewound(step=step))
