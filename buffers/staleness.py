"""How staleness is bounded: the whole rule, as functions of integers. Nothing else in the code base decides it.

Words: B groups a step, S = the bound, v = the newest published version. Step k trains with version k. Places are numbered
0, 1, 2, … in the order in which they are opened; place p is due at step ⌊p/B⌋. Each place is filled by one group; a group
that is rejected leaves its place to a fresh one, which inherits the due step.

**Admission.** A group due at step d may be leased while d ≤ v + S.
**Floor.** A lease due at step d may be begun only by version max(0, d − S) or a newer one.

**Proof, `wait` and `cancel`.** Step k trains exactly the groups due at k. Each was begun at its floor or later, and in-flight
updates only raise the version of the tokens that follow, so each of its tokens was sampled at a version ≥ max(0, k − S).
The step trains it with version k. Staleness = k − version ≤ S. It is never negative: the group was complete before step k
was trained, hence before version k + 1 was published, so all its versions are ≤ k. The admission rule makes the floor
reachable: d ≤ v + S gives d − S ≤ v, a version that has been published. `cancel` only replaces a group by a fresh one with
the same due step, to which the same argument applies.

**A controller** (`staleness.controller=ess`) admits with a lag ≤ S in the place of S, in the admission and in the floor alike. What it admits
was admissible under S, with a floor that is no lower: both proofs hold as they stand.

**Proof, `mask`.** Step k trains the B oldest complete groups, of whatever due step, and `trainable` masks every token
older than k − S. What is left is within S by construction. Every group taken at step k is complete, so no version exceeds k.

**Rewind.** A learner that is lost when steps before n have been handed out has published no version above n. It goes on from
version c ≤ n, while generators may still sample with a version of its life before. Steps c to n − 1 train the very groups that
they were handed, each complete before its step was trained. All other groups are trained at step n or later: staleness is not
negative. A group of theirs that turns out to be damaged is made anew; under `wait` and `cancel` one that a version above its due step
has sampled is refused (`LeaseBook.is_too_new`). Leases due after c + S are taken back; those due at d ≤ c + S go on with c ≥ d − S at the oldest.
"""

from collections.abc import Mapping

import numpy as np


def admits(due: int, version: int, bound: int) -> bool:
    """May a group due at this step be leased while `version` is the newest published?"""
    return due <= version + bound


def floor(due: int, bound: int) -> int:
    """The oldest version that may begin a group due at this step."""
    return max(0, due - bound)


def trainable(versions: np.ndarray, sampled: np.ndarray, step: int, bound: int) -> np.ndarray:
    """[T] bool: the sampled tokens whose staleness, when step `step` trains them, is within the bound (and not negative)."""
    return sampled & (step - versions <= bound) & (versions <= step)


def count(versions: Mapping[int, int], step: int, bound: int) -> tuple[int, int, dict[int, int]]:
    """(tokens trained, sampled tokens excluded, trained tokens by staleness) at a step, from sampled tokens by version."""
    trained = {step - version: tokens for version, tokens in versions.items() if 0 <= step - version <= bound}
    total = sum(trained.values())
    return total, sum(versions.values()) - total, trained
