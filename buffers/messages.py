"""The requests to the buffer and its answers: a closed union of small records, encoded with msgpack.

    client ── number, request [, Arrow frame] ──▶ buffer        the buffer answers every request once
           ◀── number, answer [, binary frame] ──

A request and its answer share a number, so a client may have many requests under way. Bulk data travels as a
frame beside the message, never inside it. All requests may be repeated without harm: a client sends them
again when the buffer was restarted. The name of a request says what its sender does; `-> X` in a docstring
names the answer. The buffer answers with `RefusedRequest` where a request does not fit.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from buffers.driver_messages import (
    GeneratorNews,
    ReportScaling,
    RunNews,
    ScaleGenerators,
    StopRun,
    WatchGenerators,
    WatchRun,
)
from buffers.message_fields import (
    MAX_GROUPS,
    MAX_LEASES,
    MAX_METRICS,
    Activity,
    BoundedText,
    GroupSlice,
    HeldVersion,
    LeaseId,
    MetricValue,
    Ordinal,
    RewardValue,
    RoleName,
    RowCount,
    RunTotal,
    SampleCount,
    Seconds,
    TokenCount,
    WireRecord,
    shorten,
)
from buffers.parcel_messages import ListParcels, ParcelList, ParcelPart, ReadParcelPart
from buffers.run_status import GeneratorReport
from configs.eval import MAX_SAMPLES

MAX_BODY_BYTES = 1 << 20
"""Bytes of a request without its Arrow frame."""
MAX_PAYLOAD_BYTES = 256 << 20
"""Bytes of the Arrow frame of a submission. A client refuses to send more, and a server closes the connection
of one that does."""
MAX_NUMBER_BYTES = 64
"""Bytes of a request's number."""
MAX_PART_BYTES = 4 << 20
"""Bytes of a record batch that travel in one answer."""


class Lease(WireRecord):
    """The right and duty to produce one group, or to answer one evaluation prompt."""

    id: int
    """Names this lease. A group that is leased again gets a new one."""
    split: str
    """`train` or `eval`."""
    task: str
    """Name of the task. `task`, `index` and `seed` together name the prompt."""
    index: int
    seed: int
    group: int
    """Group number; for `eval` the number of the prompt."""
    due: int
    """Step that the group is due at; for `eval` the version to evaluate."""
    min_version: int
    """Oldest version that may begin the group."""
    num_samples: int
    """Trajectories to sample."""
    evaluation: str = ""
    """Name of the evaluation set that the prompt belongs to; empty for a group."""


# ---- requests of a generator, and their answers


class JoinRun(WireRecord):
    """-> JoinedRun. A generator begins a life. It sends this first, before anything else."""

    generator: RoleName
    evaluates: bool = False
    """True for a generator that leases evaluation prompts alone."""
    again: bool = False
    """True for a generator that goes on with its life, although the buffer was told that it has left."""


class JoinedRun(WireRecord):
    """Welcomes a generator."""

    config: str
    """The run's resolved configuration, as YAML."""
    run: str = ""
    """Names the run and its configuration. Another name in a later answer means that another run answers at
    this address."""


class LeaveRun(WireRecord):
    """-> Acknowledged. A generator leaves, or the driver says so in its place. Its leases are free from then
    on."""

    generator: RoleName
    error: BoundedText | None = None
    """The reason when it does not leave in good order: then the groups that it held count as failed."""


class RequestLeases(WireRecord):
    """-> LeaseGrant. A generator asks for work. The buffer answers as soon as it has some, or after
    `wait_s`."""

    generator: RoleName
    count: Annotated[int, Meta(ge=0, le=MAX_LEASES)]
    """Groups wanted at most. 0: evaluation prompts alone."""
    wait_s: Seconds
    evaluation_room: SampleCount = 2**20
    """Samples of evaluation prompts among them at most, while the run trains. 0: none at all."""
    room: SampleCount | None = None
    """Samples that there is room for, of groups and evaluation prompts together. Null: those of `count`
    groups."""
    version: HeldVersion | None = None
    """Version that the generator holds; -1 before the first. Null: it can begin any lease at once."""
    replaces: bool = False
    """True for a request in the place of the one before. If that one has been answered, nothing is given."""
    life: Annotated[str, Meta(max_length=64)] = ""
    """Random name of the generator's present life, whose requests have different numbers. One that comes
    again over another connection has had no answer. Empty: nothing is known of that."""


class LeaseGrant(WireRecord):
    """Gives leases to a generator (none where there is no work), and announces the newest version."""

    leases: list[Lease]
    version: int
    """Newest published version, -1 before the first."""
    manifest_locator: str
    """Where the manifest of that version is."""
    announcement_number: int = 0
    """Counts publications and rewinds. Of two answers, the one with the higher number names the newer
    version."""
    ended: bool = False
    """True when the run is over: the generator leaves."""
    run: str = ""
    """As in `JoinedRun`."""


class GeneratorHeartbeat(WireRecord):
    """-> GeneratorStanding. Renews a generator's leases, unless it has stood still for `buffer.stalled_s`."""

    generator: RoleName
    progress: Annotated[dict[LeaseId, TokenCount], Meta(max_length=MAX_LEASES)]
    """Tokens sampled so far, by lease id."""
    report: GeneratorReport
    overdue: Annotated[list[LeaseId], Meta(max_length=MAX_LEASES)] = []
    """Those of the leases that it could not begin within `BEGIN_S`, because it waits for a newer version:
    others get them. It measures that itself, because a heartbeat may be late."""
    evaluates: bool = False
    """As in `JoinRun`: a buffer that was started again has heard no `JoinRun`."""
    activity: Activity = ""
    activity_s: Seconds = 0.0
    """Seconds for which it has been at this activity."""
    standstill_s: Seconds = 0.0
    """Seconds since its loop last came round, or since bytes that it waits for last came in."""


class GeneratorStanding(WireRecord):
    """Tells a generator which leases it has lost, and announces the newest version."""

    revoked: list[int]
    """Leases that the generator no longer holds: it aborts them and sends `FailLease` for each, with
    `revoked`."""
    version: int
    """Newest published version, -1 before the first."""
    manifest_locator: str
    """Where the manifest of that version is."""
    announcement_number: int = 0
    """As in `LeaseGrant`."""
    ended: bool = False
    """True when the run is over: the generator leaves."""
    run: str = ""
    """As in `JoinedRun`."""
    has_left: bool = False
    """True when somebody has said that the generator has left: it gets no leases."""


class SubmitGroups(WireRecord):
    """-> LeaseReceipt, after the groups are durable. A generator hands in complete groups.

    The rows of all of them travel as one Arrow frame, in the order of `leases`. Idempotent by lease.
    """

    generator: RoleName
    leases: Annotated[list[LeaseId], Meta(min_length=1, max_length=MAX_LEASES)]
    rows: Annotated[list[RowCount], Meta(min_length=1, max_length=MAX_LEASES)]
    """Rows of each lease: one for each sample, and one more for each further branch of an episode."""
    schema: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    """`SCHEMA_VERSION` of the sender."""


class SubmitParityProbe(WireRecord):
    """-> Acknowledged. A generator hands in its samples for the parity probe (`buffers.parity_probe`), as one
    Arrow frame. Idempotent."""

    generator: RoleName
    manifest_locator: BoundedText
    """Where the manifest of the version that sampled them is."""


class SubmitEvaluation(WireRecord):
    """-> LeaseReceipt. A generator hands in the scored samples of one evaluation prompt.

    Their rows travel as one Arrow frame, unless they are too large for one.
    """

    generator: RoleName
    lease: LeaseId
    rewards: Annotated[list[RewardValue], Meta(min_length=1, max_length=MAX_SAMPLES)]
    """One for each sample."""
    num_tokens: TokenCount
    """Sampled tokens of all samples together."""
    oldest_version: Ordinal
    """Oldest version that sampled a token."""
    newest_version: Ordinal
    """Newest version that sampled a token."""
    num_truncated: SampleCount = 0
    """Samples that ended because they had no tokens left."""
    num_rows: Annotated[int, Meta(ge=0, le=2**20)] = 0
    """Rows of the samples in the frame; 0 without one."""
    digest: Annotated[str, Meta(max_length=64)] = ""
    """Digest of the version that began the prompt, as the engine has attested it."""


class FailLease(WireRecord):
    """-> LeaseReceipt. A generator could not make the group, or does not make it (`revoked`)."""

    generator: RoleName
    lease: LeaseId
    num_tokens: TokenCount
    """Tokens that it had sampled."""
    error: BoundedText
    revoked: bool = False
    """True when the buffer had revoked the lease, or the generator leaves. Then it is no failure of the
    group."""


class LeaseReceipt(WireRecord):
    """Tells a generator the buffer's verdict on each lease that it has handed in."""

    leases: list[int]
    verdicts: list[str]
    """One for each lease: `accepted`, or the reason why not."""


# ---- request of any role but a generator


class RoleHeartbeat(WireRecord):
    """-> Acknowledged. A role that holds no leases shows that it lives."""

    role: RoleName
    activity: Activity
    activity_s: Seconds = 0.0
    """Seconds for which it has been at this activity."""
    standstill_s: Seconds = 0.0
    """Seconds since its loop last came round."""
    ended: bool = False
    """True when the role ends in good order: the buffer does not expect to hear from it again."""


# ---- requests of the learner, and their answers


class LocateJournal(WireRecord):
    """-> JournalLocation. The learner asks whether it can map the journal instead of fetching batches."""


class JournalLocation(WireRecord):
    """Says where the journal is."""

    folder: str
    """Path on the buffer's host."""
    mark: str
    """Text by which a reader finds out whether it is on that host (`journal.is_on_this_host`)."""


class RequestBatch(WireRecord):
    """-> BatchOffer or RunStopped as soon as possible, NotReadyYet after `wait_s`. The learner asks for a
    step's groups.

    A repeated request has the same answer.
    """

    step: Ordinal
    wait_s: Seconds


class BatchOffer(WireRecord):
    """Names the groups that a step trains, in this order. A learner that cannot map the journal fetches them
    with `ReadBatchPart`."""

    step: int
    groups: list[int]
    """Group numbers."""
    slices: list[GroupSlice]
    group_weights: list[float] = []
    """Importance weight of each group; empty when all are 1."""


class ReadBatchPart(WireRecord):
    """-> BatchPart. A learner that cannot map the journal fetches some bytes of a record batch, which comes
    in several parts."""

    segment: Ordinal
    offset: RunTotal
    size: Annotated[int, Meta(ge=0, le=MAX_PART_BYTES)]
    """Bytes wanted."""


class BatchPart(WireRecord):
    """Carries bytes of a record batch as a frame: fewer than asked for where the file is shorter."""


class RequestParityProbe(WireRecord):
    """-> ParityProbeRows once an engine has sampled a probe of the newest version, RunStopped, or NotReadyYet
    after `wait_s`. The learner asks for the probe."""

    wait_s: Seconds


class ParityProbeRows(WireRecord):
    """Carries the rows of a parity probe as an Arrow frame."""


class ReportDamagedGroups(WireRecord):
    """-> ReplacedGroups. The learner has read bytes of these groups that are not those that were written.

    The buffer reads them itself, and has fresh groups take the places of those that it finds damaged too.
    """

    groups: Annotated[list[RunTotal], Meta(max_length=MAX_GROUPS)]
    """Group numbers."""


class ReplacedGroups(WireRecord):
    """Says how many of the reported groups the buffer found damaged too."""

    count: int


class PublishVersion(WireRecord):
    """-> PublishedVersion. The learner announces a version that generators can pull from now on.
    Idempotent."""

    version: Ordinal
    manifest_locator: BoundedText
    """Where the version's manifest is."""


class ReportTrainedStep(WireRecord):
    """-> Acknowledged. The learner has trained the groups of a step. Idempotent."""

    step: Ordinal
    num_trained: TokenCount
    """Tokens that the learner trained. The buffer compares them with its own count."""
    idle_s: Seconds
    """Seconds of the learner's life in which it waited for batches."""
    alive_s: Seconds
    """Seconds since the learner's life began."""
    metrics: Annotated[dict[RoleName, MetricValue], Meta(max_length=MAX_METRICS)]


class ReportCheckpoint(WireRecord):
    """-> Acknowledged. The learner has written the checkpoint of `step`."""

    step: Ordinal
    oldest: Ordinal
    """Step of the oldest checkpoint that is kept. The buffer may drop what only earlier steps need."""


class RewindToStep(WireRecord):
    """-> Acknowledged. The learner goes on from the checkpoint of `step`. The buffer hands out later steps
    again, as they were."""

    step: Ordinal


class AwaitEvaluations(WireRecord):
    """-> Acknowledged once the last evaluation is in, NotReadyYet after `wait_s`. The learner has trained its
    last step."""

    wait_s: Seconds


class NotReadyYet(WireRecord):
    """Says that an answer is not there yet: the learner asks again."""

    waiting_for: str
    """A sentence that says who waits for whom and why."""


class RunStopped(WireRecord):
    """Tells the learner that the run was told to stop."""

    reason: str


# ---- answers to any request


class Acknowledged(WireRecord):
    """Says that the request has been carried out."""


class PublishedVersion(Acknowledged):
    """Says that a version is announced, and which ones the learner has to keep."""

    needed_versions: list[int] = []
    """Versions that are being evaluated or wait for it, where generators need them whole until then."""


class RefusedRequest(WireRecord):
    """Says that the buffer could not decode the request, or that it does not fit the buffer's state."""

    reason: str


WaitingRequest = (
    RequestLeases | RequestBatch | RequestParityProbe | AwaitEvaluations | WatchRun | WatchGenerators
)
"""Requests that may have to wait for their answers, up to `wait_s`."""
GeneratorRequest = (
    JoinRun | LeaveRun | GeneratorHeartbeat | SubmitGroups | SubmitParityProbe | SubmitEvaluation | FailLease
)
"""Requests of generators that the buffer answers in the turn in which they come."""
ImmediateRequest = (
    GeneratorRequest
    | ListParcels
    | ReadParcelPart
    | RoleHeartbeat
    | LocateJournal
    | ReadBatchPart
    | ReportDamagedGroups
    | PublishVersion
    | ReportTrainedStep
    | ReportCheckpoint
    | RewindToStep
    | ScaleGenerators
    | ReportScaling
    | StopRun
)
"""All requests that the buffer answers in the turn in which they come."""
Request = WaitingRequest | ImmediateRequest
Reply = (
    JoinedRun
    | LeaseGrant
    | GeneratorStanding
    | LeaseReceipt
    | ParcelList
    | ParcelPart
    | JournalLocation
    | BatchOffer
    | BatchPart
    | ParityProbeRows
    | ReplacedGroups
    | NotReadyYet
    | RunStopped
    | RunNews
    | GeneratorNews
    | Acknowledged
    | PublishedVersion
    | RefusedRequest
)

encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(Request)
reply_decoder = msgspec.msgpack.Decoder(Reply)


class UndecodableRequest(ValueError):
    """Raised for bytes that are no request, or a request with a field outside its bounds."""


def decode_request(body: bytes | memoryview) -> Request:
    """Returns the request. Raises UndecodableRequest, and nothing else, whatever the bytes are."""
    try:
        return request_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableRequest(shorten(f"a request must be one of `buffers.messages`: {error}")) from error
