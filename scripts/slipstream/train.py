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
(`supervisor.py`), a buffer that dies from its journal (`buffer_keeper.py`). The learner is the only finite
loop: any other role that ends before it has failed, and ends the run. With `role=generators` the command
starts generators that join another command's run (`generator_fleet.py`).

    scripts/launch.sh [key=value ...]
    scripts/launch.sh --help [KEY|SECTION]        explains keys
    scripts/launch.sh --cfg [key=value ...]       prints the composed configuration
    scripts/launch.sh --plan [key=value ...]      says what memory a run needs (`plan.py`)
"""

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, RefusedByBuffer
from buffers.driver_messages import RUN_OVER
from configs.buffer import Durability
from configs.disk import DiskFull, is_disk_full
from configs.help import format_help
from configs.load import find_resumed_folder, load_config, load_resumed_config, to_yaml
from configs.schema import Config, Role
from configs.tracking import TENSORBOARD
from learners import families
from learners.memory import plan_memory
from slipstream.answers import FirstAnswers
from slipstream.buffer_keeper import BufferKeeper
from slipstream.buffer_silence import BufferSilence
from slipstream.cluster import import_ahead, run_cluster
from slipstream.cluster_check import check_cluster
from slipstream.console import outlast_console
from slipstream.continuation import AlreadyFinished, continue_run
from slipstream.extras import require_extras, run_program
from slipstream.generator_fleet import GeneratorFleet
from slipstream.live_view import LiveView
from slipstream.own_generators import OwnGenerators, has_learner_begun
from slipstream.preparation import prepare_run
from slipstream.ray_waits import wait_for_results
from slipstream.role_failures import RoleFailed
from slipstream.role_logs import show_stacks_of_driver
from slipstream.role_places import RolePlaces
from slipstream.run_address import remove_address, write_address
from slipstream.run_network import RunNetwork, describe_places
from slipstream.run_record import RunRecord
from slipstream.scaling import GeneratorScaling
from slipstream.stop_signals import KILLED, Interrupted, StopSignals
from slipstream.supervisor import LearnerRanks
from sync.folders import SHARED_MEMORY, sweep_folders

NEWS_S = 0.25
"""Seconds that the buffer waits for news before it answers without any."""
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
    given = [argument for argument in arguments if argument != "--cfg"]
    try:
        overrides = continue_run(given)
        resumed = find_resumed_folder(overrides)
        config = load_config(overrides) if resumed is None else load_resumed_config(resumed, overrides)
        if resumed is None and config.run.resume is not None:
            raise ValueError(f"run.resume must be said as run.resume=FOLDER, got {' '.join(overrides)}")
        if "--cfg" in arguments:
            print(to_yaml(config), end="")
            return 0
        require_extras(config)
        signals = StopSignals()
        signals.install_handlers()
        try:
            if config.cluster.address is not None:
                check_cluster(config.cluster.address, signals)
            with import_ahead(config):
                if config.role is Role.generators:
                    return GeneratorFleet(config, signals).drive()
                with signals.interruptible():
                    config, folder, step = prepare_run(config, signals.raise_if_received, given)
                return Run(config, folder, step, signals).drive()
        finally:
            signals.ignore_further_signals()
    except Interrupted:
        print("interrupted before the run has begun", file=sys.stderr)
        return KILLED
    except AlreadyFinished as finished:
        print(finished)
        return 0
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
        self._view = LiveView(config, self._folder, resume_step)
        self._record = RunRecord(config, self._folder, resume_step, self._view.print_line)
        self._record.note_milestone("imports")
        self._answers = FirstAnswers(self._view.print_line, signals)

    def drive(self) -> int:
        """Consumes the buffer's news, produces the live view, `summary.json` and what trackers show.

        Waits for the roles. Ends when the learner has ended, a role has failed, or the user has asked for it;
        returns the exit status.
        """
        status, news = "failed", None
        try:
            with run_cluster(self._config), self._view:
                self._record.note_milestone("cluster")
                self._record.start_trackers()
                self._view.print_line("starting the buffer, the learner and the generators")
                buffer, learner = self._launch_roles()
                self._record.note_milestone("buffer")
                self._view.print_line(f"the buffer answers at {buffer.address}")
                send = buffer.client.send_request
                self._scaling = GeneratorScaling(self._generators, send, self._view.print_line)
                try:
                    status, news = self._watch_run(buffer, learner)
                finally:
                    self._wind_up(buffer, RUN_OVER if status == "finished" else "it has failed")
        except Interrupted:
            status = "interrupted"
        except (RoleFailed, BufferGone, RefusedByBuffer, ValueError) as error:
            self._print_failure(error)
        finally:
            remove_address(self._folder)
            status = self._close_record(status)
            # A learner that was killed leaves its versions in shared memory.
            sweep_folders(SHARED_MEMORY)
        self._draw_pictures()
        losses = self._record.close_trackers(status, self._signals)
        self._view.print_conclusion(status, news, self._record.evaluations)
        for line in losses:
            self._view.print_line(line)
        return {"finished": 0, "interrupted": KILLED}.get(status, 1)

    def _launch_roles(self) -> tuple[BufferKeeper, LearnerRanks]:
        """Starts all roles."""
        say = self._view.print_line
        places = self._places = RolePlaces(self._config, self._logs, self._signals, say)
        network = RunNetwork(self._config, self._folder, places)
        config = network.config
        learner_config = self._plan_memory(config, places)
        for line in describe_places(places, network):
            say(line)
        # All processes are started at once: they import what they need while the buffer binds.
        buffer = BufferKeeper(
            config,
            self._folder,
            places.start_buffer,
            self._answers,
            self._signals,
            say,
            self._note_buffer_restart,
        )
        generators = self._generators = OwnGenerators(config, places, network, self._answers, say)
        buffer.start(self._resume_step)
        address = network.reach_buffer(buffer.address)
        learner = LearnerRanks(learner_config, self._folder, address, places, network, self._signals)
        # Step 0 is the start of the run, of which there is no checkpoint.
        learner.start(self._resume_step or None, self._answers)
        generators.join_run(address)
        write_address(self._folder, address, config.buffer.keys)
        return buffer, learner

    def _plan_memory(self, config: Config, places: RolePlaces) -> Config:
        """Says how GPUs and memory are divided. Returns the configuration of the learner, with its part of a
        GPU's memory."""
        division = places.division
        limited = dataclasses.replace(config.learner, gpu_memory_fraction=division.rank_memory)
        learner_config = dataclasses.replace(config, learner=limited)
        if (memory := plan_memory(learner_config, cuda=division.rank_memory is not None)) is not None:
            self._view.print_line(str(memory))
        if (untested := families.describe_untested_family(config)) is not None:
            self._view.print_line(untested)
        return learner_config

    def _watch_run(self, buffer: BufferKeeper, learner: LearnerRanks) -> tuple[str, m.RunNews | None]:
        """Shows and records the run until it ends. Returns how it ended, and the last news.

        Raises Interrupted at the second Ctrl-C.
        """
        news: m.RunNews | None = None
        silence = BufferSilence(buffer.address, self._view.print_line, "it may only be busy")
        is_stopping = False
        while not learner.has_finished():
            try:
                self._answers.check_silent_roles()
            except RoleFailed as failed:
                if not self._signals.received:
                    raise
                # A signal to all processes of a job ends Ray's too.
                self._view.print_line(f"{failed}, and the run was told to stop")
                return "interrupted", news
            for name in self._generators.collect_ended(is_stopping):
                buffer.client.send_request(m.LeaveRun(generator=name))
            if buffer.check_process() and self._config.buffer.durability is Durability.none:
                why = "the buffer has come back without its last answers (buffer.durability=none)"
                news = self._restart_learner(learner, why, buffer, news)
            if (lost := learner.find_lost_rank()) is not None:
                if self._signals.received:
                    self._view.print_line(f"{lost}, and is not started again: the run was told to stop")
                    return "interrupted", news
                news = self._restart_learner(learner, str(lost), buffer, news)
            if self._signals.received and not is_stopping:
                self._view.print_line(
                    f"{self._signals.received}: stopping after the step under way and its checkpoint "
                    "(again: at once)"
                )
                buffer.stop_run(self._signals.received)
                is_stopping = True
            if is_stopping and (news is None or not has_learner_begun(news.status)):
                # No step was trained that a checkpoint would save.
                return "interrupted", news
            try:
                news = self._fetch_news(buffer.client)
            except BufferGone:
                # The buffer's process has died, which the next round finds, or it is only busy and will
                # answer again.
                silence.note_silence(buffer.client.silent_s)
                continue
            silence.note_answer()
            learner.note_heartbeats(news.status.roles)
            self._take_news(news, is_stopping)
        news = buffer.call(self._ask_news(), m.RunNews)
        self._record.record_news(news)
        return ("interrupted" if self._signals.received else "finished"), news

    def _ask_news(self, wait_s: float = 0.0) -> m.WatchRun:
        """Returns a request that the buffer answers when a step is not recorded yet, or after `wait_s`."""
        return m.WatchRun(
            after=self._record.num_steps, wait_s=wait_s, after_evaluation=self._record.last_evaluation
        )

    def _fetch_news(self, client: BufferClient) -> m.RunNews:
        """Returns what is not recorded yet. Raises BufferGone without an answer in time, and Interrupted."""
        with self._signals.interruptible():
            return client.call(self._ask_news(NEWS_S), m.RunNews)

    def _take_news(self, news: m.RunNews, is_stopping: bool) -> None:
        is_first = news.records and not self._record.num_steps
        self._record.record_news(news)
        self._view.show_news(news)
        self._generators.start_beside_learner(news.status)
        self._scaling.follow(news.status)
        if is_stopping:
            self._view.print_what_stops(news.status)
        if is_first:
            self._view.print_start_times(self._record.start_s)

    def _restart_learner(
        self, learner: LearnerRanks, why: str, buffer: BufferKeeper, last: m.RunNews | None
    ) -> m.RunNews:
        """Takes the learner and the buffer back to the newest checkpoint. Generators notice no more than a
        longer step."""
        learner.kill()
        step = learner.find_newest_step(0 if last is None else last.status.oldest_checkpoint)
        whence = "from the beginning: there is no checkpoint yet" if step is None else f"from step {step}"
        times = f"restart {learner.num_restarts + 1} of {self._config.learner.max_restarts}"
        self._view.print_line(f"{why}: the learner goes on {whence} ({times})")
        buffer.call(m.RewindToStep(step=step or 0), m.Acknowledged)
        news = buffer.call(self._ask_news(), m.RunNews)
        # The last steps of the lost life, most of which are trained again.
        self._record.record_news(news)
        self._record.rewind_to_step(step or 0)
        self._view.show_news(news)
        self._view.rewind_to_step(step or 0)
        learner.start(step, self._answers)
        return news

    def _wind_up(self, buffer: BufferKeeper, why: str) -> None:
        """Tells the generators `why` the run ends and lets them leave by themselves, then the buffer. The end
        of the cluster kills a role that is too slow."""
        buffer.stop_run(why)
        deadline = time.monotonic() + LEAVE_S
        generators = self._generators.ends
        wait_for_results(generators, len(generators), LEAVE_S, self._signals)
        if not buffer.has_ended():
            # Steps may have been trained since the driver has looked.
            with suppress(BufferGone, RefusedByBuffer, DiskFull):
                self._record.record_news(self._fetch_news(buffer.client))
        buffer.stop(max(0.5, deadline - time.monotonic()))
        buffer.close()
        self._places.end_roles()
        if self._places.spans_nodes:
            for line in self._places.agents.bring_timelines(self._folder):
                self._view.print_line(line)

    def _note_buffer_restart(self) -> None:
        self._record.note_buffer_restart()
        self._view.note_buffer_restart()

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

    def _draw_pictures(self) -> None:
        """Draws `curves.png` and the timeline."""
        if not self._record.num_steps:
            return
        # Imported here, because the library takes a second to import.
        from slipstream.curves import draw_curves
        from slipstream.timeline import draw_run

        if TENSORBOARD in self._config.tracking.trackers:
            self._try_to_draw("curves.png", lambda: draw_curves(self._folder, self._record.evaluations))
        self._try_to_draw("timeline.png", lambda: draw_run(self._folder))

    def _try_to_draw(self, name: str, draw: Callable[[], object]) -> None:
        """Draws a picture. One that cannot be drawn does not change how the run has ended."""
        try:
            with self._signals.interruptible():
                draw()
        except Interrupted:
            pass
        except Exception as error:
            self._view.print_line(f"{name} could not be drawn: {type(error).__name__}: {error}")

    def _print_failure(self, error: Exception) -> None:
        print(f"\n{error}\nThe run has failed. Logs: {self._logs}", file=sys.stderr)


def run_command() -> None:
    """Runs as the `slipstream` command."""
    outlast_console()
    run_program(main)


if __name__ == "__main__":
    run_command()
