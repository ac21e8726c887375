"""Measures how long a buffer takes to continue after a SIGKILL, by the length of its run.

    scripts/benchmark_recovery.sh [--groups 10000 100000 1000000] [--without-checkpoints]

A child process makes and trains groups in a journal of its own, and is killed. Another child opens the
journal and reports how long that took, how many lines of the log it read, and the most memory it used. With
`--without-checkpoints` the learner never writes a checkpoint, so every step may have to be undone: this is
the worst case.
"""

import argparse
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from buffers import messages as m
from buffers.buffer import Buffer
from buffers.recovery import read_journal
from buffers.trajectory import SCHEMA_VERSION, Trajectory, encode_batch, to_batch
from configs.load import load_config
from configs.schema import Config

GROUPS_PER_STEP, CHECKPOINT_EVERY, KEEP = 64, 50, 3


def make_config() -> Config:
    return load_config(
        [
            f"learner.groups_per_step={GROUPS_PER_STEP}",
            "learner.samples_per_prompt=2",
            "run.steps=100000000",
            "eval.prompts=0",
            "staleness.max_versions=2",
            "generators.engine=simulated",
            "learner.engine=simulated",
        ]
    )


def write_run(folder: Path, num_groups: int, checkpoints: bool) -> None:
    """Writes the journal of a run with `num_groups` groups; then this process kills itself before a clean
    end."""
    logging.disable(logging.ERROR)
    buffer = Buffer(make_config(), folder)
    for step in range(-(-num_groups // GROUPS_PER_STEP)):
        buffer.progress.publish_version(step, f"weights of version {step}")
        leases = []
        while (lease := buffer.lease_next("g")) is not None:
            leases.append(lease)
        rows = [row for lease in leases for row in make_rows(lease, step)]
        if leases:
            data = memoryview(encode_batch(to_batch(rows))).cast("B")
            counts = [lease.num_samples for lease in leases]
            buffer.intake.submit_groups("g", [lease.id for lease in leases], counts, SCHEMA_VERSION, data)
        handout = buffer.progress.hand_out(step)
        assert handout is not None
        trained = sum(buffer.book.pool.get_content(group).tokens for group in handout.groups)
        buffer.progress.finish_step(
            m.ReportTrainedStep(step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={})
        )
        if checkpoints and (step + 1) % CHECKPOINT_EVERY == 0:
            buffer.progress.keep_checkpoint(step + 1, max(0, step + 1 - (KEEP - 1) * CHECKPOINT_EVERY))
        buffer.commit()
    os.kill(os.getpid(), signal.SIGKILL)


def make_rows(lease: m.Lease, version: int) -> list[Trajectory]:
    return [
        Trajectory(
            group=lease.group,
            sample=sample,
            due=lease.due,
            prompt_id=lease.index,
            task=lease.task,
            tokens=[1, 2, 3, 4],
            sampled=[False, False, True, True],
            logprobs=[0.0, 0.0, -0.5, -0.5],
            versions=[-1, -1, version, version],
            reward=float(sample),
            finish_reason="stop",
            generator="g",
            started_at=0.0,
            finished_at=1.0,
        )
        for sample in range(lease.num_samples)
    ]


def reopen_journal(folder: Path) -> None:
    """Opens the journal; prints seconds, lines read, the most memory in MB, and the next step."""
    logging.disable(logging.ERROR)
    lines = len(read_journal(folder).tail.lines)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    buffer = Buffer(make_config(), folder)
    seconds = time.monotonic() - began
    assert buffer.book.ledger.closes()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(seconds, lines, max(before, most) / 1024, buffer.progress.next_step)
    # A clean end would write a state.
    os._exit(0)


def measure_recovery(num_groups: int, checkpoints: bool) -> list[str]:
    folder = Path(tempfile.mkdtemp(prefix="slipstream-recovery-"))
    try:
        own = [
            "--folder",
            str(folder),
            "--groups",
            str(num_groups),
            *([] if checkpoints else ["--without-checkpoints"]),
        ]
        subprocess.run(
            [sys.executable, __file__, "--role", "writer", *own], check=False, stdout=subprocess.DEVNULL
        )
        log_mb = sum(path.stat().st_size for path in (folder / "log").glob("*")) / 1e6
        told = subprocess.run(
            [sys.executable, __file__, "--role", "opener", *own], check=True, capture_output=True, text=True
        )
        seconds, lines, most, step = told.stdout.split()
        return [
            f"{num_groups:,}", f"{int(step):,}", f"{log_mb:,.0f}", f"{int(lines):,}", f"{float(seconds):.2f}",
            f"{float(most):,.0f}",
        ]  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--without-checkpoints", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "writer":
        write_run(options.folder, options.groups[0], not options.without_checkpoints)
    if options.role == "opener":
        reopen_journal(options.folder)
    table = Table(
        title=f"recovery after a SIGKILL{', no checkpoints' if options.without_checkpoints else ''}"
    )
    for name in ("groups", "steps", "log, MB", "lines read", "seconds", "memory, MB"):
        table.add_column(name, justify="right")
    for num_groups in options.groups:
        table.add_row(*measure_recovery(num_groups, not options.without_checkpoints))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
