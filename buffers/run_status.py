"""The buffer's account of a run at one moment: records for those who watch it, and the reports they are made
from."""

from buffers.evaluation_statistics import EvaluationResult
from buffers.message_fields import (
    BoundedText,
    GeneratorCount,
    GroupSlice,
    HeldVersion,
    RoleName,
    RunTotal,
    Seconds,
    WireRecord,
)


class GeneratorReport(WireRecord):
    """Running totals of one life of a generator. Each heartbeat carries them."""

    version: HeldVersion = -1
    idle_s: Seconds = 0.0
    """Seconds in which the engine had nothing to do."""
    alive_s: Seconds = 0.0
    """Seconds since the life began."""
    sampled_tokens: RunTotal = 0
    """Tokens of samples that have ended."""
    decoded_tokens: RunTotal = 0
    """Tokens of ended samples and of samples under way, probes included. The number grows while the engine
    gets on."""
    updates: RunTotal = 0
    """Versions that the engine has loaded."""
    update_bytes: RunTotal = 0
    """Size of those versions in bytes."""
    fetched_bytes: RunTotal = 0
    """Bytes of those versions that came over a network."""
    prepare_s: Seconds = 0.0
    """Seconds spent on fetching and verifying versions, while the engine runs on."""
    pause_s: Seconds = 0.0
    """Seconds in which the engine stood still for updates."""
    digest_checks: RunTotal = 0
    """Comparisons of a file, or of the engine's parameters, with a whole manifest."""
    digest_mismatches: RunTotal = 0
    """Comparisons that found a difference."""
    abandoned_scores: RunTotal = 0
    """Scores that hung and were given up. Each holds a thread until its process ends."""
    discarded_tokens: RunTotal = 0
    """Sampled tokens of handed-in groups that are in no row: those behind an agent's stop string, and those
    of a request whose client went away."""


class RoleState(WireRecord):
    """The last report of a role about itself."""

    last_heard_s: float
    """Seconds since its last heartbeat."""
    activity: str
    activity_s: float
    """Seconds for which it has been at this activity, the time since the heartbeat included."""


class LedgerAccount(WireRecord):
    """One side of the ledger, in tokens or in groups. `total` is the sum of all other fields."""

    total: int
    """Tokens generated, or groups leased."""
    trained: int
    masked: int
    rejected: dict[str, int]
    """Amount by reason."""
    in_flight: int


class StepRecord(WireRecord):
    """One trained step and its metrics."""

    step: int
    time: float
    """Seconds since version 0 was published."""
    metrics: dict[str, float]
    samples: list[GroupSlice] = []
    """The groups whose samples trackers show (`tracking.samples`): at some steps, some of those trained."""


class EvaluationRecord(WireRecord):
    """The result of one version on one evaluation set."""

    number: int
    """Counts the records of the run from 1. A number is never used again."""
    result: EvaluationResult


class SourceReport(WireRecord):
    """Groups of one source of prompts: leased = trained + rejected + those that still may be trained."""

    leased: int
    """Groups leased, each once."""
    trained: int
    rejected: int
    reward_mean: float | None
    """Mean reward of the latest `curriculum.window` complete groups; None before the first."""
    epochs: float | None
    """Groups leased, over the source's prompts; None for a source without end."""


class Scaling(WireRecord):
    """A change of the number of generators that a run's driver has started, and how far it is."""

    order: RoleName
    """Names the change: whoever asks for it makes the name up."""
    count: GeneratorCount
    """Generators for training that there are to be."""
    progress: BoundedText = ""
    """The state of the change, in words; empty before the driver has heard of it."""
    ended: bool = False
    failed: bool = False
    """True when it has ended otherwise than asked for."""


class RunStatus(WireRecord):
    """The state of the run: its progress, its ledger, and who waits for whom."""

    version: int
    """Newest published version, -1 before the first."""
    num_trained_steps: int
    elapsed_s: float
    """Seconds since version 0 was published."""
    tokens: LedgerAccount
    groups: LedgerAccount
    trained_twice: int
    """Groups that were trained twice. Anything but 0 is a defect."""
    staleness_histogram: dict[int, int]
    """Trained tokens by staleness in versions."""
    admission_lag: int
    """How many versions ahead of the newest the buffer leases groups at present: `staleness.max_versions`, or
    fewer where the controller says so."""
    generators: dict[str, GeneratorReport]
    """The latest report of each generator by name."""
    roles: dict[str, RoleState]
    """Generators and learner ranks that have not left, by name."""
    learner_idle_share: float
    """Share of the learner's life in which it waited for a batch, 0..1."""
    generator_idle_share: float
    """Share of the generators' lives, together, in which their engines had nothing to do, 0..1."""
    weight_updates: int
    """Versions that all generators together have loaded."""
    weight_bytes: int
    """Size of those versions in bytes."""
    fetched_bytes: int
    """Bytes of those versions that came over a network."""
    prepare_s_mean: float
    """Mean seconds that fetching and verifying one update took."""
    pause_s_mean: float
    """Mean seconds that an engine stood still for one update."""
    digest_checks: int
    digest_mismatches: int
    abandoned_scores: int
    discarded_tokens: int
    num_quarantined: int
    """Groups that failed for good."""
    quarantined: dict[int, str]
    """Errors of the last few quarantined groups, by group number."""
    replayed_tokens: int
    """Tokens trained again, beyond their first time (`buffer.max_uses`)."""
    refused_requests: dict[str, int]
    """Number of refused requests by reason."""
    waiting_for: str
    """A sentence that says who waits for whom and why."""
    milestones: dict[str, float]
    """Unix time in seconds, in this life of the buffer, of each milestone reached: `learner` (its first
    version), `engines` (all `generators.count` engines run; while fewer do, the latest start), `first_group`
    (complete), `first_step` (trained)."""
    standstill_s: float
    """Seconds since data last moved."""
    sources: dict[str, SourceReport] = {}
    """By name of the source."""
    curriculum: dict[str, float] = {}
    """The curriculum's own figures: `level`, or `pool_<name>` (prompts in each pool) and `under_way`."""
    evaluators: list[str] = []
    """Names of the generators that evaluate alone."""
    skipped_evaluations: int = 0
    """Evaluations that were given up, because a newer version was due before they had begun."""
    oldest_checkpoint: int = 0
    """Step of the oldest checkpoint that the learner keeps: the earliest step that it can go back to."""
    ended: bool = False
    """True once the run was told to end: the buffer gives out no more leases."""
    scaling: Scaling | None = None
    """The last change of the number of generators, or the one under way."""
