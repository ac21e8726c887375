"""Groups that teach nothing are rejected, and fresh groups take their places."""

import logging
from collections import Counter, deque
from collections.abc import Sequence

from buffers import events as e
from buffers.curriculum import is_at_most
from buffers.state import SupplyState
from buffers.watchdog import Stuck
from configs.schema import Config

log = logging.getLogger("slipstream.buffer")

NUM_JUDGED = 100
"""Latest groups among which rejected ones are counted for the warning."""
ZERO_VARIANCE, UNINFORMATIVE = "zero_variance", "uninformative"


class RefillRecord:
    """The verdicts on the latest complete groups. It follows from the events, so a restart keeps it."""

    def __init__(self) -> None:
        self.latest: deque[str] = deque(maxlen=NUM_JUDGED)
        """Reason for each of the latest groups; empty for those that were kept."""
        self.in_a_row = 0
        """Groups rejected since the last one that was kept."""
        self._in_a_row_before = 0

    def note_complete(self) -> None:
        """A group is complete, and counts as kept unless its rejection follows."""
        self.latest.append("")
        self._in_a_row_before, self.in_a_row = self.in_a_row, 0

    def note_rejected(self, reason: str) -> None:
        """The group that was complete last, or another one, was rejected for whatever reason."""
        if self.latest and reason in (ZERO_VARIANCE, UNINFORMATIVE):
            self.latest[-1] = reason
            self.in_a_row = self._in_a_row_before + 1

    def forgive_refills(self, max_refills: int) -> None:
        """Begins a life anew after one that `curriculum.max_refills` has ended: at 0 in a row."""
        if max(self.in_a_row, self._in_a_row_before) >= max_refills:
            self.in_a_row = self._in_a_row_before = 0

    def restore_state(self, state: SupplyState) -> None:
        self.latest.extend(state.verdicts)
        self.in_a_row = state.rejected_in_a_row


class Refills:
    """Judges complete groups by `algo.dynamic_sampling` and `curriculum.keep`."""

    def __init__(self, config: Config, record: RefillRecord) -> None:
        self._rejects_equal = config.algo.dynamic_sampling
        self._keep, self._max_refills = config.curriculum.keep, config.curriculum.max_refills
        self._record = record
        self._has_judged = False
        self._has_warned = False

    @property
    def rejected_share(self) -> float | None:
        """Share of the latest groups that were rejected; None where none ever is, or none was judged."""
        if not self._record.latest or (not self._rejects_equal and self._keep is None):
            return None
        return sum(map(bool, self._record.latest)) / len(self._record.latest)

    def judge_group(self, content: e.Accepted) -> str | None:
        """Returns why a complete group is rejected: `zero_variance`, `uninformative`; None when it is
        kept."""
        if not self._has_judged:
            self._record.forgive_refills(self._max_refills)
            self._has_judged = True
        reason = None
        if self._rejects_equal and content.reward_std == 0.0:
            reason = ZERO_VARIANCE
        elif self._keep is not None and not is_within(content.reward_mean, self._keep):
            reason = UNINFORMATIVE
        return reason

    def warn_of_waste(self) -> None:
        """Logs a warning, once, when more than half of the latest groups teach nothing."""
        share, num_judged = self.rejected_share or 0.0, len(self._record.latest)
        if num_judged == NUM_JUDGED and share > 0.5 and not self._has_warned:
            log.warning(
                "%d of the latest %d groups teach nothing, and fresh ones take their places (%s): the "
                "prompts are too hard or too easy for the policy",
                round(share * NUM_JUDGED),
                NUM_JUDGED,
                self._describe_reasons(),
            )
        self._has_warned = share > 0.5 if num_judged == NUM_JUDGED else self._has_warned

    def check_end(self) -> None:
        """Raises Stuck when `curriculum.max_refills` groups in a row have taught nothing. A run that has
        ended so may go on with another `curriculum.keep`, and counts anew."""
        if self._has_judged and self._record.in_a_row >= self._max_refills:
            raise Stuck(
                f"{self._record.in_a_row} groups in a row teach nothing, with none kept between "
                f"(curriculum.max_refills; the latest: {self._describe_reasons()})"
            )

    def _describe_reasons(self) -> str:
        counts = Counter(reason for reason in self._record.latest if reason)
        return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def is_within(reward_mean: float, keep: Sequence[float]) -> bool:
    """True for a group's mean reward that `curriculum.keep` keeps."""
    return is_at_most(keep[0], reward_mean) and is_at_most(reward_mean, keep[1])
