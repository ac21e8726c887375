"""Measures what a weight update costs on every road, and what the machine needs to move the same bytes.

    scripts/benchmark_sync.sh [--sizes 1M 100M] [--dtypes float32 bfloat16] [--rounds 5] [--json FILE]

The model is a Qwen3 of about so many parameters with random weights. The engine is vLLM (on a CPU in this
process). Every figure is the median over the rounds; the first round, which warms up, is left out.

    memcpy          the bytes copied once in memory, in one thread: the yardstick
    write           the same into a file in shared memory that exists already: publishing cannot do
                    without it
    publish         the learner's side, by one process in one go: a snapshot in shared memory, digests
                    included. In a run it is written beside training, which waits for a copy alone
    verify          a host's side, once per version, beside the engine: the file's digests
    engine step     one decoding step of 8 sequences
    map             an engine's side: the snapshot's memory takes the place of the engine's own; the
                    engine stands still for it
    copy, no check  the snapshot copied to where the engine has its weights
    copy            the same, and digested where it ends up
    disk, publish   the learner's side, in a folder on disk (in the page cache: nothing waits for the
                    disk itself)
    disk, read      a host's side: read from the disk and verified; nothing of it is in memory before
    raw, dropped    the same bytes by raw ZeroMQ over tcp from another process, in the same pieces,
                    kept nowhere
    raw, kept       the same, written to shared memory
    fetch           a host that has no version: over tcp, into its own shared memory, not verified yet
    patch, made     the learner's side, beside training: the difference from the version before, with
                    one number in a hundred changed
    patch           the same as fetch where a host has the version before; `made` is over by then

After that 1, 2 and 4 ranks publish together: see `benchmark_publication.py`.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import psutil
import torch
import zmq
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmark_publication import measure_and_print
from configs.disk import write_all
from generators.engine import Sample
from generators.vllm_engine import VllmEngine
from sync import engine_layout, weight_source
from sync import patch as sync_patch
from sync.digest import raw_bytes
from sync.folders import shared_memory_folder
from sync.patch import make_patch
from sync.publisher import Publisher
from sync.snapshot import Snapshot, read_manifest
from sync.stream import whole_parts
from sync.transports.fetcher import Fetcher
from sync.transports.messages import CHUNK_BYTES
from sync.transports.puller import WINDOW
from sync.transports.server import SnapshotServer

SHAPES = {
    "1M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 512},
    "100M": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 10, "vocab_size": 32000},
    "1B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 18, "vocab_size": 64000},
}
say = Console(stderr=True)
spawn = multiprocessing.get_context("spawn")


def make_model(folder: Path, size: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Saves a random model; returns the tensors of its file."""
    shape = SHAPES[size]
    config = Qwen3Config(
        **shape, head_dim=64, num_attention_heads=shape["hidden_size"] // 64, num_key_value_heads=2,
        tie_word_embeddings=True, max_position_embeddings=2048, dtype=dtype,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def time_call(action: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Calls `action`; returns seconds and its result."""
    began = time.perf_counter()
    result = action(*arguments)
    return time.perf_counter() - began, result


class PartTimer:
    """Seconds of each part of an update, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time_part(self, name: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `action`, notes its seconds and returns its result."""
        spent, result = time_call(action, *arguments)
        self.seconds.setdefault(name, []).append(spent)
        return result


def measure_host(size: str, dtype: str, rounds: int, folder: Path) -> dict[str, float]:
    """Returns median seconds of each part on one host, and the bytes of the model."""
    weights = make_model(folder / "model", size, getattr(torch, dtype))
    publisher = Publisher(shared_memory_folder(f"benchmark-{size}-{dtype}"), "benchmark", keep=1)
    timer = PartTimer()
    time_bare_copies(timer, weights, publisher.folder / "bare", rounds)
    time_disk(timer, weights, folder / "weights", rounds)
    engine = VllmEngine(
        str(folder / "model"), dtype=dtype, max_model_len=256, max_sequences=8, kv_cache_mb=64
    )
    try:
        time_engine(timer, engine, weights, publisher, rounds)
    finally:
        engine.shutdown()
        publisher.close()
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    return {"bytes": num_bytes, **{name: median(times[1:]) for name, times in timer.seconds.items()}}


def time_bare_copies(timer: PartTimer, weights: dict[str, torch.Tensor], path: Path, rounds: int) -> None:
    """Times `memcpy` and `write`, the yardsticks of everything else."""
    targets = [torch.zeros_like(tensor) for tensor in weights.values()]

    def copy_tensors() -> None:
        for tensor, target in zip(weights.values(), targets, strict=True):
            target.copy_(tensor)

    def write_tensors() -> None:
        with path.open("r+b" if path.exists() else "w+b", 0) as file:
            for tensor in weights.values():
                write_all(file.fileno(), raw_bytes(tensor))

    for _ in range(rounds + 1):
        timer.time_part("memcpy", copy_tensors)
        timer.time_part("write", write_tensors)
    path.unlink()


def time_disk(timer: PartTimer, weights: dict[str, torch.Tensor], folder: Path, rounds: int) -> None:
    """Times publishing into a folder on disk, and reading from it what is not in the page cache."""
    publisher = Publisher(folder, "benchmark", keep=1)
    for version in range(rounds + 1):
        manifest = timer.time_part("disk, publish", publisher.publish_version, version, whole_parts(weights))
        with open(manifest.path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        timer.time_part("disk, read", Snapshot(manifest).verify_bytes)
    publisher.close()


def time_engine(
    timer: PartTimer, engine: VllmEngine, weights: dict[str, torch.Tensor], publisher: Publisher, rounds: int
) -> None:
    """Times publishing, verifying and the engine's three ways to take a version: copy, bare copy, map."""
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    # The copying rounds come first, because an engine that maps a snapshot may not write to its weights.
    for version in range(3 * (rounds + 1)):
        next(iter(weights.values())).add_(1)
        manifest = timer.time_part("publish", publisher.publish_version, version, whole_parts(weights))
        snapshot = Snapshot(manifest)
        timer.time_part("verify", snapshot.attest)
        engine._map_weights = version > 2 * rounds + 1
        if version <= rounds:
            timer.time_part("copy", engine.load_version, snapshot)
        elif engine._map_weights:
            fill_engine(engine, version)
            engine.step()
            timer.time_part("engine step", engine.step)
            timer.time_part("map", engine.load_version, snapshot)
        else:
            with (
                patch.object(engine_layout, "copy_and_digest", copy_without_digest),
                patch.object(weight_source, "expect_digests", lambda *_: None),
            ):
                timer.time_part("copy, no check", engine.load_version, snapshot)
        # A training step takes longer than this; meanwhile memory that was given up is given back.
        time.sleep(0.2 + num_bytes / 4e9)


def fill_engine(engine: VllmEngine, seed: int) -> None:
    """Adds samples until 8 sequences are running."""
    while engine.num_unfinished < 8:
        engine.add_sample(Sample(id=f"{seed} {time.time()}", prompt=[5] * 16, max_tokens=200, seed=seed))


def copy_without_digest(source: torch.Tensor, place: torch.Tensor) -> str:
    """Copies as the engine does, without digests."""
    into, out = (tensor.view(-1).view(torch.uint8).numpy() for tensor in (place, source))
    for begin in range(0, len(out), engine_layout.CHUNK_BYTES):
        into[begin : begin + engine_layout.CHUNK_BYTES] = out[begin : begin + engine_layout.CHUNK_BYTES]
    return ""


def run_learner(model: Path, name: str, orders: Any, answers: Any) -> None:
    """Plays the learner in a process of its own: publishes on demand, with one number in a hundred changed
    each time."""
    weights = load_file(model / "model.safetensors")
    folder = shared_memory_folder(name)
    server = SnapshotServer(folder)
    publisher = Publisher(
        folder, "benchmark", keep=1 if sum(t.nbytes for t in weights.values()) > 1 << 30 else 2, ends=[server]
    )
    made: list[float] = []

    def make_timed_patch(*arguments: Any) -> bool:
        spent, worth = time_call(make_patch, *arguments)
        made.append(spent)
        return bool(worth)

    try:
        with patch.object(sync_patch, "make_patch", make_timed_patch):
            for version in iter(orders.get, None):
                for tensor in weights.values():
                    tensor.view(-1)[version % 100 :: 100].add_(1)
                manifest = publisher.publish_version(version, whole_parts(weights))
                while server.patches.find_route(f"v{version - 1}-benchmark", f"v{version}-benchmark") is None:
                    time.sleep(0.01)
                answers.put((server.address, manifest.locator, manifest.num_bytes, made[-1:]))
    finally:
        publisher.close()


def push_file(path: Path, address: str) -> None:
    socket = zmq.Context().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, WINDOW)
    socket.connect(address)
    data = memoryview(path.read_bytes())
    while True:
        for begin in range(0, len(data), CHUNK_BYTES):
            socket.send(data[begin : begin + CHUNK_BYTES], copy=False)


def measure_tcp(size: str, dtype: str, rounds: int, folder: Path) -> dict[str, float]:
    """Returns median seconds of each way over tcp, and the bytes of a patch."""
    name = f"benchmark-{size}-{dtype}"
    far = shared_memory_folder(f"{name}-far")
    orders, answers = spawn.Queue(), spawn.Queue()
    learner = spawn.Process(target=run_learner, args=(folder / "model", name, orders, answers), daemon=True)
    learner.start()
    fetcher = Fetcher(far, timeout_s=60)
    seconds: dict[str, list[float]] = {
        way: [] for way in ("raw, dropped", "raw, kept", "fetch", "patch, made", "patch")
    }
    try:
        for version in range(3 * (rounds + 1)):
            orders.put(version)
            address, locator, num_bytes, made = answers.get(timeout=120)
            before, patches = fetcher.bytes_received, fetcher.patches
            whole = version <= rounds
            spent, local = time_call(
                partial(fetcher.fetch_version, address, Path(locator).name, direct=whole)
            )
            Snapshot(read_manifest(local)).attest()
            # A generator does the same after each version.
            fetcher.refresh_spare()
            if whole:
                seconds["fetch"].append(spent)
            elif version > rounds + 1:
                assert fetcher.patches == patches + 1
                seconds["patch"].append(spent)
                seconds["patch, made"] += made
                patch_bytes = fetcher.bytes_received - before
        raw_copy = folder / "raw"
        shutil.copyfile(Path(locator).with_suffix(".safetensors"), raw_copy)
        orders.put(None)
        learner.join()
        fetcher.close()
        seconds |= measure_raw_zmq(raw_copy, far, rounds)
    finally:
        learner.kill()
        if far.exists():
            fetcher.close()
    return {"patch bytes": patch_bytes, **{way: median(times[1:]) for way, times in seconds.items()}}


def measure_raw_zmq(path: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds that ZeroMQ alone takes for the bytes of the file, by round."""
    folder.mkdir()
    num_bytes, found = path.stat().st_size, dict[str, list[float]]()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, WINDOW)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    pusher = spawn.Process(target=push_file, args=(path, f"tcp://127.0.0.1:{port}"), daemon=True)
    pusher.start()
    socket.recv()
    try:
        with (folder / "kept").open("w+b", 0) as file:
            for number in range(2 * (rounds + 1)):
                began, at = time.perf_counter(), 0
                while at < num_bytes:
                    data = socket.recv(copy=False).buffer
                    if number % 2:
                        os.pwrite(file.fileno(), data, at)
                    at += len(data)
                found.setdefault("raw, kept" if number % 2 else "raw, dropped", []).append(
                    time.perf_counter() - began
                )
    finally:
        pusher.kill()
        socket.close(linger=0)
        shutil.rmtree(folder)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=tuple(SHAPES), default=["1M", "100M"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    # An engine on a CPU sets the same.
    torch.set_num_threads(1)
    disable_progress_bar()
    found: dict[str, dict[str, float]] = {}
    for size in options.sizes:
        for dtype in options.dtypes:
            say.print(f"{size} {dtype} ...")
            folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
            try:
                found[f"{size} {dtype}"] = measure_host(size, dtype, options.rounds, folder)
                needed = 6.5 * found[f"{size} {dtype}"]["bytes"]
                if psutil.virtual_memory().available > needed:
                    found[f"{size} {dtype}"] |= measure_tcp(size, dtype, options.rounds, folder)
                else:
                    say.print(
                        f"{size} {dtype}: no tcp, which would need {needed / 1e9:.0f} GB here for both hosts"
                        " together"
                    )
            finally:
                shutil.rmtree(folder)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    table = Table("", *found, title="milliseconds (GB/s)", title_justify="left")
    for name in next(iter(found.values())):
        table.add_row(name, *(format_cell(name, cell) if name in cell else "" for cell in found.values()))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, cell in found.items():
        print_targets(console, name, cell)
    for size in options.sizes:
        measure_and_print(console, size, options.dtypes, options.rounds)
    return 0


def print_targets(console: Console, name: str, cell: dict[str, float]) -> None:
    """Prints how far one model and dtype reaches what is asked for."""
    memcpy, step, write = cell["memcpy"], cell["engine step"], cell["write"]
    console.print(
        f"{name}: publish takes {cell['publish'] / memcpy:.1f} × one memcpy (asked for: at most 2), "
        f"{cell['publish'] / write:.1f} × what writing alone takes"
    )
    share = 1 - cell["copy, no check"] / cell["copy"]
    console.print(
        f"{name}: copy takes {cell['copy'] / memcpy:.1f} × one memcpy (at most 2), {share:.0%} of it for"
        " digests (25 %)"
    )
    console.print(
        f"{name}: an engine stands still for {cell['map'] / step:.2f} of its steps when it maps (at most 2)"
    )
    if "fetch" not in cell:
        return
    console.print(
        f"{name}: fetch runs at {cell['raw, dropped'] / cell['fetch']:.2f} of raw ZeroMQ that keeps"
        f" nothing (0.8), at {cell['raw, kept'] / cell['fetch']:.2f} of one that writes what comes"
    )
    bytes_, fetch = cell["bytes"] / cell["patch bytes"], cell["fetch"]
    console.print(
        f"{name}: a patch of 1 % is {bytes_:.0f} × smaller (10) and {fetch / cell['patch']:.1f} × faster"
        f" (5), {fetch / (cell['patch'] + cell['patch, made']):.1f} × where its making is waited for"
    )


def format_cell(name: str, cell: dict[str, float]) -> str:
    if name == "engine step":
        return f"{1e3 * cell[name]:,.1f}"
    if "bytes" in name:
        return f"{cell[name] / 1e6:,.1f} MB"
    return f"{1e3 * cell[name]:,.1f} ({cell['bytes'] / cell[name] / 1e9:,.1f})"


if __name__ == "__main__":
    sys.exit(main())
