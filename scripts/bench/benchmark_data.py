"""Measures what rows from files cost: preparing them, holding them, and reading them.

    scripts/benchmark_data.sh [--rows 1000000] [--json FILE]

The rows are in verl's layout, with prompts of 20 to 90 words, in one parquet file. Each part runs in a
process of its own, whose resident memory is read from the kernel.

    pyarrow      `pyarrow.parquet.read_table` of the same file, and rows of that table one at a time
    preparing    what the driver does once: cache the rows, check them, find prompts that are too long
    again        the same when the cache has them
    worker       the task `dataset` as a worker of a generator holds it: prompts of rows in random order
    order        the buffer's order of prompts, over a whole epoch

Times are the processor's, so other programs count for little.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WORDS = ("the", "number", "apples", "train", "leaves", "at", "seven", "twice", "as", "many", "box", "money")
WRITTEN_ROWS = 10_000
READ_ROWS = 20_000
MAX_TOKENS = 1024
Figures = dict[str, float]


def read_resident_mib(field: str = "VmRSS") -> float:
    """Returns the resident memory of this process: now, or with `VmHWM` at its most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) / 1024


@contextmanager
def measure_time(figures: Figures, name: str) -> Iterator[None]:
    """Notes the processor's time of a block in seconds, so that other programs count for little."""
    began = time.process_time()
    yield
    figures[name] = time.process_time() - began


def write_rows(file: Path, number: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(0)

    def make_row(index: int) -> dict[str, Any]:
        question = f"{' '.join(rng.choices(WORDS, k=rng.randint(20, 90)))} {index}?"
        return {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(index)},
            "extra_info": {"split": "train", "index": index, "answer": question[:120]},
        }

    writer = None
    for begin in range(0, number, WRITTEN_ROWS):
        rows = [make_row(index) for index in range(begin, min(begin + WRITTEN_ROWS, number))]
        table = pa.Table.from_pylist(rows)
        writer = writer or pq.ParquetWriter(file, table.schema)
        writer.write_table(table)
    assert writer is not None, number
    writer.close()


def measure_pyarrow(file: str, records: str) -> Figures:
    import pyarrow.parquet as pq

    figures: Figures = {}
    with measure_time(figures, "read_s"):
        table = pq.read_table(file)
    indices = random.Random(0).choices(range(table.num_rows), k=READ_ROWS // 10)
    with measure_time(figures, "rows_s"):
        for index in indices:
            table.slice(index, 1).to_pylist()
    rate = len(indices) / figures.pop("rows_s")
    return {**figures, "rows_per_s": rate, "resident_mib": read_resident_mib()}


def measure_preparing(file: str, records: str) -> Figures:
    from generators.data.prepare import prepare_data
    from generators.data.selection import LengthLimit
    from generators.rendering.prompts import PromptEncoder
    from slipstream_bench.byte_tokenizer import make_byte_tokenizer

    limit = LengthLimit(PromptEncoder(make_byte_tokenizer()), MAX_TOKENS)
    figures: Figures = {"resident_before_mib": read_resident_mib()}
    began: dict[str, float] = {}

    def note_stage(what: str, done: int, total: int | None) -> None:
        began.setdefault(what.split(": ")[1].split()[0], time.process_time())

    with measure_time(figures, "prepare_s"):
        prepared = prepare_data({"train": file, "eval": None}, limit, note_stage)
    if len(began) == 2:
        figures["caching_s"] = began["checking"] - began["reading"]
    Path(records).write_text(json.dumps(prepared))
    return {**figures, "too_long": prepared[0]["num_too_long"], "peak_mib": read_resident_mib("VmHWM")}


def measure_worker(file: str, records: str) -> Figures:
    from generators.tasks import load_task

    data = {"train": file, "eval": None, "prepared": json.loads(Path(records).read_text())}
    figures: Figures = {}
    with measure_time(figures, "open_s"):
        task = load_task("dataset", {"data": data, "reward": {"function": "exact_match"}})
    figures["resident_at_first_mib"] = read_resident_mib()
    indices = random.Random(0).choices(range(task.num_prompts), k=READ_ROWS)
    with measure_time(figures, "rows_s"):
        for index in indices:
            task.make_prompt("train", index, 0)
    rate = len(indices) / figures.pop("rows_s")
    return {**figures, "rows_per_s": rate, "resident_mib": read_resident_mib()}


def measure_order(file: str, records: str) -> Figures:
    from buffers.prompts import PromptOrder, SourceTerms

    (record,) = json.loads(Path(records).read_text())
    figures: Figures = {"resident_before_mib": read_resident_mib()}
    order = PromptOrder([SourceTerms("rows", record["num_taken"], 1.0)], seed=0)
    with measure_time(figures, "epoch_s"):
        for group in range(record["num_taken"]):
            order.prompt_index(group)
    return {**figures, "peak_mib": read_resident_mib("VmHWM")}


PARTS: dict[str, Callable[[str, str], Figures]] = {
    "pyarrow": measure_pyarrow,
    "preparing": measure_preparing,
    "again": measure_preparing,
    "worker": measure_worker,
    "order": measure_order,
}


def measure_parts(number: int) -> dict[str, Figures]:
    """Returns the figures of each part, measured in a process of its own."""
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        write_rows(file, number)
        found["file"] = {"rows": number, "mib": file.stat().st_size / 2**20}
        for part in PARTS:
            print(f"measuring {part} ...", file=sys.stderr, flush=True)
            command = [sys.executable, __file__, "--part", part, "--folder", folder]
            done = subprocess.run(
                command, env=os.environ | {"SLIPSTREAM_CACHE": folder}, stdout=subprocess.PIPE, check=True
            )
            found[part] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows in the file")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        figures = PARTS[options.part](
            str(options.folder / "rows.parquet"), str(options.folder / "records.json")
        )
        print(json.dumps(figures))
        return
    found = measure_parts(options.rows)
    found["beside pyarrow"] = {
        "prepare_over_read": found["preparing"]["prepare_s"] / found["pyarrow"]["read_s"],
        "rows_per_s_over_table": found["worker"]["rows_per_s"] / found["pyarrow"]["rows_per_s"],
        "resident_over_table": found["worker"]["resident_mib"] / found["pyarrow"]["resident_mib"],
    }
    table = Table("part", "figure", "value")
    for part, figures in found.items():
        for name, value in figures.items():
            table.add_row(part, name, f"{value:,.3f}")
    Console(stderr=True).print(table)
    text = json.dumps(found, indent=2)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
