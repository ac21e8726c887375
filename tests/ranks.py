"""Several ranks of one test. They fork from a server that has imported everything already, so they start at
once."""

import multiprocessing as mp
import multiprocessing.forkserver
import os
import queue
import time
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from learners.world import World

PATIENCE_S = 90.0

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["warm"])


def warm_up() -> None:
    """Starts the server unless it runs. It imports beside whatever this process does meanwhile."""
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with patch.dict(os.environ, {"PYTHONPATH": str(Path(__file__).parent), **quiet}):
        multiprocessing.forkserver.ensure_running()


def on_ranks(number: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """Runs `function(world, *args)` on each of `number` ranks in a process group; returns what it returns, by
    rank.

    `folder` is for these ranks alone. Raises RuntimeError with the traceback of the first rank that fails, or
    the number of one that dies; the others are killed.
    """
    warm_up()
    folder.mkdir(parents=True, exist_ok=True)
    ended: Queue[tuple[int, str | None]] = _context.Queue()
    processes = [
        _context.Process(target=_run_rank, args=(rank, number, function, folder, args, ended), daemon=True)
        for rank in range(number)
    ]
    for process in processes:
        process.start()
    try:
        running, deadline = set(range(number)), time.monotonic() + PATIENCE_S
        while running:
            rank, error = _wait_for_end(ended, {rank: processes[rank] for rank in running}, deadline)
            if error is not None:
                raise RuntimeError(f"rank {rank} has failed:\n{error}")
            running.discard(rank)
        # Results come as files that the test's own processes wrote a moment ago. The queue would share the
        # memory of tensors, which dies with the processes.
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(number)]
    finally:
        for process in processes:
            process.join(timeout=1.0)
            process.kill()


def _wait_for_end(
    ended: "Queue[tuple[int, str | None]]", running: dict[int, Any], deadline: float
) -> tuple[int, str | None]:
    """Returns the next rank that ends, and why it failed (None: it ended well)."""
    dead: list[int] = []
    while time.monotonic() < deadline:
        try:
            return ended.get(timeout=0.5)
        except queue.Empty:
            # A dead rank had half a second more to report its end, and has not.
            if dead:
                return dead[0], f"its process has died, exit code {running[dead[0]].exitcode}"
            dead = [rank for rank, process in running.items() if not process.is_alive()]
    return min(running), f"it has not ended within {PATIENCE_S:.0f} s"


def _run_rank(
    rank: int,
    number: int,
    function: Callable[..., Any],
    folder: Path,
    args: tuple[Any, ...],
    ended: "Queue[tuple[int, str | None]]",
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=number
        )
        world = World(rank, number, dist.FileStore(str(folder / "world"), number))
        torch.save(function(world, *args), folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
        ended.put((rank, None))
    except BaseException:
        ended.put((rank, traceback.format_exc()))
