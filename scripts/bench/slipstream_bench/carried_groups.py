"""Groups made of random numbers, and the processes that a benchmark sends them through."""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from buffers.server import BufferServer
from buffers.trajectory import Trajectory, encode_batch, to_batch
from configs.schema import Config

SAMPLES = 8
# Spawned, so that no process begins with the memory of this one.
spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class GroupSize:
    name: str
    num_tokens: int
    per_message: int
    """Groups in one submission."""
    groups_per_step: int
    num_producers: int
    """Producer processes."""


def make_template(size: GroupSize) -> pa.RecordBatch:
    rng, n = np.random.default_rng(0), size.num_tokens
    prompt = n // 4
    rows = [
        Trajectory(
            group=0,
            sample=i,
            due=0,
            prompt_id=0,
            task="arithmetic",
            tokens=rng.integers(0, 1000, n).tolist(),
            sampled=[j >= prompt for j in range(n)],
            logprobs=[-0.5 * (j >= prompt) for j in range(n)],
            versions=[0 if j >= prompt else -1 for j in range(n)],
            reward=float(i % 2),
            rewards={"correct": 1.0},
            finish_reason="stop",
            generator="producer",
            started_at=0.0,
            finished_at=1.0,
        )
        for i in range(SAMPLES)
    ]
    return to_batch(rows)


def add_up_tokens(table: pa.Table | pa.RecordBatch) -> int:
    column = table.column("tokens")
    return sum(int(chunk.flatten().to_numpy().sum()) for chunk in getattr(column, "chunks", [column]))


def measure_disk(size: GroupSize, seconds: float, folder: Path) -> float:
    """Returns groups a second that one process writes and syncs.

    It syncs every 4 MB and deletes files of 64 MB, as the buffer does.
    """
    data = encode_batch(pa.concat_batches([make_template(size)] * size.per_message)).to_pybytes()
    per_sync = max(1, (4 << 20) // len(data))
    files: list[Path] = []
    began, num = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        files.append(folder / f"{num}.bytes")
        with open(files[-1], "wb", buffering=0) as file:
            while file.tell() < 64 << 20 and time.perf_counter() - began < seconds:
                for _ in range(per_sync):
                    file.write(data)
                os.fdatasync(file)
                num += per_sync * size.per_message
        if len(files) > 6:
            files.pop(0).unlink()
    return num / seconds


def serve_buffer(config: Config, folder: Path) -> None:
    logging.disable()
    server = BufferServer(config, folder)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.run()


@contextmanager
def running_processes(work: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[list[int]]:
    running = [spawn.Process(target=function, args=arguments, daemon=True) for function, arguments in work]
    for process in running:
        process.start()
    try:
        yield [process.pid or 0 for process in running]
    finally:
        # The server stands first and ends last.
        for process in reversed(running):
            process.terminate()
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
