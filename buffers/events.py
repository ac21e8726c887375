"""Events: everything that happens to groups, as the journal's log records it.

Applying the log from its beginning (`buffers.book_events`) makes the state of the buffer.
"""

import msgspec
import xxhash

from buffers.evaluation_statistics import EvaluationResult
from buffers.message_fields import GroupSlice


class Began(msgspec.Struct, frozen=True, tag=True):
    """A file of the log begins. This is its first line."""

    log: int
    """Number of this file."""
    previous: int
    """Number of the file that it continues; -1 for none."""
    previous_bytes: int
    """Byte at which that file ends."""
    next_segment: int
    """Segments from this number on have not been written yet."""
    terms: dict[str, str | int | float | None]
    """The terms that groups are leased and accepted on from here (`terms.Terms`)."""
    durability: str
    boot: str
    """Name of the host and its last start, as `configs.host.boot_id` has it."""
    at: float


class Synced(msgspec.Struct, frozen=True, tag=True):
    """Everything before byte `end` of file `log` was on the disk when this line was written, groups
    included."""

    log: int
    end: int


class Repaired(msgspec.Struct, frozen=True, tag=True):
    """`scripts/repair.sh` has mended damage.

    From here `step` steps count as trained, whatever stands before.
    """

    step: int
    lost: list[int]
    """Numbers of the groups that were accepted and are lost."""
    report: list[str]


class Leased(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A lease was given to a generator."""

    lease: int
    group: int
    due: int
    generator: str
    at: float
    """Unix time in seconds."""
    prompt: int = -1
    """Index of the prompt; -1 in a line of before: then the order of prompts tells it."""


class Accepted(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A lease's group is complete, and is in the journal."""

    lease: int
    group: int
    due: int
    prompt: int
    segment: int
    """Number of the segment file."""
    offset: int
    """Byte of the file at which the record batch that holds the group begins."""
    size: int
    """Bytes of the record batch."""
    xxh3: int
    """Checksum of the record batch, xxh3-64."""
    row: int
    """First row of the group in the record batch."""
    rows: int
    tokens: int
    """Sampled tokens."""
    oldest: int
    newest: int
    """Oldest and newest version that sampled a token of the group."""
    reward_mean: float
    reward_std: float
    at: float
    versions: dict[int, int] = {}
    """Sampled tokens by version; empty when all of them are of `oldest`."""

    def tokens_by_version(self) -> dict[int, int]:
        return self.versions or {self.oldest: self.tokens}


class Failed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """An attempt came to nothing: it failed, expired, or its lease had been lost before."""

    lease: int
    tokens: int
    """Sampled tokens that are known of the attempt."""
    error: str
    at: float
    counts: bool = True
    """True when the failure counts against `max_attempts`."""


class Duplicate(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A lease's group came after another attempt at it had been accepted, or after the group was rejected."""

    lease: int
    tokens: int


class Rejected(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A group will not be trained: `zero_variance`, `uninformative`, `cancelled`, `failed`, `unsampled` or
    `damaged`."""

    group: int
    reason: str
    error: str = ""
    due: int = -1
    tokens: int = 0
    at: float = 0.0


class Opened(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A step had too few groups left within the bound, so places were added to it."""

    step: int
    places: int


class Retired(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Groups that have been trained, and could have been again, are not used any more."""

    groups: list[int]


class Handed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Step `step` trains these groups, whoever asks again and whatever completes meanwhile."""

    step: int
    groups: list[int]
    group_weights: list[float] = []
    """Importance weight of each group; empty when all are 1."""


class Trained(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Step `step` trained these groups, in this order."""

    step: int
    groups: list[int]
    trained: list[int]
    """Trained tokens of each group."""
    excluded: list[int]
    """Sampled tokens of each group that were beyond the staleness bound."""
    staleness: dict[int, int]
    """Trained tokens by staleness."""
    group_weights: list[float] = []
    """Importance weight of each group; empty when all are 1."""
    at: float = 0.0


class Reported(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The metrics of the step that the line before has told, for those who watch the run."""

    step: int
    seconds: float
    """Seconds since the first version was published."""
    metrics: dict[str, float | str]
    """A number that is not finite stands as text: `nan`, `inf` or `-inf`."""
    samples: list[GroupSlice] = []
    """The groups whose samples trackers show."""


class Published(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The learner has published a version."""

    version: int
    manifest_locator: str
    """Where the manifest of its model weights is."""
    at: float


class Evaluated(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A version's evaluation on one set is done."""

    version: int
    at: float
    result: EvaluationResult | None = None
    """None in a journal that an older program wrote: its result is in the run's summary alone."""


class Rewound(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The learner went back to the checkpoint of `step`.

    Later steps are undone and will be handed the same groups again.
    """

    step: int


class Checkpointed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The learner has written the checkpoint of `step`; `oldest` is the oldest one that it keeps."""

    step: int
    oldest: int


class Dropped(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Segments that no kept checkpoint needs were deleted."""

    segments: list[int]


AnyEvent = (
    Began
    | Synced
    | Repaired
    | Leased
    | Accepted
    | Failed
    | Duplicate
    | Rejected
    | Opened
    | Retired
    | Handed
    | Trained
    | Reported
    | Published
    | Evaluated
    | Rewound
    | Checkpointed
    | Dropped
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)
_CHECK = b',"check":"00000000"}\n'


def encode_line(event: AnyEvent) -> bytes:
    """Returns a line of the log: JSON, whose last field `check` is the xxh32 of everything before it."""
    body = _encoder.encode(event)[:-1]
    return b'%s,"check":"%08x"}\n' % (body, xxhash.xxh32_intdigest(body))


def decode_line(line: bytes) -> AnyEvent | None:
    """Returns the event of a line; None when the line is cut or changed."""
    body, check = line[: -len(_CHECK)], line[-len(_CHECK) :]
    if check != b',"check":"%08x"}\n' % xxhash.xxh32_intdigest(body):
        return None
    return _decoder.decode(body + b"}")
