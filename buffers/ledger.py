"""The ledger: the fate of every token generated and of every group leased.

generated = trained + masked + Σ rejected + in flight, in tokens; leased = trained + Σ rejected + in flight,
in groups.

The two sides are counted apart: `generated` and `leased` when work is reported, the fates when they are
decided. So `closes` is a check that can fail.
"""

from collections import Counter
from collections.abc import Mapping

from buffers.run_status import LedgerAccount
from buffers.state import LedgerState

REASONS = ("zero_variance", "duplicate", "cancelled", "failed", "late")
RARE_REASONS = ("returned", "uninformative", "unsampled", "damaged")
"""Reasons that are shown only where there are such groups. A `returned` lease came back without a failure:
its generator has left or could not begin it, or the learner went back. The mean reward of `uninformative`
groups was outside `curriculum.keep`. `unsampled` groups were not chosen while they were within the bound,
which some samplers do; the disk has lost `damaged` groups after they were accepted."""
FATES = ("trained", "masked", *REASONS, *RARE_REASONS, "in_flight")


class Ledger:
    def __init__(self) -> None:
        self.generated = 0
        """Sampled tokens that the buffer has heard of."""
        self.leased = 0
        """Leases that the buffer has given out."""
        self.tokens: Counter[str] = Counter()
        """Sampled tokens by fate."""
        self.groups: Counter[str] = Counter()
        """Leases by fate."""
        self.staleness: Counter[int] = Counter()
        """Trained tokens by staleness in versions. A token that is trained twice counts twice."""
        self.replayed = 0
        """Tokens that were trained again, beyond their first time (`buffer.max_uses` above 1)."""

    def count_lease(self) -> None:
        """A group was leased."""
        self.leased += 1
        self.groups["in_flight"] += 1

    def count_tokens(self, num_tokens: int, fate: str) -> None:
        """`num_tokens` more were sampled, by work whose fate is `fate` so far."""
        self.generated += num_tokens
        self.tokens[fate] += num_tokens

    def change_fate(self, old: str, new: str, num_tokens: int) -> None:
        """The fate of one lease, and of the tokens known of it, changes."""
        assert old in FATES and new in FATES, (old, new)
        self.groups[old] -= 1
        self.groups[new] += 1
        self.tokens[old] -= num_tokens
        self.tokens[new] += num_tokens

    def count_trained(self, num_trained: int, num_excluded: int, excluded_fate: str) -> None:
        """A group in flight was trained, all but `num_excluded` tokens, which are `masked` or `late`
        instead."""
        self.change_fate("in_flight", "trained", num_trained + num_excluded)
        self.tokens["trained"] -= num_excluded
        self.tokens[excluded_fate] += num_excluded

    def undo_trained(self, num_trained: int, num_excluded: int, excluded_fate: str) -> None:
        """The learner went back to before it trained this group, which is in flight again."""
        self.tokens[excluded_fate] -= num_excluded
        self.tokens["trained"] += num_excluded
        self.change_fate("trained", "in_flight", num_trained + num_excluded)

    def closes(self) -> bool:
        """True when both equations hold."""
        return self.generated == sum(self.tokens.values()) and self.leased == sum(self.groups.values())

    def export_state(self) -> LedgerState:
        return LedgerState(
            self.generated,
            self.leased,
            dict(self.tokens),
            dict(self.groups),
            dict(self.staleness),
            self.replayed,
        )

    def restore_state(self, state: LedgerState) -> None:
        self.generated, self.leased, self.replayed = state.generated, state.leased, state.replayed
        self.tokens, self.groups = Counter(state.tokens), Counter(state.groups)
        self.staleness = Counter(state.staleness)

    def token_account(self) -> LedgerAccount:
        return _make_account(self.generated, self.tokens)

    def group_account(self) -> LedgerAccount:
        return _make_account(self.leased, self.groups)


def _make_account(total: int, fates: Mapping[str, int]) -> LedgerAccount:
    shown = (*REASONS, *(reason for reason in RARE_REASONS if fates[reason]))
    return LedgerAccount(
        total=total,
        trained=fates["trained"],
        masked=fates["masked"],
        rejected={reason: fates[reason] for reason in shown},
        in_flight=fates["in_flight"],
    )
