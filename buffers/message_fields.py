"""The field types of the buffer's messages, each with its bounds, and the base class of all records on the
wire.

Every field of a request has a bound, so that nothing that arrives overflows what is added up, logged or
answered. A request outside the bounds is refused while it is decoded. `buffers.limits` checks the bounds that
depend on the run.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_TEXT = 4000
"""Characters of a text in a message."""
MAX_LEASES = 1 << 14
"""Leases in one request."""
MAX_METRICS = 4096
"""Metrics that a learner reports for one step."""
MAX_GROUPS = 1 << 16
"""Groups in one request."""
MAX_GENERATORS = 1000
"""Generators that one command starts."""
MAX_FLOAT32 = 3.4028234663852886e38
"""Largest finite float32."""
MAX_INT63 = 2**63 - 1
"""Largest integer that Arrow's int64 columns and msgpack's signed integers hold."""

RoleName = Annotated[str, Meta(min_length=1, max_length=200)]
"""Name of a generator or of another role."""
Activity = Annotated[str, Meta(max_length=200)]
"""A role's present occupation, in a few words."""
BoundedText = Annotated[str, Meta(max_length=MAX_TEXT)]
"""A reason, an error, or a manifest locator. `shorten` makes any text fit."""
LeaseId = Annotated[int, Meta(ge=0, le=MAX_INT63)]
Ordinal = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Number of a step, of a version, or of a segment file."""
HeldVersion = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""Version that a generator holds; -1 before the first."""
TokenCount = Annotated[int, Meta(ge=0, le=2**40)]
"""Tokens of one lease or of one step. A sum of a million such numbers stays below 2^63."""
GeneratorCount = Annotated[int, Meta(ge=0, le=MAX_GENERATORS)]
"""Generators of one command."""
RowCount = Annotated[int, Meta(ge=1, le=2**20)]
"""Rows of one group."""
SampleCount = Annotated[int, Meta(ge=0, le=2**20)]
"""Samples of evaluation prompts."""
RunTotal = Annotated[int, Meta(ge=0, le=2**50)]
"""A count that grows for as long as a run lasts: bytes, groups, tokens of one generator."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
RewardValue = Annotated[float, Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
"""A finite reward. The journal keeps it in float32, so it must be finite there too."""
MetricValue = Annotated[float, Meta(description="any number: a learner that diverges reports NaN")]


class WireRecord(msgspec.Struct, tag=True, kw_only=True):
    """Base class of all records in messages. On the wire each carries its class name."""


class GroupSlice(WireRecord, array_like=True):
    """The place of groups that lie together in the journal: some rows of one record batch."""

    segment: int
    """Number of the segment file."""
    offset: int
    """Byte at which the record batch begins."""
    size: int
    """Bytes of the record batch."""
    xxh3: int
    """Checksum of those bytes."""
    row: int
    """First row of the groups within the record batch."""
    rows: int
    """Number of rows."""


def shorten(text: str) -> str:
    """Returns the text, or its beginning and its end where it is too long for a message."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2 - 20
    return f"{text[:half]} ... {len(text):,} characters ... {text[-half:]}"[:MAX_TEXT]
