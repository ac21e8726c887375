"""The samples of an evaluation on disk: segments as a journal has them (`buffers/segments.py`), which any
Arrow reader opens.

    samples/000000.arrow    one record batch for each prompt, rows sorted by (sample, branch)

Each process writes a segment of its own. One that was killed leaves a segment without a footer: the next
process sets aside what is not whole, and goes on with the prompts that are missing.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from buffers.evaluation_statistics import PromptSamples
from buffers.files import sync_file
from buffers.segments import (
    Segment,
    close_torn_segment,
    create_segment,
    find_whole_end,
    is_closed,
    segment_numbers,
    segment_path,
)
from buffers.trajectory import SCHEMA, Trajectory, encode_batch, flatten_column, to_batch

TRUNCATED = ("max_tokens", "context_overflow")
"""Words for the end of an episode that had no tokens left."""
READ_COLUMNS = ("sample", "branch", "prompt_id", "sampled", "versions", "reward", "stop")


class EvaluatedSamples:
    """The samples of one evaluation set. One process writes at a time."""

    def __init__(self, folder: Path) -> None:
        """Mends what a killed process has left, and reads which prompts have their samples."""
        self.folder = folder
        self._segment: Segment | None = None
        self.prompts: dict[int, PromptSamples] = {}
        """By the prompt's number."""
        folder.mkdir(parents=True, exist_ok=True)
        for number in sorted(segment_numbers(folder)):
            path = segment_path(folder, number)
            if not is_closed(path):
                close_torn_segment(path, find_whole_end(path))
        self.prompts |= read_samples(folder)

    def append_group(self, rows: Sequence[Trajectory]) -> PromptSamples:
        """Writes the rows of one prompt, and returns what they say. Raises DiskFull."""
        if self._segment is None:
            self._segment = create_segment(self.folder, max(segment_numbers(self.folder), default=-1) + 1)
        batch = to_batch(list(rows))
        self._segment.append(memoryview(encode_batch(batch)))
        found = read_prompts(batch)
        self.prompts |= found
        return found[rows[0].prompt_id]

    def close(self) -> None:
        """Writes the footer, and has all on disk."""
        if self._segment is not None:
            self._segment.write_footer()
            sync_file(self._segment.file, self._segment.path)
            os.close(self._segment.file)
            self._segment = None


def read_samples(folder: Path) -> dict[int, PromptSamples]:
    """Returns what the closed segments of a folder say of their prompts, by their numbers."""
    found: dict[int, PromptSamples] = {}
    for number in sorted(segment_numbers(folder)):
        if is_closed(segment_path(folder, number)):
            found |= read_segment(segment_path(folder, number))
    return found


def read_segment(path: Path) -> dict[int, PromptSamples]:
    """Returns what a closed segment says of its prompts, by their numbers. Only the columns that are needed
    are read."""
    columns = [SCHEMA.get_field_index(name) for name in READ_COLUMNS]
    options = pa.ipc.IpcReadOptions(included_fields=columns)
    found: dict[int, PromptSamples] = {}
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file, options=options) as reader:
        for number in range(reader.num_record_batches):
            found |= read_prompts(reader.get_batch(number))
    return found


def read_prompts(batch: pa.RecordBatch) -> dict[int, PromptSamples]:
    """Returns what the rows of whole groups say of their prompts, by the prompts' numbers."""
    prompt_ids = batch.column("prompt_id").to_numpy()
    # Branches of an episode repeat its reward and its end.
    firsts = batch.column("branch").to_numpy() == 0
    rewards, stops = batch.column("reward").to_numpy(), batch.column("stop").to_pylist()
    sampled, versions = flatten_column(batch, "sampled"), flatten_column(batch, "versions")
    row_of_token = np.repeat(np.arange(batch.num_rows), batch.column("sampled").value_lengths().to_numpy())
    found = {}
    for prompt in dict.fromkeys(prompt_ids.tolist()):
        of_prompt = prompt_ids == prompt
        of_tokens = of_prompt[row_of_token] & sampled
        used = versions[of_tokens]
        found[prompt] = PromptSamples(
            rewards=rewards[of_prompt & firsts].astype(float).tolist(),
            num_tokens=int(of_tokens.sum()),
            num_truncated=sum(stops[row] in TRUNCATED for row in np.flatnonzero(of_prompt & firsts)),
            versions=(int(used.min()), int(used.max())) if len(used) else None,
        )
    return found
