"""The columns of a submitted message, as the bytes that came.

The checks of groups (`buffers.group_checks`) and of their episodes (`buffers.episode_checks`) read them
without a copy.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from buffers.trajectory import FIRST_BUFFER, MalformedGroup

VALUES, LIST_OFFSETS, LIST_VALUES, TEXT_OFFSETS, TEXT_VALUES = 1, 1, 3, 1, 2
"""Places of a column's buffers among its own: Arrow puts the validity before the values, and the offsets of
a list or of texts before the validity and the values of its items."""


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """The columns of a message's groups, as the bytes that came."""

    batch: pa.RecordBatch
    body: memoryview
    buffers: list[list[int]]
    """[offset, length] of each buffer in `body`."""
    rows: list[int]
    """Rows of each group, as the request says. Their sum is that of the message."""
    num_samples: int
    """Episodes of each group."""

    @property
    def num_groups(self) -> int:
        return len(self.rows)

    @property
    def num_rows(self) -> int:
        return self.batch.num_rows

    def take_bytes(self, column: str, buffer: int, size: int) -> memoryview:
        """Returns the first bytes of one buffer of a column: `VALUES`, or of a list `LIST_OFFSETS` or
        `LIST_VALUES`.

        Raises MalformedGroup where the buffer is shorter.
        """
        offset, length = self.buffers[FIRST_BUFFER[column] + buffer]
        if length < size:
            raise MalformedGroup(f"column `{column}` must have {size} bytes, got {length}")
        return self.body[offset : offset + size]

    def holds_bytes(self, column: str, buffer: int, wanted: bytes) -> bool:
        """True when one buffer of a column begins with these bytes. Raises MalformedGroup where it is
        shorter."""
        # Two memoryviews would be compared item by item.
        return self.take_bytes(column, buffer, len(wanted)).tobytes() == wanted

    def take_offsets(self, column: str) -> memoryview:
        """Returns the offsets of a list column: one int32 for each row and one more."""
        return self.take_bytes(column, LIST_OFFSETS, 4 * (self.num_rows + 1))

    def take_items(self, column: str, kind: type[np.generic], count: int) -> np.ndarray:
        """[count]: the items of all lists of a column, row after row."""
        size = np.dtype(kind).itemsize * count
        return np.frombuffer(self.take_bytes(column, LIST_VALUES, size), kind)

    def take_values(self, column: str, kind: type[np.generic]) -> np.ndarray:
        """[rows]: the values of a column of numbers."""
        return np.frombuffer(self.take_bytes(column, VALUES, np.dtype(kind).itemsize * self.num_rows), kind)


def require(holds: np.bool_ | bool, rule: str) -> None:
    """Raises MalformedGroup with the rule where it does not hold."""
    if not holds:
        raise MalformedGroup(rule)
