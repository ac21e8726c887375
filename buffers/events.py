"""What happens to groups, as the journal's log records it. The log, applied from its beginning, is the state of the buffer."""

import msgspec
import xxhash


class Began(msgspec.Struct, frozen=True, tag=True):
    """A file of the log begins. The first line of each."""

    log: int
    """Number of this file."""
    previous: int
    """Number of the file that it continues, -1 for none."""
    previous_bytes: int
    """Where that one ends."""
    next_segment: int
    """Segments from this number on have not been written yet."""
    terms: dict[str, str | int | float | None]
    """What groups are leased and accepted on from here (`groups.Terms`)."""
    durability: str
    boot: str
    """Names the host and its last start, as `configs.host.boot_id` does."""
    at: float


class Synced(msgspec.Struct, frozen=True, tag=True):
    """All that lies before byte `end` of file `log` was on the disk when this line was written, groups included."""

    log: int
    end: int


class Repaired(msgspec.Struct, frozen=True, tag=True):
    """Damage was mended by `scripts/repair.sh`: `step` steps count as trained from here, whatever stands before."""

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


class Accepted(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A lease's group is complete, and is in the journal."""

    lease: int
    group: int
    due: int
    prompt: int
    segment: int
    """Number of the segment file."""
    offset: int
    """Where in it the record batch that holds the group begins, in bytes."""
    size: int
    """Bytes of the record batch."""
    xxh3: int
    """Its checksum, xxh3-64."""
    row: int
    """First row of the group in the record batch."""
    rows: int
    tokens: int
    """Sampled tokens."""
    oldest: int
    newest: int
    """Versions of its oldest and newest token."""
    reward_mean: float
    reward_std: float
    at: float
    versions: dict[int, int] = {}
    """Sampled tokens by version; empty: all of them at `oldest`."""

    def tokens_by_version(self) -> dict[int, int]:
        return self.versions or {self.oldest: self.tokens}


class Failed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """An attempt came to nothing: it failed, expired, or was in vain because the lease had been lost before."""

    lease: int
    tokens: int
    """Sampled tokens known of it."""
    error: str
    at: float
    counts: bool = True
    """Whether it counts against `max_attempts`."""


class Duplicate(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A lease's group came after another attempt at it had been accepted, or after the group was rejected."""

    lease: int
    tokens: int


class Rejected(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A group will never be trained (or not again): `zero_variance`, `cancelled`, `failed`, `unsampled`, `damaged`."""

    group: int
    reason: str
    error: str = ""
    due: int = -1
    tokens: int = 0
    at: float = 0.0


class Opened(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A step had too few groups left within the bound: places were added to it."""

    step: int
    places: int


class Retired(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Groups that have been trained, and could have been again, are beyond the bound now."""

    groups: list[int]


class Handed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """These are the groups that step `step` trains, whoever asks again and whatever completes meanwhile."""

    step: int
    groups: list[int]
    group_weights: list[float] = []
    """Importance weight of each group; empty when all are 1."""


class Trained(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Step `step` trained these groups, in this order."""

    step: int
    groups: list[int]
    trained: list[int]
    """Tokens of each group that were trained."""
    excluded: list[int]
    """Sampled tokens of each that were beyond the staleness bound."""
    staleness: dict[int, int]
    """Trained tokens by staleness."""
    group_weights: list[float] = []
    """Importance weight of each group; empty when all are 1."""
    at: float = 0.0


class Published(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The learner has published a version."""

    version: int
    manifest_locator: str
    """Where the manifest of its model weights is."""
    at: float


class Evaluated(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A version's evaluation on held-out prompts is done."""

    version: int
    reward: float
    num_prompts: int
    at: float


class Rewound(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The learner went back to the checkpoint of `step`: later steps are undone, and will be handed out again as they were."""

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
    | Published
    | Evaluated
    | Rewound
    | Checkpointed
    | Dropped
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)
_CHECK = b',"check":"00000000"}\n'


def encode(event: AnyEvent) -> bytes:
    """A line of the log: JSON, whose last field `check` is the xxh32 of what stands before it."""
    body = _encoder.encode(event)[:-1]
    return b'%s,"check":"%08x"}\n' % (body, xxhash.xxh32_intdigest(body))


def decode(line: bytes) -> AnyEvent | None:
    """The event of a line; None when the line is cut or changed."""
    body, check = line[: -len(_CHECK)], line[-len(_CHECK) :]
    if check != b',"check":"%08x"}\n' % xxhash.xxh32_intdigest(body):
        return None
    return _decoder.decode(body + b"}")
