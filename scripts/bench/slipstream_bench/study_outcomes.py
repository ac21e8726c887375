"""Records of the staleness study: what a run was asked for, and what came out of it."""

from collections.abc import Iterable

import msgspec

HELD_OUT = 1024
"""Prompts that the last version of a run is evaluated on."""
CONTROLLER_COLUMN = "ess"
"""Column of the runs under the controller; every other column is an S."""


class StudyJob(msgspec.Struct, frozen=True):
    algorithm: str
    max_versions: int
    """The bound S of the run."""
    seed: int
    controller: str
    """`fixed` (every step has the largest lag that S allows) or `ess` (the controller chooses the lag)."""
    lr: float
    steps: int


class StudyOutcome(msgspec.Struct, frozen=True):
    job: StudyJob
    reward: float
    """Held-out reward of the last version; NaN when training has ended in a gradient that is not finite."""
    curve: list[float]
    """Mean reward of each step's batch, as it was sampled."""
    mean_staleness: float
    """Versions between sampling and training, mean over steps."""
    ess: list[float]
    """Effective sample size of the tokens' π_θ / μ, of each step."""
    kl: list[float]
    """k3 estimate of the divergence between π_θ and μ, of each step."""
    seconds: float


def group_outcomes(outcomes: Iterable[StudyOutcome]) -> dict[tuple[str, str], list[StudyOutcome]]:
    """Groups outcomes by algorithm and column: S as a text, or `CONTROLLER_COLUMN`."""
    groups: dict[tuple[str, str], list[StudyOutcome]] = {}
    for outcome in sorted(outcomes, key=lambda o: (o.job.controller, o.job.max_versions, o.job.seed)):
        column = str(outcome.job.max_versions) if outcome.job.controller == "fixed" else CONTROLLER_COLUMN
        groups.setdefault((outcome.job.algorithm, column), []).append(outcome)
    return groups
