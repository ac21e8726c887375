"""Trains one long sequence in several layouts of ranks: the same numbers as one rank, memory as planned.

    scripts/benchmark_long.sh [--tokens 131072] [--layouts NAME ...] [--checkpointing] [--keep FOLDER]
    [--json FILE]

Each layout makes one update (forward, backward, AdamW) on one sequence, with a narrow Qwen3 in float32; each
rank is a process with one thread, over gloo. Log-probabilities, gradient norm and updated weights are
compared with those of the first layout, which is Hugging Face's model on one rank.

    logprobs       largest difference of a token's log-probability
    gradient       difference of the gradient norms, over the norm
    weights        share of the weights that differ by more than 2 % of a step of AdamW
    peak           most resident memory of a rank over what it had before the model, by rank
    plan           what `learners.memory` says before anything is loaded
    sent           what a rank sends for each of its tokens and each layer in an update, by arithmetic
"""

import argparse
import json
import multiprocessing as mp
import os
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Column, Table

from configs.schema import Config
from learners.memory import format_bytes, plan_memory
from slipstream_bench.long_sequences import (
    LAYOUTS,
    Distance,
    LongOutcome,
    compare_outcomes,
    configure_layout,
    count_sent_bytes,
    draw_long_batch,
    save_long_model,
    train_long,
)

TOLERANCE = Distance(logprobs=2e-5, grad_norm=1e-4, weights=0.01)
"""Most by which a layout may differ: rounding in float32, over sums of a hundred thousand terms."""
say = Console(stderr=True)


def run_rank(config: Config, rank: int, num_tokens: int, folder: Path) -> None:
    """Runs one rank in a process of its own; writes its outcome into the folder."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=config.learner.ranks
    )
    torch.save(asdict(train_long(config, draw_long_batch([num_tokens]))), folder / f"rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_layout(config: Config, num_tokens: int, folder: Path) -> list[LongOutcome]:
    """Returns the outcomes of all ranks. Raises RuntimeError where one of them fails."""
    folder.mkdir(parents=True, exist_ok=True)
    # Else glibc keeps freed blocks of many megabytes, and the resident memory is up to twice what is in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(config, rank, num_tokens, folder), daemon=True)
        for rank in range(config.learner.ranks)
    ]
    for process in ranks:
        process.start()
    # A rank whose peer has failed fails too, at its next collective.
    for process in ranks:
        process.join()
    for rank, process in enumerate(ranks):
        if process.exitcode:
            raise RuntimeError(f"rank {rank} has ended with {process.exitcode}")
    return [load_outcome(folder / f"rank_{rank}.pt") for rank in range(len(ranks))]


def load_outcome(path: Path) -> LongOutcome:
    return LongOutcome(**torch.load(path, weights_only=True))


def describe_layout(config: Config, ranks: list[LongOutcome], distance: Distance | None) -> dict[str, Any]:
    """Returns the figures of a layout's row."""
    plan = plan_memory(config, cuda=torch.cuda.is_available())
    assert plan is not None, "the plan knows models of this kind"
    return {
        "seconds": max(rank.seconds for rank in ranks),
        "distance": None if distance is None else asdict(distance),
        "peak_bytes": [rank.peak_bytes for rank in ranks],
        "plan": plan.parts,
        "plan_bytes": plan.total_bytes,
        "sent_bytes": count_sent_bytes(config),
    }


def print_report(rows: dict[str, dict[str, Any]], title: str) -> None:
    columns = ("s", "logprobs", "gradient", "weights", "peak by rank", "plan", "peak / plan", "sent")
    table = Table(Column("layout", no_wrap=True), *columns, title=title, title_justify="left")
    for name, row in rows.items():
        apart = row["distance"]
        peak = max(row["peak_bytes"])
        table.add_row(
            name,
            f"{row['seconds']:.0f}",
            *(["", "", ""] if apart is None else [f"{value:.1e}" for value in apart.values()]),
            ", ".join(format_bytes(one) for one in row["peak_bytes"]),
            format_bytes(row["plan_bytes"]),
            f"{peak / row['plan_bytes']:.2f}",
            f"{row['sent_bytes']:.0f} B",
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep outcomes; take those that are there"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    settings = ["learner.activation_checkpointing=true"] if options.checkpointing else []
    rows: dict[str, dict[str, Any]] = {}
    first = next(iter(LAYOUTS))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        model = save_long_model(folder / "model", options.tokens)
        outcomes: dict[str, list[LongOutcome]] = {}
        for name in dict.fromkeys([first, *options.layouts]):
            config = configure_layout(name, model, options.tokens, *settings)
            place = folder / f"{name}, {options.tokens}{', checkpointing' if options.checkpointing else ''}"
            kept = sorted(place.glob("rank_*.pt"))
            say.print(f"{name}: {'kept' if kept else 'one update'} ...")
            outcomes[name] = (
                list(map(load_outcome, kept)) if kept else run_layout(config, options.tokens, place)
            )
            distance = None if name == first else compare_outcomes(outcomes[name], outcomes[first])
            rows[name] = describe_layout(config, outcomes[name], distance)
    title = f"one sequence of {options.tokens:,} tokens, {' '.join(settings) or 'all activations kept'}"
    print_report(rows, title)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    check_distances(rows)


def check_distances(rows: dict[str, dict[str, Any]]) -> None:
    """Ends the program with an error where a layout's numbers are not one rank's."""
    for name, row in rows.items():
        if (distance := row["distance"]) is not None:
            for figure, most in asdict(TOLERANCE).items():
                if not distance[figure] <= most:
                    sys.exit(f"{name}: {figure} must differ by at most {most}, got {distance[figure]}")


if __name__ == "__main__":
    main()
