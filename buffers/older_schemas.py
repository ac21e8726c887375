"""Record batches of a journal of an older schema, and their upgrade to the present one.

A run goes on from a journal of an older schema: its segments stay as they are, and new ones are written in
the present schema. A record batch tells its schema by its number of buffers. So a segment whose head is lost,
and bytes that came over a socket without their segment, are read too.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from buffers.arrow_ipc import BadMessage, check_record_batch
from buffers.trajectory import (
    SCHEMA,
    SCHEMA_VERSION,
    USUAL_LAYOUT,
    MalformedGroup,
    infer_stop,
    place_buffers,
)

NEW_IN_3 = ("branch", "turn", "token_rewards", "stop", "renderer")
"""Columns that schema 2 has not."""
SCHEMA_2 = pa.schema(
    [column for column in SCHEMA if column.name not in NEW_IN_3], metadata={"slipstream.schema": "2"}
)
READABLE_SCHEMAS = {2: SCHEMA_2, SCHEMA_VERSION: SCHEMA}
"""The schemas that a journal may have been written in, by version."""
_SCHEMA_BY_BUFFERS = {place_buffers(schema)[1]: schema for schema in READABLE_SCHEMAS.values()}


def read_stored_batch(message: pa.Buffer, *, validate: bool = False) -> pa.RecordBatch:
    """Returns the rows of a message of the journal, with the columns of the present schema.

    Columns are read without a copy, and columns that the message lacks are made. `validate` is for a message
    whose checksum is lost. Raises MalformedGroup for bytes that are no record batch of a readable schema.
    """
    try:
        _, buffers = check_record_batch(memoryview(message), USUAL_LAYOUT)
        schema = _SCHEMA_BY_BUFFERS.get(len(buffers))
        if schema is None:
            raise BadMessage(f"{' or '.join(map(str, _SCHEMA_BY_BUFFERS))} buffers, got {len(buffers)}")
        batch = pa.ipc.read_record_batch(message, schema)
        if validate:
            batch.validate(full=True)
    except (BadMessage, pa.ArrowException, OSError, ValueError) as error:
        raise MalformedGroup(
            "a message of the journal must be a record batch of schema version "
            f"{' or '.join(map(str, READABLE_SCHEMAS))}: {error}"
        ) from error
    return batch if schema is SCHEMA else upgrade_batch(batch)


def upgrade_batch(older: pa.RecordBatch) -> pa.RecordBatch:
    """Returns rows of schema 2 as rows of schema 3: an episode of one turn each, on one branch."""
    num_rows = older.num_rows
    added = {
        "branch": pa.array(np.zeros(num_rows, np.int16)),
        "turn": pa.array([[]] * num_rows, pa.list_(pa.int16())),
        "token_rewards": pa.array([[]] * num_rows, pa.list_(pa.float32())),
        "stop": pc.if_else(
            pc.equal(older.column("finish_reason"), "length"), infer_stop("length"), infer_stop("stop")
        ),
        "renderer": pa.array([""] * num_rows, pa.string()),
    }
    columns = [added[name] if name in added else older.column(name) for name in SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
