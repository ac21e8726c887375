"""What a weight update costs, on every road, beside what the machine itself needs to move the same bytes.

    scripts/benchmark_sync.sh [--sizes 1M 100M] [--dtypes float32 bfloat16] [--rounds 5] [--json FILE]

A Qwen3 of about so many parameters, random weights, vLLM as the engine (on a CPU in this process). Every figure is the median
over the rounds; the first round, which warms up, is left out.

    memcpy      the bytes copied once in memory, in one thread: the yardstick
    publish     the learner's side: tensors into a snapshot file in shared memory, digests included
    verify      a host's side, once per version, off the engine's critical path: the file's digests
    map         an engine's side: the snapshot's memory takes the place of the engine's own
    copy        the same, copied and digested where it ends up
    raw ZeroMQ  the same bytes over tcp from another process, in the same pieces, kept nowhere: the limit of
    fetch       what a host does that has them not: over tcp, into its own shared memory, not verified yet
    patch       the same where it has the version before, and one number in a hundred has changed
"""

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import zmq
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from generators.vllm_engine import VllmEngine
from sync.folders import shared_memory_folder
from sync.publisher import Publisher
from sync.snapshot import Snapshot
from sync.stream import parts
from sync.transports.tcp import CHUNK_BYTES, WINDOW, Fetcher, SnapshotServer

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


def timed(action: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """(seconds, result)"""
    began = time.perf_counter()
    result = action(*arguments)
    return time.perf_counter() - began, result


def measure(size: str, dtype: str, rounds: int, folder: Path) -> dict[str, float]:
    """Median seconds of each part."""
    weights = make_model(folder / "model", size, getattr(torch, dtype))
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    publisher = Publisher(shared_memory_folder(f"benchmark-{size}-{dtype}"), "benchmark")
    engine = VllmEngine(str(folder / "model"), dtype=dtype, max_model_len=256, max_sequences=8, kv_cache_mb=64)
    source, target = torch.empty(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    source.fill_(1)
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", "publish", "verify", "map", "copy")}
    try:
        for version in range(2 * (rounds + 1)):
            way = "copy" if version <= rounds else "map"  # first all that is copied: what is mapped is not written to
            engine._map_weights = way == "map"
            next(iter(weights.values())).add_(1)
            seconds["memcpy"].append(timed(target.copy_, source)[0])
            spent, manifest = timed(publisher.publish, version, parts(weights))
            seconds["publish"].append(spent)
            seconds["verify"].append(timed(Snapshot(manifest).attest)[0])
            seconds[way].append(timed(engine.load, manifest)[0])
    finally:
        engine.shutdown()
        publisher.close()
    return {"bytes": num_bytes, **{name: median(times[1:]) for name, times in seconds.items()}}


def serve(folder: Path, found: Any) -> None:
    server = SnapshotServer(folder)
    found.put(server.address)
    time.sleep(3600)


def push(path: Path, address: str) -> None:
    socket = zmq.Context().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, WINDOW)
    socket.connect(address)
    data = memoryview(path.read_bytes())
    while True:
        for begin in range(0, len(data), CHUNK_BYTES):
            socket.send(data[begin : begin + CHUNK_BYTES], copy=False)


def over_tcp(size: str, dtype: str, rounds: int, folder: Path) -> dict[str, float]:
    """Median seconds of each way over tcp, and the bytes of a patch."""
    weights = make_model(folder / "model", size, getattr(torch, dtype))
    name = f"benchmark-{size}-{dtype}"
    publisher, far = Publisher(shared_memory_folder(name), "benchmark"), shared_memory_folder(f"{name}-far")
    addresses = spawn.Queue()
    server = spawn.Process(target=serve, args=(publisher.folder, addresses), daemon=True)
    server.start()
    address, fetcher = addresses.get(timeout=60), Fetcher(far, timeout_s=60)
    seconds: dict[str, list[float]] = {"raw ZeroMQ": [], "fetch": [], "patch": []}
    try:
        for version in range(rounds + 1):
            manifest = publisher.publish(2 * version, parts(weights))
            local = Path(manifest.locator).name
            fetcher.discard(f"v{2 * version - 1}-benchmark")
            seconds["fetch"].append(timed(fetcher.fetch, address, local)[0])
            for tensor in weights.values():
                tensor.view(-1)[::100].add_(1)
            patched = publisher.publish(2 * version + 1, parts(weights))
            before = fetcher.bytes_received
            seconds["patch"].append(timed(fetcher.fetch, address, Path(patched.locator).name)[0])
            patch_bytes = fetcher.bytes_received - before
            fetcher.discard(Path(manifest.locator).stem)
            fetcher.discard(Path(patched.locator).stem)  # so that the next is fetched whole
        server.kill()
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, WINDOW)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        pusher = spawn.Process(target=push, args=(Path(patched.path), f"tcp://127.0.0.1:{port}"), daemon=True)
        pusher.start()
        socket.recv()
        for _ in range(rounds + 1):
            began, left = time.perf_counter(), patched.num_bytes
            while left > 0:
                left -= len(socket.recv(copy=False))
            seconds["raw ZeroMQ"].append(time.perf_counter() - began)
        pusher.kill()
        socket.close(linger=0)
    finally:
        server.kill()
        fetcher.close()
        publisher.close()
    return {"patch bytes": patch_bytes, **{name: median(times[1:]) for name, times in seconds.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SHAPES), default=["1M", "100M"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for size in options.sizes:
        for dtype in options.dtypes:
            say.print(f"{size} {dtype} ...")
            folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
            try:
                found[f"{size} {dtype}"] = measure(size, dtype, options.rounds, folder)
                found[f"{size} {dtype}"] |= over_tcp(size, dtype, options.rounds, folder)
            finally:
                shutil.rmtree(folder)
    table = Table("", *found, title="milliseconds (GB/s)", title_justify="left")
    for name in next(iter(found.values())):
        table.add_row(name, *(describe(name, cell) for cell in found.values()))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, cell in found.items():
        for part, limit in (("publish", 2.0), ("copy", 2.0)):
            ratio = cell[part] / cell["memcpy"]
            console.print(f"{name}: {part} takes {ratio:.1f} × one memcpy (asked for: at most {limit})")
        console.print(f"{name}: fetch runs at {cell['raw ZeroMQ'] / cell['fetch']:.2f} of raw ZeroMQ (asked for: 0.8)")
        bytes_, time_ = cell["bytes"] / cell["patch bytes"], cell["fetch"] / cell["patch"]
        console.print(f"{name}: a patch of 1 % is {bytes_:.0f} × smaller and {time_:.1f} × faster (asked for: 10, 5)")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def describe(name: str, cell: dict[str, float]) -> str:
    if "bytes" in name:
        return f"{cell[name] / 1e6:,.1f} MB"
    return f"{1e3 * cell[name]:,.1f} ({cell['bytes'] / cell[name] / 1e9:,.1f})"


if __name__ == "__main__":
    sys.exit(main())
