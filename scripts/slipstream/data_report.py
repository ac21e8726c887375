"""The rows of a run on the console: the progress of their preparation, then a line for each source."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

SAY_S = 10.0
"""Seconds between two lines about work that takes long, where the console is no terminal."""


class DataProgress:
    """Shows how far the preparation of rows is, and lets the user stop it: a `Report`."""

    def __init__(self, raise_if_stopped: Callable[[], None]) -> None:
        self._raise_if_stopped = raise_if_stopped
        self._console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=self._console,
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("preparing rows", total=None)
        self._said = time.monotonic()

    def __enter__(self) -> "DataProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        self._raise_if_stopped()
        self._bar.update(self._task, description=what, completed=done, total=total)
        if self._bar.disable and time.monotonic() - self._said > SAY_S:
            self._said = time.monotonic()
            print(f"{what}: {_write_share(done, total)}", file=sys.stderr, flush=True)


def print_data(records: Sequence[Mapping[str, Any]], num_repeated: int, num_shared: int) -> None:
    """Prints a line for each source of files. `num_repeated` rows are trained more than once an epoch,
    `num_shared` are both trained and held out."""
    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rows")
    for title in ("in files", "trained", "held out", "too long", "tokens: mean", "longest"):
        table.add_column(title, justify="right")
    for record in records:
        is_train = record["split"] == "train"
        counts = [
            record["num_rows"],
            record["num_taken"] if is_train else 0,
            record["num_held_out"] if is_train else record["num_taken"],
            record["num_too_long"],
        ]
        lengths = [record["tokens_mean"], record["tokens_max"]]
        table.add_row(
            f"{record['split']} {record['name']}",
            *(f"{count:,}" for count in counts),
            *("" if length is None else f"{length:,.0f}" for length in lengths),
        )
    if records:
        console.print(table)
    if num_repeated:
        console.print(f"{num_repeated:,} rows of data.train have the prompt of an earlier one", markup=False)
    if num_shared:
        console.print(
            f"warning: {num_shared:,} rows of data.eval have the prompt of a row of data.train, so their "
            "scores are not those of new questions",
            markup=False,
        )


def _write_share(done: int, total: int | None) -> str:
    return f"{done:,}" if total is None else f"{done:,} of {total:,}"
