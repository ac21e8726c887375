"""The supply of prompts: the choice of a prompt for each fresh group, and the account of each source."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from buffers.curriculum import CURRICULA, Curriculum
from buffers.groups import GroupRecord
from buffers.prompts import decode_index
from buffers.refills import RefillRecord
from buffers.run_status import SourceReport
from buffers.state import SourceState, SupplyState
from buffers.terms import Terms


@dataclass(slots=True)
class SourceAccount:
    """Groups of one source: leased = trained + rejected + those that still may be trained."""

    leased: int = 0
    trained: int = 0
    rejected: int = 0
    rewards: deque[float] = field(default_factory=deque)
    """Mean rewards of the latest complete groups."""


class PromptSupply:
    """Follows each group from its lease to its end. A group counts once, whatever attempts it takes."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.refills = RefillRecord()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._sources = self._terms.list_sources()
        self.curriculum: Curriculum = CURRICULA[self._terms.curriculum.kind](self._terms)
        self.accounts = [SourceAccount() for _ in self._sources]
        """By source."""

    def adopt_terms(self, terms: Terms) -> None:
        """Goes on by these terms. Where they name other prompts, everything begins anew."""
        before, self._terms = self._terms, terms
        if _name_prompts(before) != _name_prompts(terms):
            self._begin_anew()
        self.curriculum.terms = terms.curriculum

    # ---- a group's way

    def find_prompt(self, group: int) -> int:
        """Returns the prompt of a group whose record says none, because it is of before, or lost."""
        chosen = self.curriculum.choose_prompt(group, may_repeat=True)
        assert chosen is not None, "there is a prompt at least"
        return chosen

    def start_group(self, group: int, prompt: int) -> int:
        """A group that asks this prompt has been leased for the first time; -1 where no record says which.
        Returns the prompt."""
        prompt = self.find_prompt(group) if prompt < 0 else prompt
        self.curriculum.start_prompt(prompt)
        self._find_account(prompt).leased += 1
        return prompt

    def finish_group(self, prompt: int, reward_mean: float) -> None:
        """The group is complete."""
        self.refills.note_complete()
        self.curriculum.end_prompt(prompt, reward_mean)
        rewards = self._find_account(prompt).rewards
        rewards.append(reward_mean)
        while len(rewards) > self._terms.curriculum.window:
            rewards.popleft()

    def drop_group(self, prompt: int) -> None:
        """The group will not be made."""
        self.curriculum.end_prompt(prompt, None)
        self._find_account(prompt).rejected += 1

    def reject_group(self, prompt: int, reason: str) -> None:
        """The group is complete, and will not be trained."""
        self.refills.note_rejected(reason)
        self._find_account(prompt).rejected += 1

    def train_group(self, prompt: int, *, undo: bool = False) -> None:
        """The group was trained for the first time; with `undo`, the learner went back to before that."""
        self._find_account(prompt).trained += -1 if undo else 1

    def _find_account(self, prompt: int) -> SourceAccount:
        return self.accounts[decode_index(prompt, len(self._sources))[0]]

    # ---- what is known

    def list_reports(self) -> dict[str, SourceReport]:
        """Returns the account of each source, by name."""
        return {
            source.name: SourceReport(
                leased=account.leased,
                trained=account.trained,
                rejected=account.rejected,
                reward_mean=fmean(account.rewards) if account.rewards else None,
                epochs=None if source.size is None else account.leased / source.size,
            )
            for source, account in zip(self._sources, self.accounts, strict=True)
        }

    def export_state(self) -> SupplyState:
        sources = [
            SourceState(one.leased, one.trained, one.rejected, list(one.rewards)) for one in self.accounts
        ]
        refills = self.refills
        return SupplyState(sources, self.curriculum.export_state(), [*refills.latest], refills.in_a_row)

    def restore_state(
        self, state: SupplyState | None, groups: Mapping[int, GroupRecord], num_leased: int, num_trained: int
    ) -> None:
        """The `groups` that may be trained, or trained again, and the numbers of groups serve a state of
        before, which knows nothing of prompts."""
        if state is None:
            for number, group in groups.items():
                group.prompt = self.find_prompt(number)
            waiting = sum(not group.num_uses for group in groups.values())
            self.accounts = [SourceAccount(num_leased, num_trained, num_leased - num_trained - waiting)]
            return
        self.refills.restore_state(state)
        self.accounts = [
            SourceAccount(one.leased, one.trained, one.rejected, deque(one.rewards)) for one in state.sources
        ]
        self.curriculum.restore_state(state.curriculum)


def _name_prompts(terms: Terms) -> tuple[object, ...]:
    """Returns the terms that say which prompts there are, and how they are chosen."""
    return terms.list_sources(), terms.seed, terms.curriculum.kind
