"""Trains again on what a run has recorded, without generators: from its journal alone, in the order of its
step log.

    scripts/replay.sh RUN                              the same training; on CPU in float32 the same weights
    scripts/replay.sh RUN algo=rloo learner.lr=1e-4    an offline study: another algorithm on the same data
    scripts/replay.sh RUN --from-step 50 --to-step 80  from the checkpoint of step 50 (needed where
                                                       `buffer.retention` has deleted the batches before it)

Writes RUN/replays/NAME with config.yaml, checkpoints and TensorBoard. Without changes, the checkpoints are
compared with those of the run, tensor by tensor, bit by bit; the exit status is 1 when they differ. Then the
replay has as many ranks as the run where both are on CPUs, because other sums round otherwise; else it has
one.
"""

import argparse
import dataclasses
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file

from buffers import events as e
from buffers import messages as m
from buffers.client import TakenBatch
from buffers.event_log import read_events
from buffers.segments import Reader
from buffers.trajectory import SCHEMA
from configs.load import load_study_config, to_yaml
from configs.schema import Config
from learners import checkpoint
from learners.learner import BatchSource
from learners.startup import start_learner


class Recording:
    """The batches that a run has trained, step by step, from its journal."""

    def __init__(self, journal: Path) -> None:
        """Reads the log of a journal. Steps that were undone by a rewind count as they were trained in the
        end."""
        self._reader = Reader(journal)
        self._contents: dict[int, e.Accepted] = {}
        self.steps: dict[int, e.Trained] = {}
        self.dropped: set[int] = set()
        """Segments that retention has deleted."""
        for event in read_events(journal):
            match event:
                case e.Accepted():
                    self._contents[event.group] = event
                case e.Trained():
                    self.steps[event.step] = event
                case e.Rewound() | e.Repaired():
                    self.steps = {step: trained for step, trained in self.steps.items() if step < event.step}
                case e.Dropped():
                    self.dropped.update(event.segments)

    def find_first_step(self) -> int:
        """Returns the earliest step from which all batches are still in the journal."""
        gone = [
            step
            for step, trained in self.steps.items()
            if any(self._contents[group].segment in self.dropped for group in trained.groups)
        ]
        return max(gone, default=-1) + 1

    def take_batch(self, step: int) -> TakenBatch:
        """Raises DamagedGroup when the journal's bytes have changed."""
        trained = self.steps[step]
        batches = [self._reader.read(self._contents[group]) for group in trained.groups]
        return TakenBatch(step, trained.groups, trained.group_weights, pa.Table.from_batches(batches, SCHEMA))


class NoBuffer:
    """Stands in the buffer's place on the ranks that ask it for nothing: all but the first of a host."""

    def take_batch(self, step: int, wait_s: float) -> TakenBatch:
        raise AssertionError("the first rank of the host brings the batches")

    def call(self, request: m.Request, expect: type[Any]) -> Any:
        raise AssertionError("the first rank reports")

    def exchange(self, request: m.Request, *, wait_s: float = 0.0) -> tuple[m.Reply, list[memoryview]]:
        raise AssertionError("the first rank asks")

    def close(self) -> None: ...


class Playback:
    """Answers a learner as its `BufferClient` did: with the recorded batches."""

    def __init__(self, recording: Recording, exact: bool, progress: Progress, writer: Any, last: int) -> None:
        self._recording, self._exact, self._writer, self._last = recording, exact, writer, last
        self._progress = progress
        self._bar = progress.add_task("replay", total=last)
        self.metrics: list[dict[str, float]] = []

    def take_batch(self, step: int, wait_s: float) -> TakenBatch | m.RunStopped:
        return (
            self._recording.take_batch(step)
            if step < self._last
            else m.RunStopped(reason="the recording ends here")
        )

    def call(self, request: m.Request, expect: type[m.Acknowledged]) -> m.Acknowledged:
        if isinstance(request, m.ReportTrainedStep):
            recorded = sum(self._recording.steps[request.step].trained)
            if self._exact and request.num_trained != recorded:
                raise ValueError(
                    f"step {request.step} must train {recorded} tokens, as recorded, got "
                    f"{request.num_trained}"
                )
            self.metrics.append(request.metrics)
            for name, value in request.metrics.items():
                self._writer.add_scalar(name, value, request.step)
            loss = request.metrics.get("loss/policy", float("nan"))
            self._progress.update(
                self._bar, completed=request.step + 1, description=f"step {request.step}  loss {loss:+.4f}"
            )
        return m.Acknowledged()

    def exchange(self, request: m.Request, *, wait_s: float = 0.0) -> tuple[m.Reply, list[memoryview]]:
        return m.Acknowledged(), []

    def close(self) -> None:
        self._writer.close()


def replay_run(
    run: Path, config: Config, folder: Path, from_step: int, to_step: int | None, exact: bool
) -> Playback:
    """Trains from the checkpoint of `from_step` (0: the model itself) up to `to_step`. Raises ValueError for
    what cannot be."""
    from torch.utils.tensorboard import SummaryWriter

    recording = Recording(run / "journal")
    last = min(to_step or len(recording.steps), len(recording.steps))
    # The recording ends it, not the configuration: a resumed run may have been longer.
    config = dataclasses.replace(
        config, run=dataclasses.replace(config.run, steps=max(config.run.steps, last))
    )
    if from_step < recording.find_first_step():
        raise ValueError(
            f"--from-step must be at least {recording.find_first_step()} (retention has deleted what came "
            f"before), got {from_step}"
        )
    if not from_step < last:
        raise ValueError(
            f"--to-step must be above --from-step, with recorded steps up to {last}, got {from_step}"
        )
    source = run / "checkpoints" / f"step_{from_step}"
    if from_step and not source.is_dir():
        raise ValueError(
            f"--from-step must be the step of a kept checkpoint of the run, got {from_step}: no {source}"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    if from_step:
        shutil.copytree(source, folder / "checkpoints" / source.name, dirs_exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        tempfile.TemporaryDirectory() as place,
        run_other_ranks(config, folder, rendezvous := f"file://{place}/rendezvous", from_step),
    ):
        playback = Playback(recording, exact, progress, SummaryWriter(str(folder / "tensorboard")), last)
        train_rank(config, folder, playback, 0, rendezvous, from_step)
    return playback


def train_rank(
    config: Config, folder: Path, source: BatchSource, rank: int, rendezvous: str, from_step: int
) -> None:
    start_learner(config, folder, source, rank, rendezvous, from_step or None, publish=False).run()


@contextmanager
def run_other_ranks(config: Config, folder: Path, rendezvous: str, from_step: int) -> Iterator[None]:
    """Trains on all ranks but the first, each in a process of its own; they end with the block."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(
            target=train_rank, args=(config, folder, NoBuffer(), rank, rendezvous, from_step), daemon=True
        )
        for rank in range(1, config.num_learner_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        yield
        for process in ranks:
            process.join()
    finally:
        for process in ranks:
            process.kill()


def compare_checkpoints(run: Path, folder: Path) -> tuple[list[int], list[str]]:
    """(steps whose checkpoints both have, tensors of theirs whose bits are not the same)."""
    theirs = {c.manifest.step: c.folder for c in checkpoint.find_checkpoints(run / "checkpoints")}
    mine = {c.manifest.step: c.folder for c in checkpoint.find_checkpoints(folder / "checkpoints")}
    both = sorted(theirs.keys() & mine.keys())
    different = []
    for step in both:
        before, now = read_tensors(theirs[step] / "engine"), read_tensors(mine[step] / "engine")
        names = sorted(before.keys() | now.keys())
        different += [f"step {step}: {name}" for name in names if before.get(name) != now.get(name)]
    return both, different


def read_tensors(folder: Path) -> dict[str, list[bytes]]:
    """Returns the bytes of every tensor in the folder's safetensors files, of each rank's part apart: their
    order in a file is not the same twice."""
    found: dict[str, list[bytes]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            part = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            found.setdefault(name, []).append(part)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--from-step", type=int, default=0, metavar="STEP")
    parser.add_argument("--to-step", type=int, metavar="STEP")
    parser.add_argument("--name", help="folder in RUN/replays (default: from the overrides)")
    options = parser.parse_intermixed_args(arguments)
    name = options.name or "_".join(options.overrides).replace("/", "-") or "same"
    folder = options.run / "replays" / name
    try:
        config = load_study_config(options.run, options.overrides)
        exact = not options.overrides
        if not exact or torch.cuda.is_available():
            config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, ranks=1))
        playback = replay_run(options.run, config, folder, options.from_step, options.to_step, exact)
    except ValueError as error:
        print(f"Slipstream cannot replay:\n{error}", file=sys.stderr)
        return 2
    print(f"trained {len(playback.metrics)} steps from {options.run / 'journal'}; see {folder}")
    for metric in (
        "loss/policy",
        "offpolicy/ess",
        "offpolicy/kl_k3",
        "policy/entropy",
        "optimizer/grad_norm",
    ):
        if playback.metrics and metric in playback.metrics[0]:
            print(
                f"  {metric:<22} first {playback.metrics[0][metric]:+.4f}  last "
                f"{playback.metrics[-1][metric]:+.4f}"
            )
    if exact:
        steps, different = compare_checkpoints(options.run, folder)
        compared = [step for step in steps if step > options.from_step]
        if not compared:
            print("no checkpoint of the run is at hand to compare with")
        elif different:
            print(f"NOT the same as the run: {len(different)} tensors differ, the first is {different[0]}")
            for path in sorted(options.run.glob("config.until_step_*.yaml")):
                print(f"the run was resumed with other settings: see {path}")
            return 1
        else:
            print(
                f"bit for bit the same as the run in its checkpoints of steps {', '.join(map(str, compared))}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
