"""The ledger: what became of every token generated and of every group leased.

generated = trained + masked + Σ rejected + in flight, in tokens; leased = trained + Σ rejected + in flight, in groups.

The two sides are counted apart: `generated` and `leased` when work is reported, the fates when its fate is decided. So
`closes` is a check that can fail.
"""

from collections import Counter
from collections.abc import Mapping

from buffers.run_status import LedgerAccount
from buffers.state import LedgerState

REASONS = ("zero_variance", "duplicate", "cancelled", "failed", "late")
RARE_REASONS = ("unsampled", "damaged")
"""Reasons that are shown only where there are such groups: not chosen while within the bound (some samplers); lost by the
disk after it was accepted."""
FATES = ("trained", "masked", *REASONS, *RARE_REASONS, "in_flight")


class Ledger:
    def __init__(self) -> None:
        self.generated = 0
        self.leased = 0
        self.tokens: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        """Trained tokens by staleness; a token that is trained twice counts twice."""
        self.replayed = 0
        """Tokens trained again (`buffer.max_uses` above 1), beyond their first time."""

    def lease(self) -> None:
        """A group was given out."""
        self.leased += 1
        self.groups["in_flight"] += 1

    def generate(self, num_tokens: int, fate: str) -> None:
        """`num_tokens` more were sampled, by work whose fate is `fate` so far."""
        self.generated += num_tokens
        self.tokens[fate] += num_tokens

    def settle(self, old: str, new: str, num_tokens: int) -> None:
        """One leased group, and the tokens known of it, changes its fate."""
        assert old in FATES and new in FATES, (old, new)
        self.groups[old] -= 1
        self.groups[new] += 1
        self.tokens[old] -= num_tokens
        self.tokens[new] += num_tokens

    def train(self, num_trained: int, num_excluded: int, excluded: str) -> None:
        """A group in flight was trained; `num_excluded` of its tokens were not, as `excluded` (masked or late)."""
        self.settle("in_flight", "trained", num_trained + num_excluded)
        self.tokens["trained"] -= num_excluded
        self.tokens[excluded] += num_excluded

    def untrain(self, num_trained: int, num_excluded: int, excluded: str) -> None:
        """The learner went back to before it trained this group: it is in flight again."""
        self.tokens[excluded] -= num_excluded
        self.tokens["trained"] += num_excluded
        self.settle("trained", "in_flight", num_trained + num_excluded)

    def closes(self) -> bool:
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
        return _account(self.generated, self.tokens)

    def group_account(self) -> LedgerAccount:
        return _account(self.leased, self.groups)


def _account(total: int, fates: Mapping[str, int]) -> LedgerAccount:
    return LedgerAccount(
        total=total,
        trained=fates["trained"],
        masked=fates["masked"],
        rejected={r: fates[r] for r in (*REASONS, *RARE_REASONS) if r in REASONS or fates[r]},
        in_flight=fates["in_flight"],
    )
