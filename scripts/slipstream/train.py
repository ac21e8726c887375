"""Starts a run, watches it, and ends it.

       ┌───────────────────────────── driver (this process) ─────────────────────────────┐
       │ composes the configuration, places the roles with Ray, shows and records the run │
       └──┬──────────────────────┬──────────────────────────────┬────────────────────────┘
          ▼                      ▼                              ▼
    Generator.run() × n ──▶ BufferServer.run() ◀──▶ Learner.run() × ranks
       generators/worker.py    buffers/server.py      learners/learner.py
          ▲                                                     │
          └──────────────── sync/: versioned weights ◀──────────┘

Ray starts the processes, divides the GPUs and restarts generators that die; trajectories, weights and control go over
ZeroMQ and shared memory. A learner that loses a rank is started again from its newest checkpoint (`supervisor.py`). The
learner is the only finite loop: any other role that ends is an error, and ends the run.

    python scripts/slipstream/train.py [key=value ...]      --help [KEY|SECTION] explains keys, --cfg prints the configuration
"""

import dataclasses
import fcntl
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, KeysRefused, RefusedByBuffer
from buffers.files import replace_file
from buffers.journal import lock_journal
from buffers.keys import KeyRole
from buffers.run_status import RunStatus
from buffers.samplers import load_sampler
from configs.disk import DiskFull, is_disk_full
from configs.generators import EngineKind
from configs.help import format_help
from configs.learner import LearnerKind
from configs.load import find_resumed_folder, load_config, load_resumed_config, to_yaml
from configs.schema import Config, Role
from generators.tasks import load_task
from learners import checkpoint, families
from learners.memory import plan_memory
from slipstream.answers import Answers
from slipstream.cluster import cluster, import_ahead
from slipstream.console import Console
from slipstream.ray_waits import is_ready, wait_for
from slipstream.record import Record
from slipstream.role_placement import Placement
from slipstream.roles import Places, RoleFailed, result
from slipstream.stop_signals import Interrupted, StopSignals
from slipstream.supervisor import LearnerRanks, Loss
from sync.folders import sweep_folders

KILLED = 130
PREDECESSOR_S = 10.0
"""How long a run that is taken up waits for the roles of its killed predecessor to end."""
STARTING = ("loading", "verifying")
"""How a learner's activities begin before its first step."""
PATIENCE_S = 30.0
"""How long the buffer may take to go back to a checkpoint."""


def quiet_full_disk(failed: threading.ExceptHookArgs) -> None:
    """A thread of TensorBoard's that finds no room ends; `Record` says so in a sentence, and a traceback says no more."""
    if failed.exc_value is None or not is_disk_full(failed.exc_value):
        threading.__excepthook__(failed)


def main(arguments: list[str]) -> int:
    threading.excepthook = quiet_full_disk
    if "--help" in arguments or "-h" in arguments:
        return print_help([argument for argument in arguments if argument not in ("--help", "-h")])
    overrides = [argument for argument in arguments if argument != "--cfg"]
    try:
        resumed = find_resumed_folder(overrides)
        config = load_config(overrides) if resumed is None else load_resumed_config(resumed, overrides)
        if resumed is None and config.run.resume is not None:
            raise ValueError(f"run.resume must be said as run.resume=FOLDER, got {' '.join(overrides)}")
        if "--cfg" in arguments:
            print(to_yaml(config), end="")
            return 0
        signals = StopSignals()
        signals.install()
        try:
            with import_ahead(config):
                if config.role is Role.generators:
                    return Fleet(config, signals).drive()
                with signals.interruptible():
                    config, folder, step = prepare(config)
                return Run(config, folder, step, signals).drive()
        finally:
            signals.ignore_further_signals()
    except Interrupted:
        print("interrupted", file=sys.stderr)
        return KILLED
    except ValueError as error:
        print(f"Slipstream cannot start:\n{error}", file=sys.stderr)
        return 2


def print_help(names: list[str]) -> int:
    """Prints the keys and sections that are named, or all keys in a line each. Returns the exit status."""
    # Without it a reader that leaves early, such as `head`, would bring a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        print(format_help(names), end="")
        return 0
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def prepare(config: Config) -> tuple[Config, Path, int | None]:
    """The run's folder and the step to resume from (0: the run has no checkpoint yet); makes the tiny model. Raises ValueError for
    what cannot be."""
    if config.run.resume is not None:
        folder = Path(config.run.resume)
        claim_run(folder, "run.resume")
        newest = checkpoint.find_latest(folder / "checkpoints")
        if newest is None and (found := sorted((folder / "checkpoints").glob("step_*"))):
            raise ValueError(
                f"run.resume must hold a whole checkpoint, or none at all to go on from the beginning, got {folder}, whose "
                f"{found[-1].name} is damaged: move it away to go on without it"
            )
        step = 0 if newest is None else newest.manifest.step  # 0: with the groups that there are
        if step >= config.run.steps:
            raise ValueError(
                f"run.steps must be above the checkpoint's step ({step}) to resume, got {config.run.steps}"
            )
        return config, folder, step
    name = (
        config.run.name
        or f"{config.task.name.rpartition(':')[2]}-{config.algo.name}-{datetime.now():%Y%m%d-%H%M%S}"
    )
    folder = Path(config.run.outputs) / name
    if folder.exists() and any(folder.iterdir()):
        if not config.run.overwrite:
            raise ValueError(
                f"run.name must be new (or set run.overwrite=true, or run.resume={folder} to continue), got {name}, "
                f"which exists in {config.run.outputs}"
            )
        if not (folder / "config.yaml").is_file() and {path.name for path in folder.iterdir()} != {".lock"}:
            raise ValueError(
                f"run.overwrite must name the folder of a run, got {folder}, which holds other files"
            )
        claim_run(folder, "run.overwrite")
        shutil.rmtree(folder)
    # So that a missing package, a bad task or a bad sampler is known before anything starts.
    needed = {
        "learner.engine=megatron": ("megatron", config.learner.engine is LearnerKind.megatron),
        "learner.lora.rank": ("peft", config.learner.lora.rank is not None),
        "learner.fsdp.liger": ("liger_kernel", config.learner.fsdp.liger),
    }
    for setting, (package, is_needed) in needed.items():
        if is_needed and find_spec(package) is None:
            raise ValueError(
                f"{setting} needs the package {package} (scripts/launch.sh installs it), got none"
            )
    # A simulated engine makes no prompts: its run is not kept waiting for what the task imports.
    simulated = config.generators.engine is EngineKind.simulated
    task = None if simulated else load_task(config.task.name, config.task.args)
    load_sampler(config.buffer.sampler, config.buffer.sampler_args)
    size = config.task.size if config.task.size is not None else getattr(task, "num_prompts", None)
    model = resolve_model(config)
    config = dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, size=size),
        learner=dataclasses.replace(
            config.learner, decay_steps=config.learner.decay_steps or config.run.steps
        ),
        run=dataclasses.replace(config.run, name=name),
        model=dataclasses.replace(config.model, path=str(model)),
    )
    folder.mkdir(parents=True, exist_ok=True)
    claim_run(folder, "run.name")
    replace_file(folder / "config.yaml", to_yaml(config).encode())
    return config, folder, None


def claim_run(folder: Path, setting: str) -> None:
    """Makes the run's folder this process's, as long as it lives. Raises ValueError, before anything in the folder is
    touched, when another command runs there, or a role of one does."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (folder / "journal").is_dir():  # a killed command's roles end a moment after it
            os.close(lock_journal(folder / "journal", wait_s=PREDECESSOR_S))
    except (BlockingIOError, ValueError) as error:
        owner = os.pread(lock, 100, 0).decode(errors="replace") or "another process"
        os.close(lock)
        raise ValueError(
            f"{setting} must name a run that has ended, got {folder}, where {owner} is at work"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} of {socket.gethostname()}".encode(), 0)


def resolve_model(config: Config) -> Path:
    if config.learner.engine is LearnerKind.simulated:
        return Path("simulated")
    if config.model.path == "tiny":
        from learners.tiny_cache import prepare_tiny_model

        task: Any = load_task(config.task.name, config.task.args)
        if not hasattr(task, "solved_examples"):
            raise ValueError(
                f"model.path must be a folder for a task without solved questions to warm-start the tiny model on (`solved_examples`), got "
                f"tiny with task.name={config.task.name}"
            )
        return prepare_tiny_model(task.solved_examples("train", seed=0))
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"model.path must be a Hugging Face model folder or `tiny`, got {path} without a config.json"
        )
    return path.resolve()


class Run:
    """One whole run, from the first process to the last."""

    def __init__(self, config: Config, folder: Path, resume_step: int | None, signals: StopSignals) -> None:
        self._config, self._folder, self._resume_step, self._signals = (
            config,
            folder.resolve(),
            resume_step,
            signals,
        )
        self._record = Record(config, self._folder, resume_step)
        self._console = Console(config, self._folder, resume_step)
        self._record.reach("imports")
        self._refs: dict[Any, str] = {}  # what each `run()` will return -> its role
        self._answers = Answers(self._console.say, signals)
        self._after_learner: list[Callable[[], None]] = []
        """Start the generators that share a GPU with a rank of the learner, which loads first: both would take memory at the same time."""

    def drive(self) -> int:
        """Consumes the buffer's news, produces the console, `summary.json` and TensorBoard.

        Waits for the roles. Ends when the learner has ended, a role has failed, or the user has asked for it; returns the
        exit status.
        """
        status, news = "failed", None
        try:
            with cluster(self._config), self._console:
                self._record.reach("cluster")
                self._console.say("starting the buffer, the learner and the generators")
                address, learner, stop_buffer = self._launch()
                self._record.reach("buffer")
                self._console.say(f"the buffer answers at {address}")
                client = BufferClient(
                    address, timeout_s=2.0, keys=self._config.buffer.keys, role=KeyRole.operator
                )
                try:
                    status, news = self._watch(client, learner)
                finally:
                    self._wind_up(client, stop_buffer)
        except Interrupted:
            status = "interrupted"
        except (RoleFailed, BufferGone, RefusedByBuffer, ValueError) as error:
            print(f"\n{error}\nThe run has failed. Logs: {self._folder / 'logs'}", file=sys.stderr)
        finally:
            status = self._close_record(status)
            sweep_folders(Path("/dev/shm"))  # of a learner that was killed
        self._draw_curves()
        self._console.conclude(status, news, self._record.evaluations)
        return {"finished": 0, "interrupted": KILLED}.get(status, 1)

    def _draw_curves(self) -> None:
        """A picture that cannot be drawn does not change how the run has ended."""
        if not self._record.num_steps:
            return
        try:
            from slipstream.curves import draw_curves  # here: the picture's library takes a second to import

            with self._signals.interruptible():
                draw_curves(self._folder, self._record.evaluations)
        except Interrupted:
            pass
        except Exception as error:
            self._console.say(f"curves.png could not be drawn: {type(error).__name__}: {error}")

    def _close_record(self, status: str) -> str:
        """How the run has ended: a run whose last summary finds no room has not ended well."""
        try:
            self._record.close(status)
        except DiskFull as full:
            if status != "failed":  # else what has failed is told already
                print(f"\n{full}\nThe run has failed. Logs: {self._folder / 'logs'}", file=sys.stderr)
            return "failed"
        return status

    def _launch(self) -> tuple[str, LearnerRanks, Any]:
        config, logs, places = self._config, self._folder / "logs", Places(self._config, self._signals)
        division = places.division
        if str(division):
            self._console.say(str(division))
        limited = dataclasses.replace(config.learner, gpu_memory_fraction=division.rank_memory)
        own = dataclasses.replace(config, learner=limited)
        if (memory := plan_memory(own, cuda=division.rank_memory is not None)) is not None:
            self._console.say(str(memory))
        if (untested := families.describe_untested_family(config)) is not None:
            self._console.say(untested)
        common = (logs, os.getpid(), config.cluster.address is None)
        buffer = places.buffer().remote("buffer", *common)
        names = [f"generator-{number}" for number in range(config.generators.count)]
        # Their imports begin.
        generators = [places.generator(number).remote(name, *common) for number, name in enumerate(names)]
        for name, actor in zip(["buffer", *names], [buffer, *generators], strict=True):
            self._answers.expect(name, actor)
        started = buffer.start.remote(config, self._folder / "journal", self._resume_step)
        address = self._answers.get(started, lambda ref: self._get(ref, "buffer"))
        self._refs[buffer.run.remote()] = "buffer"
        learner = LearnerRanks(own, self._folder, address, places.learner, common, self._signals)
        learner.start(self._resume_step or None, self._answers)  # no checkpoint is of step 0
        for number, (name, generator) in enumerate(zip(names, generators, strict=True)):
            place = division.engines[number]
            start = partial(
                self._start_generator, generator, address, name, config.run.seed + 1000 + number, place
            )
            if place.beside_rank:
                self._after_learner.append(start)
            else:
                start()
        self._buffer = buffer  # an actor lives as long as its handle
        return address, learner, buffer.stop.remote

    def _start_generator(self, generator: Any, address: str, name: str, seed: int, place: Placement) -> None:
        self._refs[generator.run.remote(address, name, seed, self._config.buffer.keys, place)] = name

    def _start_beside_learner(self, status: RunStatus) -> None:
        """Once the learner has loaded; until its first batch it waits for no generator."""
        if self._after_learner and has_begun(status):
            self._console.say("the learner has loaded: the generators that share its GPU start")
            while self._after_learner:
                self._after_learner.pop(0)()

    def _watch(self, client: BufferClient, learner: LearnerRanks) -> tuple[str, m.RunNews | None]:
        """Until the end; returns how it ended, and the last news."""
        news: m.RunNews | None = None
        stopping = False
        while not learner.ended():
            self._answers.check()
            ended = self._ended_roles()
            if ended and not stopping:
                raise RoleFailed(f"{ended[0]} ended before the learner did")
            if (loss := learner.loss()) is not None:
                if self._signals.received:
                    self._console.say(f"{loss}, and is not started again: the run was told to stop")
                    return "interrupted", news
                news = self._restart(learner, loss, client)
            if self._signals.received and not stopping:
                self._console.say(
                    f"{self._signals.received}: stopping after the step under way and its checkpoint (again: at once)"
                )
                client.post(m.StopRun(reason=self._signals.received))
                stopping = True
            if stopping and (news is None or not has_begun(news.status)):
                return "interrupted", news  # there is nothing to be saved
            try:
                with self._signals.interruptible():
                    news = client.call(m.WatchRun(after=self._record.num_steps, wait_s=0.25), m.RunNews)
            except BufferGone:
                continue  # its role has ended, or will be heard again
            is_first = news.records and not self._record.num_steps
            self._record.take(news)
            self._console.take(news)
            self._start_beside_learner(news.status)
            if stopping:
                self._console.say_what_stops(news.status)
            if is_first:
                self._console.first_step(self._record.start_s)
        with self._signals.interruptible():
            news = client.call(m.WatchRun(after=self._record.num_steps, wait_s=0.0), m.RunNews)
        self._record.take(news)
        return ("interrupted" if self._signals.received else "finished"), news

    def _restart(self, learner: LearnerRanks, loss: Loss, client: BufferClient) -> m.RunNews:
        """The learner goes on from its newest checkpoint, and so does the buffer; generators notice no more than a longer step."""
        learner.kill()
        step = learner.newest_checkpoint()
        whence = "from the beginning: there is no checkpoint yet" if step is None else f"from step {step}"
        times = f"restart {learner.num_restarts + 1} of {self._config.learner.max_restarts}"
        self._console.say(f"{loss}: the learner goes on {whence} ({times})")
        try:
            with self._signals.interruptible():
                client.call(m.RewindToStep(step=step or 0), m.Acknowledged, wait_s=PATIENCE_S)
        except BufferGone:
            self._ended_roles()  # raises what has ended the buffer, and with it the learner
            raise
        with self._signals.interruptible():
            news = client.call(
                m.WatchRun(after=self._record.num_steps, wait_s=0.0), m.RunNews, wait_s=PATIENCE_S
            )
        for view in (self._record, self._console):
            view.take(news)  # the last that the dead have done, most of it to be done again
            view.rewind(step or 0)
        learner.start(step, self._answers)
        return news

    def _ended_roles(self) -> list[str]:
        names = []
        for ref in [ref for ref in self._refs if is_ready(ref)]:
            name = self._refs.pop(ref)
            self._get(ref, name)
            names.append(name)
        return names

    def _wind_up(self, client: BufferClient, stop_buffer: Any) -> None:
        """Lets the generators leave by themselves, then the buffer; whoever is too slow is killed with the cluster."""
        client.post(m.StopRun(reason="the run is over"))
        patience = time.monotonic() + 3.0
        generators = [ref for ref, name in self._refs.items() if name.startswith("generator")]
        wait_for(generators, len(generators), 3.0, self._signals)
        buffers = [ref for ref, name in self._refs.items() if name == "buffer"]
        if buffers and not is_ready(buffers[0]):
            with suppress(
                BufferGone, RefusedByBuffer, DiskFull
            ):  # steps that were trained since the driver has looked
                with self._signals.interruptible():
                    last = client.call(m.WatchRun(after=self._record.num_steps, wait_s=0.0), m.RunNews)
                self._record.take(last)
        stop_buffer()
        wait_for(buffers, 1, max(0.5, patience - time.monotonic()), self._signals)
        client.close()

    def _get(self, ref: Any, name: str) -> Any:
        return result(ref, name, self._folder / "logs")


def has_begun(status: RunStatus) -> bool:
    """True when the learner of this life is past its start, and may hold steps that are in no checkpoint."""
    learner = status.roles.get("learner-0")
    return status.version >= 0 and learner is not None and not learner.activity.startswith(STARTING)


class Fleet:
    """Generators that join a run which another command has started."""

    def __init__(self, config: Config, signals: StopSignals) -> None:
        self._config, self._signals = config, signals
        name = f"{socket.gethostname()}-{os.getpid()}"
        self._names = [f"{name}-{number}" for number in range(config.generators.count)]
        self._logs = Path(config.run.outputs).resolve() / f"fleet-{name}" / "logs"
        self._answers = Answers(partial(print, flush=True), signals)

    def drive(self) -> int:
        """Consumes the buffer's news; waits for the generators. Ends when the run does, or when the user asks for it.

        Raises ValueError when no buffer answers at `buffer.address`. Returns the exit status.
        """
        address = self._config.buffer.address
        client = BufferClient(address, timeout_s=10.0, keys=self._config.buffer.keys)
        try:
            with self._signals.interruptible():
                news = client.call(m.WatchRun(after=sys.maxsize, wait_s=0.0), m.RunNews)
        except (BufferGone, RefusedByBuffer) as error:
            raise ValueError(f"buffer.address must be a running buffer's, got {address}: {error}") from error
        print(
            f"{address} is at step {news.status.num_trained_steps}; starting {len(self._names)} generators",
            flush=True,
        )
        try:
            with cluster(self._config):
                return self._watch(client, self._launch())
        except (RoleFailed, KeysRefused, RefusedByBuffer) as error:
            print(f"{error}\nLogs: {self._logs}", file=sys.stderr)
            return 1
        finally:
            with suppress(BufferGone):  # as one that lets us in no more is, to us
                for name in self._names:
                    client.post(
                        m.LeaveRun(generator=name)
                    )  # they have been killed: others may take their leases at once
            client.close()

    def _launch(self) -> dict[Any, str]:
        places, refs = Places(self._config, self._signals), {}
        for number, name in enumerate(self._names):
            seed, place = xxhash.xxh32_intdigest(name.encode()), places.division.engines[number]
            role = places.generator(number).remote(
                name, self._logs, os.getpid(), self._config.cluster.address is None
            )
            self._answers.expect(name, role)
            refs[
                role.run.remote(self._config.buffer.address, name, seed, self._config.buffer.keys, place)
            ] = name
        return refs

    def _watch(self, client: BufferClient, refs: dict[Any, str]) -> int:
        joined: set[str] = set()
        while refs and not self._signals.received:
            ended = wait_for(list(refs), 1, 1.0, self._signals)
            self._answers.check()
            for ref in ended:
                result(ref, refs.pop(ref), self._logs)
            try:
                with self._signals.interruptible():
                    status = client.call(m.WatchRun(after=sys.maxsize, wait_s=0.0), m.RunNews).status
            except BufferGone:
                continue  # the run is over, or its host is gone: the generators find out by themselves
            for name in self._names:
                if name not in joined and name in status.generators and status.generators[name].version >= 0:
                    joined.add(name)
                    print(f"{name} generates with version {status.generators[name].version}", flush=True)
        print("the run is over" if not refs else f"{self._signals.received}: the generators have left")
        return KILLED if refs else 0


def run_command() -> None:
    """Entry point of the `slipstream` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run_command()
