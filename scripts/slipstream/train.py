"""Starts a run, watches it, and ends it.

       ┌───────────────────────────── driver (this process) ─────────────────────────────┐
       │ composes the configuration, places the roles with Ray, shows and records the run │
       └──┬──────────────────────┬──────────────────────────────┬────────────────────────┘
          ▼                      ▼                              ▼
    Generator.run() × n ──▶ BufferServer.run() ◀──▶ Learner.run() × ranks
       generators/worker.py    buffers/server.py      learners/learner.py
          ▲                                                     │
          └──────────────── sync/: versioned weights ◀──────────┘

Ray starts the processes, divides the GPUs and restarts generators that die; trajectories, weights and control
go over ZeroMQ and shared memory. A learner that loses a rank is started again from its newest checkpoint
(`supervisor.py`). The learner is the only finite loop: any other role that ends before it has failed, and
ends the run. With `role=generators` the command starts generators that join another command's run
(`generator_fleet.py`).

    scripts/launch.sh [key=value ...]
    scripts/launch.sh --help [KEY|SECTION]        explains keys
    scripts/launch.sh --cfg [key=value ...]       prints the composed configuration
"""

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, RefusedByBuffer
from buffers.keys import KeyRole
from buffers.run_status import RunStatus
from configs.disk import DiskFull, is_disk_full
from configs.help import format_help
from configs.load import find_resumed_folder, load_config, load_resumed_config, to_yaml
from configs.schema import Config, Role
from learners import families
from learners.memory import plan_memory
from slipstream.answers import FirstAnswers
from slipstream.cluster import import_ahead, run_cluster
from slipstream.generator_fleet import GeneratorFleet
from slipstream.live_view import LiveView
from slipstream.preparation import prepare_run
from slipstream.ray_waits import is_ready, wait_for_results
from slipstream.role_failures import RoleFailed, get_result
from slipstream.role_logs import show_stacks_of_driver
from slipstream.role_placement import RolePlace
from slipstream.role_places import RolePlaces
from slipstream.run_record import RunRecord
from slipstream.stop_signals import KILLED, Interrupted, StopSignals
from slipstream.supervisor import LearnerRanks, LostRank
from sync.folders import sweep_folders

STARTING = ("loading", "verifying")
"""First words of a learner's activities before its first step."""
REWIND_S = 30.0
"""Seconds that the buffer may take to go back to a checkpoint."""
LEAVE_S = 3.0
"""Seconds that generators have to leave when the run is over; then they are killed with the cluster."""


def quiet_full_disk(failed: threading.ExceptHookArgs) -> None:
    """Prints no traceback of TensorBoard's thread when it finds the disk full: `RunRecord` says so in a
    sentence."""
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
        signals.install_handlers()
        try:
            with import_ahead(config):
                if config.role is Role.generators:
                    return GeneratorFleet(config, signals).drive()
                with signals.interruptible():
                    config, folder, step = prepare_run(config)
                return Run(config, folder, step, signals).drive()
        finally:
            signals.ignore_further_signals()
    except Interrupted:
        print("interrupted before the run has begun", file=sys.stderr)
        return KILLED
    except ValueError as error:
        print(f"Slipstream cannot start:\n{error}", file=sys.stderr)
        return 2


def print_help(names: list[str]) -> int:
    """Prints the keys and sections that are named, or all keys in a line each. Returns the exit status."""
    try:
        print(format_help(names), end="", flush=True)
    except BrokenPipeError:
        # A reader has left early, such as `head`. What is left goes nowhere, or the interpreter's last flush
        # would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


class Run:
    """One whole run, from the first process to the last."""

    def __init__(self, config: Config, folder: Path, resume_step: int | None, signals: StopSignals) -> None:
        self._config, self._resume_step, self._signals = config, resume_step, signals
        self._folder = folder.resolve()
        self._logs = self._folder / "logs"
        show_stacks_of_driver(self._logs)
        self._record = RunRecord(config, self._folder, resume_step)
        self._view = LiveView(config, self._folder, resume_step)
        self._record.note_milestone("imports")
        self._role_ends: dict[Any, str] = {}
        """Result of each role's `run` -> name of the role. Ranks of the learner are not among them:
        `LearnerRanks` has them."""
        self._answers = FirstAnswers(self._view.print_line, signals)
        self._starts_after_learner: list[Callable[[], None]] = []
        """Starts of the generators that share a GPU with a rank. The rank loads first: both would take memory
        at the same time."""

    def drive(self) -> int:
        """Consumes the buffer's news, produces the live view, `summary.json` and TensorBoard.

        Waits for the roles. Ends when the learner has ended, a role has failed, or the user has asked for it;
        returns the exit status.
        """
        status, news = "failed", None
        try:
            with run_cluster(self._config), self._view:
                self._record.note_milestone("cluster")
                self._view.print_line("starting the buffer, the learner and the generators")
                address, learner, stop_buffer = self._launch_roles()
                self._record.note_milestone("buffer")
                self._view.print_line(f"the buffer answers at {address}")
                client = BufferClient(
                    address, timeout_s=2.0, keys=self._config.buffer.keys, role=KeyRole.operator
                )
                try:
                    status, news = self._watch_run(client, learner)
                finally:
                    self._wind_up(client, stop_buffer)
        except Interrupted:
            status = "interrupted"
        except (RoleFailed, BufferGone, RefusedByBuffer, ValueError) as error:
            self._print_failure(error)
        finally:
            status = self._close_record(status)
            # A learner that was killed leaves its versions in shared memory.
            sweep_folders(Path("/dev/shm"))
        self._draw_curves()
        self._view.print_conclusion(status, news, self._record.evaluations)
        return {"finished": 0, "interrupted": KILLED}.get(status, 1)

    def _launch_roles(self) -> tuple[str, LearnerRanks, Any]:
        """Starts all roles. Returns the buffer's address, the learner's ranks, and the call that stops the
        buffer."""
        config, places = self._config, RolePlaces(self._config, self._signals)
        learner_config = self._plan_memory(places)
        common = (self._logs, os.getpid(), config.cluster.address is None)
        names = [f"generator-{number}" for number in range(config.generators.count)]
        # All processes are started at once: they import what they need while the buffer binds.
        buffer = places.buffer_class().remote("buffer", *common)
        generators = [
            places.generator_class(number).remote(name, *common) for number, name in enumerate(names)
        ]
        for name, actor in zip(["buffer", *names], [buffer, *generators], strict=True):
            self._answers.expect_answer(name, actor)
        address = self._answers.wait_for_result(
            buffer.start.remote(config, self._folder / "journal", self._resume_step),
            lambda ref: get_result(ref, "buffer", self._logs),
        )
        self._role_ends[buffer.run.remote()] = "buffer"
        learner = LearnerRanks(
            learner_config, self._folder, address, places.learner_class, common, self._signals
        )
        # Step 0 is the start of the run, of which there is no checkpoint.
        learner.start(self._resume_step or None, self._answers)
        for number, (name, generator) in enumerate(zip(names, generators, strict=True)):
            place = places.division.engines[number]
            seed = config.run.seed + 1000 + number
            start = partial(self._start_generator, generator, address, name, seed, place)
            if place.beside_rank:
                self._starts_after_learner.append(start)
            else:
                start()
        # Ray ends an actor whose last handle is gone.
        self._buffer = buffer
        return address, learner, buffer.stop.remote

    def _plan_memory(self, places: RolePlaces) -> Config:
        """Says how GPUs and memory are divided. Returns the configuration of the learner, with its part of a
        GPU's memory."""
        config, division = self._config, places.division
        if str(division):
            self._view.print_line(str(division))
        limited = dataclasses.replace(config.learner, gpu_memory_fraction=division.rank_memory)
        learner_config = dataclasses.replace(config, learner=limited)
        if (memory := plan_memory(learner_config, cuda=division.rank_memory is not None)) is not None:
            self._view.print_line(str(memory))
        if (untested := families.describe_untested_family(config)) is not None:
            self._view.print_line(untested)
        return learner_config

    def _start_generator(self, generator: Any, address: str, name: str, seed: int, place: RolePlace) -> None:
        self._role_ends[generator.run.remote(address, name, seed, self._config.buffer.keys, place)] = name

    def _start_generators_beside_learner(self, status: RunStatus) -> None:
        """Starts them once the learner has loaded; until its first batch it waits for no generator."""
        if self._starts_after_learner and has_learner_begun(status):
            self._view.print_line("the learner has loaded: the generators that share its GPU start")
            while self._starts_after_learner:
                self._starts_after_learner.pop(0)()

    def _watch_run(self, client: BufferClient, learner: LearnerRanks) -> tuple[str, m.RunNews | None]:
        """Shows and records the run until it ends. Returns how it ended, and the last news.

        Raises Interrupted at the second Ctrl-C.
        """
        news: m.RunNews | None = None
        is_stopping = False
        while not learner.has_finished():
            self._answers.check_silent_roles()
            ended = self._collect_ended_roles()
            if ended and not is_stopping:
                raise RoleFailed(f"{ended[0]} ended before the learner did")
            if (lost := learner.find_lost_rank()) is not None:
                if self._signals.received:
                    self._view.print_line(f"{lost}, and is not started again: the run was told to stop")
                    return "interrupted", news
                news = self._restart_learner(learner, lost, client)
            if self._signals.received and not is_stopping:
                self._view.print_line(
                    f"{self._signals.received}: stopping after the step under way and its checkpoint "
                    "(again: at once)"
                )
                client.send_request(m.StopRun(reason=self._signals.received))
                is_stopping = True
            if is_stopping and (news is None or not has_learner_begun(news.status)):
                # No step was trained that a checkpoint would save.
                return "interrupted", news
            try:
                news = self._fetch_news(client, wait_s=0.25)
            except BufferGone:
                # The buffer's role has ended, which the next round finds, or it is only busy and will answer
                # again.
                continue
            self._take_news(news, is_stopping)
        news = self._fetch_news(client)
        self._record.record_news(news)
        return ("interrupted" if self._signals.received else "finished"), news

    def _fetch_news(self, client: BufferClient, wait_s: float = 0.0, patience_s: float = 0.0) -> m.RunNews:
        """The buffer answers when there is a step that is not recorded yet, or after `wait_s`.

        Raises BufferGone when there is no answer for `patience_s` longer than usual, and Interrupted.
        """
        with self._signals.interruptible():
            return client.call(
                m.WatchRun(after=self._record.num_steps, wait_s=wait_s), m.RunNews, wait_s=patience_s
            )

    def _take_news(self, news: m.RunNews, is_stopping: bool) -> None:
        is_first = news.records and not self._record.num_steps
        self._record.record_news(news)
        self._view.show_news(news)
        self._start_generators_beside_learner(news.status)
        if is_stopping:
            self._view.print_what_stops(news.status)
        if is_first:
            self._view.print_start_times(self._record.start_s)

    def _restart_learner(self, learner: LearnerRanks, lost: LostRank, client: BufferClient) -> m.RunNews:
        """Takes the learner and the buffer back to the newest checkpoint. Generators notice no more than a
        longer step."""
        learner.kill()
        step = learner.find_newest_step()
        whence = "from the beginning: there is no checkpoint yet" if step is None else f"from step {step}"
        times = f"restart {learner.num_restarts + 1} of {self._config.learner.max_restarts}"
        self._view.print_line(f"{lost}: the learner goes on {whence} ({times})")
        try:
            with self._signals.interruptible():
                client.call(m.RewindToStep(step=step or 0), m.Acknowledged, wait_s=REWIND_S)
        except BufferGone:
            # Raises the buffer's own failure where it has ended: that is why the learner was lost.
            self._collect_ended_roles()
            raise
        news = self._fetch_news(client, patience_s=REWIND_S)
        # The last steps of the lost life, most of which are trained again.
        self._record.record_news(news)
        self._record.rewind_to_step(step or 0)
        self._view.show_news(news)
        self._view.rewind_to_step(step or 0)
        learner.start(step, self._answers)
        return news

    def _collect_ended_roles(self) -> list[str]:
        """Returns the names of roles that have ended well since the last call. Raises RoleFailed for one that
        has not."""
        names = []
        for ref in [ref for ref in self._role_ends if is_ready(ref)]:
            name = self._role_ends.pop(ref)
            get_result(ref, name, self._logs)
            names.append(name)
        return names

    def _wind_up(self, client: BufferClient, stop_buffer: Any) -> None:
        """Lets the generators leave by themselves, then the buffer. The end of the cluster kills a role that
        is too slow."""
        client.send_request(m.StopRun(reason="the run is over"))
        deadline = time.monotonic() + LEAVE_S
        generators = [ref for ref, name in self._role_ends.items() if name.startswith("generator")]
        wait_for_results(generators, len(generators), LEAVE_S, self._signals)
        buffers = [ref for ref, name in self._role_ends.items() if name == "buffer"]
        if buffers and not is_ready(buffers[0]):
            # Steps may have been trained since the driver has looked.
            with suppress(BufferGone, RefusedByBuffer, DiskFull):
                self._record.record_news(self._fetch_news(client))
        stop_buffer()
        wait_for_results(buffers, 1, max(0.5, deadline - time.monotonic()), self._signals)
        client.close()

    def _close_record(self, status: str) -> str:
        """Writes the last summary. Returns how the run has ended: `failed` when there is no room for the
        summary."""
        try:
            self._record.close(status)
        except DiskFull as full:
            # A run that has failed already has told why.
            if status != "failed":
                self._print_failure(full)
            return "failed"
        return status

    def _draw_curves(self) -> None:
        """Draws the picture of the run. A picture that cannot be drawn does not change how the run has
        ended."""
        if not self._record.num_steps:
            return
        try:
            # Here, because the library takes a second to import.
            from slipstream.curves import draw_curves

            with self._signals.interruptible():
                draw_curves(self._folder, self._record.evaluations)
        except Interrupted:
            pass
        except Exception as error:
            self._view.print_line(f"curves.png could not be drawn: {type(error).__name__}: {error}")

    def _print_failure(self, error: Exception) -> None:
        print(f"\n{error}\nThe run has failed. Logs: {self._logs}", file=sys.stderr)


def has_learner_begun(status: RunStatus) -> bool:
    """True when the learner of this life is past its start, and may hold steps that are in no checkpoint."""
    learner = status.roles.get("learner-0")
    return status.version >= 0 and learner is not None and not learner.activity.startswith(STARTING)


def run_command() -> None:
    """Runs as the `slipstream` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run_command()
