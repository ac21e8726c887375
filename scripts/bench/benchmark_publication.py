"""Measures how long training waits when 1, 2 and 4 ranks publish a version together, and what that means for
large models.

    scripts/benchmark_sync.sh ranks [--size 100M] [--dtypes float32 bfloat16] [--rounds 7] [--json FILE]

Each rank is a process with its rows of a model, float32, as an engine shards it. Rank 0 has the publisher.

    memcpy          all bytes, as published, copied once in memory by one thread: the yardstick
    waits           a rank's copy of its own rows, the ranks one after the other: what each waits on a
                    host of its own. The slowest rank's
    waits, at once  the same, all ranks of this machine at the same time: they share its memory and cores
    beside          the thread's part, all ranks at the same time: write and digest its rows, manifest
    rank 0 stages   bytes of its rows; `grows by` is what its process has more of memory of its own
    rank 0 writes   bytes that it writes into the file of its host

Figures are the best of the rounds for memcpy and waits, and medians for the rest. 1, 2 and 4 ranks have their
rounds in turn, so that other work on the machine meets them alike. The first two rounds, which take new
memory, are left out.
"""

import argparse
import gc
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from learners.publication import Publication
from learners.world import World
from sync.folders import shared_memory_folder
from sync.publisher import Publisher
from sync.stream import TensorPart, stream_rows

SIZES = {"1M": (512, 128, 4), "100M": (32000, 768, 10), "1B": (64000, 2048, 18)}
"""Rows of the embedding, width, and layers, of three matrices [3 · width, width] each."""
RANKS = (1, 2, 4)
LARGE = {"8B": 16.4e9, "70B": 141e9, "235B": 470e9}
"""Bytes of models in bfloat16."""
LARGE_RANKS = (8, 64)
RANKS_A_HOST = 8
WARM_ROUNDS = 2
spawn = multiprocessing.get_context("spawn")

Found = dict[str, float]


def own_rows(size: str, rank: int, ranks: int) -> dict[str, tuple[tuple[int, int], int, torch.Tensor]]:
    """Returns a rank's rows: by name, the tensor's shape, the first row, and the rows."""
    vocabulary, width, layers = SIZES[size]
    shapes = {"embed": (vocabulary, width)}
    shapes |= {f"layers.{layer}.{n}": (3 * width, width) for layer in range(layers) for n in range(4)}
    rows = {}
    for name, (height, _) in shapes.items():
        begin, end = height * rank // ranks, height * (rank + 1) // ranks
        rows[name] = ((height, width), begin, torch.full((end - begin, width), rank + 1.5))
    return rows


def run_rank(
    rank: int, ranks: int, size: str, dtype: str, rounds: int, folder: str, turn: Any, answers: Any
) -> None:
    """Plays one rank in a process of its own. `turn`: number of the round, of all groups of ranks."""
    torch.set_num_threads(1)
    world = World(rank, ranks, dist.FileStore(f"{folder}/{ranks}-{dtype}", ranks)) if ranks > 1 else World()
    rows, kind = own_rows(size, rank, ranks), getattr(torch, dtype)

    def stream() -> Iterator[TensorPart]:
        for name, (shape, first, tensor) in rows.items():
            yield from stream_rows(name, shape, first, tensor, kind)

    publisher = None
    if rank == 0:
        name = f"benchmark-{ranks}-ranks"
        publisher = Publisher(shared_memory_folder(name), "benchmark", keep=1)
    publication = Publication(world, publisher, "here")
    yardstick = [tensor.to(kind) for _, _, tensor in rows.values()] if ranks == 1 else []
    targets = [tensor.clone() for tensor in yardstick]
    gc.collect()
    before = psutil.Process().memory_full_info().uss
    seconds: dict[str, list[float]] = {"memcpy": [], "waits": [], "waits, at once": [], "beside": []}
    for version in range(rounds + WARM_ROUNDS):
        while rank == 0 and turn.value != version * len(RANKS) + RANKS.index(ranks):
            time.sleep(0.01)
        world.barrier()
        publication.begin_version(version, stream)
        began = time.perf_counter()
        publication.finish_version()
        seconds["beside"].append(time.perf_counter() - began)
        assert publication._rows is not None
        seconds["waits, at once"].append(publication._rows.copy_s)
        for place in range(ranks):
            world.barrier()
            if place == rank:
                publication._rows.copy_parts(stream())
                seconds["waits"].append(publication._rows.copy_s)
        began = time.perf_counter()
        for target, source in zip(targets, yardstick, strict=True):
            target.copy_(source)
        seconds["memcpy"].append(time.perf_counter() - began)
        world.barrier()
        if rank == 0:
            turn.value += 1
    assert publication._rows is not None
    found = {name: min(times[WARM_ROUNDS:]) for name, times in seconds.items()}
    found["beside"] = median(seconds["beside"][WARM_ROUNDS:])
    found["stages"] = publication.metrics()["weights/staged_bytes"]
    found["writes"] = publication._rows.num_done / (rounds + WARM_ROUNDS)
    found["grows by"] = psutil.Process().memory_full_info().uss - before
    world.barrier()
    publication.close()
    answers.put((ranks, rank, found))


def measure_publication(size: str, dtype: str, rounds: int) -> dict[int, Found]:
    """Returns by number of ranks the slowest rank's seconds, and rank 0's bytes."""
    folder, answers, turn = tempfile.mkdtemp(prefix="slipstream-"), spawn.Queue(), spawn.Value("i", 0)
    processes = [
        spawn.Process(
            target=run_rank, args=(rank, ranks, size, dtype, rounds, folder, turn, answers), daemon=True
        )
        for ranks in RANKS
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        told = [answers.get(timeout=600) for _ in processes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
        shutil.rmtree(folder)
    found = {}
    for ranks in RANKS:
        group = {rank: one for number, rank, one in told if number == ranks}
        found[ranks] = {name: max(one[name] for one in group.values()) for name in group[0]}
        found[ranks] |= {name: group[0][name] for name in ("memcpy", "stages", "writes", "grows by")}
    return found


def print_publication(console: Console, size: str, dtype: str, found: dict[int, Found]) -> None:
    """Prints one model's rows, and how far they reach what is asked for."""
    num_bytes, alone = found[1]["stages"], found[1]["waits"]
    title = f"{size} {dtype}, {num_bytes / 1e6:.0f} MB published from float32; milliseconds and MB"
    table = Table("ranks", "waits", "of 1 rank's", "waits, at once", "beside", "rank 0 stages", "grows by",
                  "writes", title=title, title_justify="left")  # fmt: skip
    for ranks, one in found.items():
        table.add_row(
            str(ranks), f"{1e3 * one['waits']:.1f}", f"{one['waits'] / alone:.2f}",
            f"{1e3 * one['waits, at once']:.1f}", f"{1e3 * one['beside']:.0f}",
            *(f"{one[name] / 1e6:.0f}" for name in ("stages", "grows by", "writes")),
        )  # fmt: skip
    console.print(table)
    memcpy = found[1]["memcpy"]
    target = " (asked for: at most 1.2)" if dtype == "float32" else ", which casts nothing"
    console.print(
        f"{size} {dtype}: training waits {alone / memcpy:.2f} × one memcpy of {1e3 * memcpy:.1f} ms, of the "
        f"same bytes in the same process{target}"
    )
    for ranks in RANKS[1:]:
        one = found[ranks]
        console.print(
            f"{size} {dtype}: each of {ranks} ranks waits {one['waits'] / alone:.2f} of what one alone waits "
            f"(asked for: {1 / ranks:.2f} within 25 %), and rank 0 stages {one['stages'] / num_bytes:.2f} of "
            "the bytes"
        )


def print_large(console: Console, found: dict[int, Found]) -> None:
    """Prints what the measured rates mean for large models in bfloat16."""
    one = found[1]
    copy, beside = one["stages"] / one["waits"], one["stages"] / one["beside"]
    table = Table("model", "ranks", "training waits, s", "beside, s", "a rank stages, GB",
                  "a host's shared memory, GB", title_justify="left",
                  title=f"bfloat16, at {copy / 1e9:.1f} GB/s copied and {beside / 1e9:.1f} GB/s written and "
                  f"digested a rank, as one rank does here; hosts of {RANKS_A_HOST} ranks that keep two "
                  "versions and a spare")  # fmt: skip
    for name, num_bytes in LARGE.items():
        for ranks in (1, *LARGE_RANKS):
            own = num_bytes / ranks
            table.add_row(
                name, str(ranks), f"{own / copy:.2f}", f"{own / beside:.2f}", f"{own / 1e9:.1f}",
                f"{3 * own * min(ranks, RANKS_A_HOST) / 1e9:.0f}",
            )  # fmt: skip
    console.print(table)


def measure_and_print(
    console: Console, size: str, dtypes: list[str], rounds: int
) -> dict[str, dict[int, Found]]:
    found = {dtype: measure_publication(size, dtype, rounds) for dtype in dtypes}
    for dtype, one in found.items():
        print_publication(console, size, dtype, one)
    if "bfloat16" in found:
        print_large(console, found["bfloat16"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=tuple(SIZES), default="100M")
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    found = measure_and_print(console, options.size, options.dtypes, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
