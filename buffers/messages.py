"""What the roles say to the buffer and what it answers: a closed union of small structs, encoded with msgpack.

Every request is answered once. A request and its answer share a number, so a client may have many under way.
Arrow data travels as a frame beside the message, never inside it.
"""

from typing import Annotated

import msgspec

MAX_PART_BYTES = 4 << 20
"""Bytes of a record batch that are sent at a time."""

Name = Annotated[str, msgspec.Meta(max_length=200)]
"""Of a generator, or of another role."""
Activity = Annotated[str, msgspec.Meta(max_length=200)]
"""What a role is doing, in a few words."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e10)]


class Struct(msgspec.Struct, tag=True, kw_only=True):
    pass


class Lease(Struct):
    """The right and duty to produce one group, or to answer one evaluation prompt."""

    id: int
    """Names this lease; a group that is given out again gets another."""
    split: str
    """`train` or `eval`."""
    task: str
    index: int
    """Names the prompt, with `task` and `seed`."""
    seed: int
    group: int
    """Group number; for `eval` the prompt's number."""
    due: int
    """Step that the group is due at; for `eval` the version to evaluate."""
    floor: int
    """Oldest version that may begin it."""
    num_samples: int


# ---- from a generator


class Join(Struct):
    """-> Welcome. The first thing any generator says."""

    generator: Name


class Leave(Struct):
    """-> Done. The last thing said by a generator, or of it: its leases are free."""

    generator: Name
    error: str | None = None
    """Why it leaves, if not in good order: then the groups it held count as failed."""


class Welcome(Struct):
    config: str
    """The run's resolved configuration, as YAML."""


class Ask(Struct):
    """-> Work, at once if there is some, else when there is or after `wait_s`."""

    generator: Name
    count: int
    """Groups wanted at most."""
    wait_s: float


class Work(Struct):
    leases: list[Lease]
    version: int
    """Newest published version, -1 before the first."""
    weights: str
    """Where its manifest is."""
    change: int = 0
    """Number of the publication or rewind that these two come from: of two answers, the one with the higher number is newer."""
    ended: bool = False
    """The run is over: leave."""


class GeneratorReport(Struct):
    """Running totals of one life of a generator."""

    version: int = -1
    idle_s: float = 0.0
    alive_s: float = 0.0
    sampled_tokens: int = 0
    updates: int = 0
    """Versions taken up."""
    update_bytes: int = 0
    """Their size."""
    fetched_bytes: int = 0
    """What came over a network for them."""
    prepare_s: float = 0.0
    """Fetching and verifying, beside the engine."""
    pause_s: float = 0.0
    """The engine stood still for updates."""
    digest_checks: int = 0
    """Comparisons of a file, or of what the engine holds, with a whole manifest."""
    digest_mismatches: int = 0
    abandoned_scores: int = 0
    """Scores that hung and were given up; each holds a thread until its process ends."""


class Heartbeat(Struct):
    """-> Standing. Renews leases, unless the generator has stood still for `buffer.stalled_s`."""

    generator: Name
    progress: dict[int, int]
    """Tokens sampled so far by lease id."""
    report: GeneratorReport
    activity: Activity = ""
    for_s: Seconds = 0.0
    """How long it has been doing that."""
    still_s: Seconds = 0.0
    """Seconds since its loop last came round, or bytes that it waits for came in."""


class Standing(Struct):
    revoked: list[int]
    """Leases that are no longer the generator's: abort them and say `Drop`."""
    version: int
    weights: str
    change: int = 0
    ended: bool = False


class Submit(Struct):
    """-> Receipt, after the groups are durable. Carries the rows of all of them, in this order, as one Arrow frame.

    Idempotent by lease.
    """

    generator: Name
    leases: list[int]
    schema: int
    """`SCHEMA_VERSION` of the sender."""


class Evaluated(Struct):
    """-> Receipt."""

    generator: Name
    lease: int
    reward: float


class Fail(Struct):
    """-> Receipt. The group could not be made (or, with `revoked`, was told to stop)."""

    generator: Name
    lease: int
    num_tokens: int
    error: str
    revoked: bool = False


class Receipt(Struct):
    leases: list[int]
    verdicts: list[str]
    """Of each lease: `accepted`, or the reason why not."""


# ---- from any role but a generator


class Alive(Struct):
    """-> Done. A heartbeat of a role that holds no leases."""

    role: Name
    activity: Activity
    for_s: Seconds = 0.0
    """How long it has been doing that."""
    still_s: Seconds = 0.0
    """Seconds since its loop last came round."""
    ended: bool = False
    """It will not be heard of again, and need not be."""


# ---- from the learner


class Locate(Struct):
    """-> Located."""


class Located(Struct):
    folder: str
    """Where the journal is, on the buffer's host."""
    mark: str
    """How a reader knows that it is on that host (`journal.is_here`)."""


class Next(Struct):
    """-> Batch or Over, when there is one; NotYet after `wait_s`. Asked again, it is answered with the same."""

    step: int
    wait_s: float


class Slice(Struct, array_like=True):
    """Where a group is in the journal."""

    segment: int
    offset: int
    size: int
    xxh3: int
    row: int
    rows: int


class Batch(Struct):
    """What a step trains, in this order. Who does not map the journal asks for the record batches by `Read`."""

    step: int
    groups: list[int]
    slices: list[Slice]
    weights: list[float] = []
    """Importance weight of each group; empty: all 1."""


class Read(Struct):
    """-> Part, with the bytes as a frame: fewer than asked for where the file is shorter. Part of a record batch, for those
    who do not map the journal; a record batch comes in several."""

    segment: int
    offset: int
    size: int
    """At most `MAX_PART_BYTES`."""


class Part(Struct):
    pass


class Damaged(Struct):
    """-> Replaced. The bytes of these groups are not those that were written. The buffer looks for itself, and has fresh groups
    take the places of those that it finds so too."""

    groups: list[int]


class Replaced(Struct):
    count: int
    """Groups that the buffer found damaged."""


class NotYet(Struct):
    waiting_for: str


class Over(Struct):
    """The run was told to stop."""

    reason: str


class Publish(Struct):
    """-> Done. `version` can be pulled from now on. Idempotent."""

    version: int
    weights: str
    """Where its manifest is."""


class Consumed(Struct):
    """-> Done. The step's groups are trained. Idempotent."""

    step: int
    num_trained: int
    """Tokens that the learner trained; the buffer checks them against its own count."""
    idle_s: float
    """Seconds of its life that the learner waited for batches."""
    alive_s: float
    metrics: dict[str, float]


class Checkpointed(Struct):
    """-> Done. The checkpoint of `step` is written; `oldest` is the oldest one kept."""

    step: int
    oldest: int


class Rewind(Struct):
    """-> Done. The learner goes on from the checkpoint of `step`: later steps will be handed out again, as they were."""

    step: int


class Finish(Struct):
    """-> Done, once the last evaluation is in; NotYet after `wait_s`."""

    wait_s: float


class Done(Struct):
    pass


# ---- from the driver


class Watch(Struct):
    """-> News, when there are records after `after`, else after `wait_s`."""

    after: int
    wait_s: float


class StepRecord(Struct):
    step: int
    time: float
    """Seconds since version 0 was published."""
    metrics: dict[str, float]


class Evaluation(Struct):
    version: int
    time: float
    reward: float
    num_prompts: int


class Account(Struct):
    """One side of the ledger, in tokens or in groups."""

    total: int
    """Tokens generated, groups leased."""
    trained: int
    masked: int
    rejected: dict[str, int]
    in_flight: int


class RoleState(Struct):
    """What a role has last said of itself."""

    last_heard_s: float
    """Seconds since its last heartbeat."""
    activity: str
    for_s: float
    """How long it has been doing that, the time since the heartbeat included."""


class Status(Struct):
    version: int
    step: int
    """Steps consumed."""
    seconds: float
    """Since version 0 was published."""
    tokens: Account
    groups: Account
    trained_twice: int
    staleness: dict[int, int]
    """Trained tokens by staleness."""
    admitted: int
    """Versions ahead of the newest that groups are admitted at present: the bound, or what the controller makes of it."""
    generators: dict[str, GeneratorReport]
    roles: dict[str, RoleState]
    """Generators and learner ranks that have not left, by name."""
    learner_idle: float
    """Share of the learner's life that it waited for a batch."""
    generator_idle: float
    """Share of the generators' lives, together, in which their engines had nothing to do."""
    weight_updates: int
    weight_bytes: int
    fetched_bytes: int
    prepare_s_mean: float
    """Of an update, as is the next."""
    pause_s_mean: float
    digest_checks: int
    digest_mismatches: int
    abandoned_scores: int
    num_quarantined: int
    """Groups that failed for good."""
    quarantined: dict[int, str]
    """The error of the last few of them, by group."""
    replayed: int
    """Tokens trained again, beyond their first time (`buffer.max_uses`)."""
    refused: dict[str, int]
    """Messages that were refused, by reason."""
    waiting_for: str
    """Who waits for whom and why, in a sentence."""
    still_s: float
    """Seconds since anything moved."""


class News(Struct):
    records: list[StepRecord]
    evaluations: list[Evaluation]
    status: Status


class Stop(Struct):
    """-> Done. Ends the run: asks for work and batches are answered with "over"."""

    reason: str


class Refused(Struct):
    """The answer to a message that could not be understood or does not fit the state."""

    reason: str


Request = (
    Join | Leave | Ask | Heartbeat | Alive | Submit | Evaluated | Fail | Locate | Next | Read | Damaged | Publish | Consumed | Checkpointed
    | Rewind | Finish | Watch | Stop
)  # fmt: skip
Reply = Welcome | Work | Standing | Receipt | Located | Batch | Part | Replaced | NotYet | Over | Done | News | Refused

encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(Request)
reply_decoder = msgspec.msgpack.Decoder(Reply)
