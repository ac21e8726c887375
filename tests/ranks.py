"""Several ranks of one test. They fork from a server that has imported everything already, so they start at
once."""

import ctypes
import multiprocessing as mp
import multiprocessing.forkserver
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from configs.load import load_config
from learners.rendezvous import join_ranks
from learners.world import World
from slipstream_bench.network_hosts import NetworkHost
from sync.stream import TensorPart

PATIENCE_S = 90.0
PORT = 29400
NAMESPACES = ("net", "uts", "ipc", "mnt", "pid")
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG."""

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["warm"])


def warm_up() -> None:
    """Starts the server unless it runs. It imports beside whatever this process does meanwhile."""
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    with patch.dict(os.environ, {"PYTHONPATH": path, **quiet}):
        multiprocessing.forkserver.ensure_running()


def on_ranks(
    number: int,
    function: Callable[..., Any],
    folder: Path,
    *args: Any,
    hosts: Sequence[NetworkHost] = (),
    dying: Collection[int] = (),
) -> list[Any]:
    """Runs `function(world, *args)` on each of `number` ranks in a process group; returns what it returns, by
    rank.

    `folder` is for these ranks alone. Raises RuntimeError with the traceback of the first rank that fails, or
    the number of one that dies; the others are killed.

    `hosts`: a host for each rank; the ranks then meet as those of a learner do. `dying`: ranks that are not
    waited for, and return nothing.
    """
    warm_up()
    folder.mkdir(parents=True, exist_ok=True)
    ended: Queue[tuple[int, str | None]] = _context.Queue()
    places = [(host.pid, f"tcp://{hosts[0].address}:{PORT}") for host in hosts]
    processes = [
        _context.Process(
            target=_run_rank,
            args=(rank, number, function, folder, args, ended, places, bool(dying)),
            daemon=True,
        )
        for rank in range(number)
    ]
    for process in processes:
        process.start()
    try:
        running, deadline = set(range(number)) - set(dying), time.monotonic() + PATIENCE_S
        while running:
            rank, error = _wait_for_end(ended, {rank: processes[rank] for rank in running}, deadline)
            if error is not None:
                raise RuntimeError(f"rank {rank} has failed:\n{error}")
            running.discard(rank)
        # Results come as files that the test's own processes wrote a moment ago. The queue would share the
        # memory of tensors, which dies with the processes.
        return [
            torch.load(folder / f"{rank}.pt", weights_only=False)
            for rank in range(number)
            if rank not in dying
        ]
    finally:
        for process in processes:
            process.join(timeout=1.0)
            process.kill()


def gather_weights(parts: Iterable[TensorPart]) -> dict[str, torch.Tensor]:
    """Returns on the first rank of torch's default group the whole tensors, whose parts the ranks yield;
    nothing elsewhere.

    Raises AssertionError where the ranks do not yield each element once.
    """
    own = [
        (part.name, part.shape, part.begin, part.cast_elements().reshape(-1).cpu().clone()) for part in parts
    ]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    if dist.get_rank() > 0:
        return {}
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape, begin, elements in (part for one in told for part in one):
        assert shapes.setdefault(name, shape) == shape, name
        if len(elements):
            assert begin not in pieces.setdefault(name, {}), f"{name} has two parts at {begin}"
            pieces[name][begin] = elements
    whole = {}
    for name, shape in shapes.items():
        found, end = pieces.get(name, {}), 0
        for begin in sorted(found):
            assert begin == end, f"{name} has no elements, or two, from {min(begin, end)} on"
            end += len(found[begin])
        whole[name] = torch.cat([found[begin] for begin in sorted(found)] or [torch.empty(0)]).view(shape)
    return whole


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
    places: list[tuple[int, str]],
    some_die: bool,
) -> None:
    if places:
        _enter_host(places[rank][0])
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        if places:
            config = load_config([f"learner.ranks={number}"])
            world = join_ranks(config, rank, places[rank][1]).world
        else:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=number
            )
            world = World(rank, number, dist.FileStore(str(folder / "world"), number))
        torch.save(function(world, *args), folder / f"{rank}.pt")
        if not some_die:
            dist.barrier()
            dist.destroy_process_group()
        ended.put((rank, None))
    except BaseException:
        ended.put((rank, traceback.format_exc()))


def _enter_host(pid: int) -> None:
    """Goes on in a process of the host whose first process has this number, and waits for that process."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]
    for namespace in opened:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    if child := os.fork():  # a process keeps its own numbers, only its children are the host's
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
