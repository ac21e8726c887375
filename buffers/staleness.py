"""The rule that bounds staleness, as functions of integers. Nothing else in the code base decides it.

Symbols: B = groups a step, S = `max_versions`, v = the newest published version. Step k trains with version
k. Places are numbered 0, 1, 2, … in the order in which they are opened; place p is due at step ⌊p/B⌋. Each
place is filled by one group. A group that is rejected leaves its place to a fresh one, which inherits the due
step.

**Admission.** A group due at step d may be leased while d ≤ v + S.
**Oldest version.** A lease due at step d may be begun only by version max(0, d − S) or a newer one.

**Proof, `wait` and `cancel`.** Step k trains exactly the groups due at k. Each was begun at its oldest
version or later, and in-flight updates only raise the version of the tokens that follow, so each of its
tokens was sampled at a version ≥ max(0, k − S). The step trains it with version k. Staleness = k − version ≤
S. It is never negative: the group was complete before step k was trained, hence before version k + 1 was
published, so all its versions are ≤ k. The admission rule makes the oldest version reachable: d ≤ v + S gives
d − S ≤ v, a version that has been published. `cancel` only replaces a group by a fresh one with the same due
step, to which the same argument applies.

**A controller** (`staleness.controller=ess`) admits with a lag ≤ S in the place of S, in admission and oldest
version alike. All groups that it admits are admissible under S, with an oldest version that is no lower. Both
proofs hold as they stand.

**Proof, `mask`.** Step k trains the B oldest complete groups, of whatever due step, and `mask_trainable`
excludes every token older than k − S. The tokens that are left are within S by construction. Every group
taken at step k is complete, so no version exceeds k.

**Rewind.** A learner that is lost when steps before n have been handed out has published no version above n.
It goes on from version c ≤ n, while generators may still sample with a version of its life before. Steps c to
n − 1 train the very groups that they were handed, each complete before its step was trained. All other groups
are trained at step n or later, so staleness is not negative. A group of those steps that turns out to be
damaged is made anew; under `wait` and `cancel`, one that a version above its due step has sampled is refused
(`Leases.is_too_new`). Leases due after c + S are taken back; those due at d ≤ c + S go on with c ≥ d − S at
the oldest.
"""

from collections.abc import Mapping

import numpy as np


def is_admitted(due: int, version: int, admission_lag: int) -> bool:
    """True when a group due at this step may be leased while `version` is the newest published."""
    return due <= version + admission_lag


def min_version(due: int, admission_lag: int) -> int:
    """Returns the oldest version that may begin a group due at this step."""
    return max(0, due - admission_lag)


def mask_trainable(versions: np.ndarray, sampled: np.ndarray, step: int, max_versions: int) -> np.ndarray:
    """[T] bool: the sampled tokens whose staleness is within 0 .. `max_versions` when step `step` trains
    them.

    `versions` [T] int: the version that sampled each token. `sampled` [T] bool.
    """
    return sampled & (step - versions <= max_versions) & (versions <= step)


def count_trainable(
    tokens_by_version: Mapping[int, int], step: int, max_versions: int
) -> tuple[int, int, dict[int, int]]:
    """Returns (trained tokens, excluded sampled tokens, trained tokens by staleness) of a group at a step."""
    trained = {
        step - version: tokens
        for version, tokens in tokens_by_version.items()
        if 0 <= step - version <= max_versions
    }
    total = sum(trained.values())
    return total, sum(tokens_by_version.values()) - total, trained
