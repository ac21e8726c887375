"""What the roles say to the buffer and what it answers: a closed union of small structs, encoded with msgpack.

Every request is answered once. A request and its answer share a number, so a client may have many under way.
Arrow data travels as a frame beside the message, never inside it.

Every field of a request has a bound, so that nothing that arrives can overflow what is added up, logged or answered: a
request outside of them is refused when it is decoded. `buffers.limits` has the bounds that depend on the run.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_BODY_BYTES = 1 << 20
"""A request without its Arrow frame."""
MAX_PAYLOAD_BYTES = 256 << 20
"""The Arrow frame of a submission: a client refuses to send more, and a server closes the connection that does."""
MAX_NUMBER_BYTES = 64
"""A client's number of a request."""
MAX_PART_BYTES = 4 << 20
"""Bytes of a record batch that are sent at a time."""
MAX_TEXT = 4000
MAX_LEASES = 1 << 14
MAX_METRICS = 4096
MAX_GROUPS = 1 << 16

Name = Annotated[str, Meta(min_length=1, max_length=200)]
"""The name of a generator, or of another role."""
Activity = Annotated[str, Meta(max_length=200)]
"""What a role is doing, in a few words."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
"""A reason, an error, or where a manifest is. `shorten` makes any text fit."""
LeaseId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Of a step, a version, or a file."""
Tokens = Annotated[int, Meta(ge=0, le=2**40)]
"""Tokens of one lease, or of one step. A million such numbers add up to less than 2^63."""
Total = Annotated[int, Meta(ge=0, le=2**50)]
"""Whatever is counted for as long as a run lasts: bytes, groups, tokens of one generator."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
MAX_FLOAT32 = 3.4028234663852886e38
Reward = Annotated[float, Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
"""It is kept in float32, and finite there."""
Metric = Annotated[float, Meta(description="any number: a learner that diverges says NaN")]


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
    error: Text | None = None
    """Why it leaves, if not in good order: then the groups it held count as failed."""


class Welcome(Struct):
    config: str
    """The run's resolved configuration, as YAML."""


class Ask(Struct):
    """-> Work, at once if there is some, else when there is or after `wait_s`."""

    generator: Name
    count: Annotated[int, Meta(ge=0, le=MAX_LEASES)]
    """Groups wanted at most."""
    wait_s: Seconds


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

    version: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    idle_s: Seconds = 0.0
    alive_s: Seconds = 0.0
    sampled_tokens: Total = 0
    """Tokens of samples that have ended."""
    decoded_tokens: Total = 0
    """The same and those of samples under way, probes included: the number changes as long as the engine gets on."""
    updates: Total = 0
    """Versions taken up."""
    update_bytes: Total = 0
    """Their size."""
    fetched_bytes: Total = 0
    """What came over a network for them."""
    prepare_s: Seconds = 0.0
    """Fetching and verifying, beside the engine."""
    pause_s: Seconds = 0.0
    """The engine stood still for updates."""
    digest_checks: Total = 0
    """Comparisons of a file, or of what the engine holds, with a whole manifest."""
    digest_mismatches: Total = 0
    abandoned_scores: Total = 0
    """Scores that hung and were given up; each holds a thread until its process ends."""


class Heartbeat(Struct):
    """-> Standing. Renews leases, unless the generator has stood still for `buffer.stalled_s`."""

    generator: Name
    progress: Annotated[dict[LeaseId, Tokens], Meta(max_length=MAX_LEASES)]
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
    leases: Annotated[list[LeaseId], Meta(min_length=1, max_length=MAX_LEASES)]
    schema: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    """`SCHEMA_VERSION` of the sender."""


class SubmitProbe(Struct):
    """-> Done. What an engine has sampled for the parity probe (`buffers.probe`): one Arrow frame of rows. Idempotent."""

    generator: Name
    weights: Text
    """Where the manifest of the version that sampled it is."""


class Evaluated(Struct):
    """-> Receipt."""

    generator: Name
    lease: LeaseId
    reward: Reward


class Fail(Struct):
    """-> Receipt. The group could not be made (or, with `revoked`, was told to stop)."""

    generator: Name
    lease: LeaseId
    num_tokens: Tokens
    error: Text
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

    step: Number
    wait_s: Seconds


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

    segment: Number
    offset: Total
    size: Annotated[int, Meta(ge=0, le=MAX_PART_BYTES)]


class Part(Struct):
    pass


class NextProbe(Struct):
    """-> Part, with the rows as a frame, once an engine has sampled a probe of the newest version; NotYet after `wait_s`."""

    wait_s: Seconds


class Damaged(Struct):
    """-> Replaced. The bytes of these groups are not those that were written. The buffer looks for itself, and has fresh groups
    take the places of those that it finds so too."""

    groups: Annotated[list[Total], Meta(max_length=MAX_GROUPS)]


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

    version: Number
    weights: Text
    """Where its manifest is."""


class Consumed(Struct):
    """-> Done. The step's groups are trained. Idempotent."""

    step: Number
    num_trained: Tokens
    """Tokens that the learner trained; the buffer checks them against its own count."""
    idle_s: Seconds
    """Seconds of its life that the learner waited for batches."""
    alive_s: Seconds
    metrics: Annotated[dict[Name, Metric], Meta(max_length=MAX_METRICS)]


class Checkpointed(Struct):
    """-> Done. The checkpoint of `step` is written; `oldest` is the oldest one kept."""

    step: Number
    oldest: Number


class Rewind(Struct):
    """-> Done. The learner goes on from the checkpoint of `step`: later steps will be handed out again, as they were."""

    step: Number


class Finish(Struct):
    """-> Done, once the last evaluation is in; NotYet after `wait_s`."""

    wait_s: Seconds


class Done(Struct):
    pass


# ---- from the driver


class Watch(Struct):
    """-> News, when there are records after `after`, else after `wait_s`."""

    after: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Records that are known already; 2^63 - 1 asks for the status alone."""
    wait_s: Seconds


class StepRecord(Struct):
    step: int
    time: float
    """Seconds since version 0 was published."""
    metrics: dict[str, float]


class Evaluation(Struct):
    version: int
    time: float
    reward: float
    """The mean over the prompts."""
    std: float
    """Standard deviation over the prompts (n − 1); 0 of a single one."""
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
    reached: dict[str, float]
    """Unix time in seconds, in this life of the buffer, of: `learner` (its first version), `engines` (the last of
    `generators.count` engines ran; while fewer do, the last of them), `first_group` (complete), `first_step` (trained)."""
    still_s: float
    """Seconds since anything moved."""


class News(Struct):
    records: list[StepRecord]
    evaluations: list[Evaluation]
    status: Status


class Stop(Struct):
    """-> Done. Ends the run: asks for work and batches are answered with "over"."""

    reason: Text


class Refused(Struct):
    """The answer to a message that could not be understood or does not fit the state."""

    reason: str


Request = (
    Join | Leave | Ask | Heartbeat | Alive | Submit | SubmitProbe | Evaluated | Fail | Locate | Next | NextProbe | Read | Damaged | Publish
    | Consumed | Checkpointed | Rewind | Finish | Watch | Stop
)  # fmt: skip
Reply = (
    Welcome
    | Work
    | Standing
    | Receipt
    | Located
    | Batch
    | Part
    | Replaced
    | NotYet
    | Over
    | Done
    | News
    | Refused
)

encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(Request)
reply_decoder = msgspec.msgpack.Decoder(Reply)


class Undecodable(ValueError):
    """Bytes that are no request, or one with a field outside its bounds."""


def decode_request(body: bytes | memoryview) -> Request:
    """Raises Undecodable, whatever the bytes are."""
    try:
        return request_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable(shorten(f"a request must be one of `buffers.messages`: {error}")) from error


def shorten(text: str) -> str:
    """The text, or its beginning and its end where it is too long for a message."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2 - 20
    return f"{text[:half]} ... {len(text):,} characters ... {text[-half:]}"[:MAX_TEXT]
