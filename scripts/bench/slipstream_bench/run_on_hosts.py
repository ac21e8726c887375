"""A whole run over hosts of this machine: driver, buffer and learner on the first, a fleet on each other.

    host-1  driver, buffer, learner
    host-2  a fleet of generators  ┐
    host-3  a fleet of generators  ┘ each with its own Ray, joined by keys, weights over tcp

Each host has a small disk of its own, for the folders of its commands.

`chaos_run.py` kills and disturbs what is here. Commands that end are started again, as a cluster's manager
does; one that ends for no reason that this module knows is a problem.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from buffers import events as e
from buffers.keys import KeyRole, make_keys
from slipstream.nursery import FOLDER
from slipstream_bench.chaos_log import ChaosLog
from slipstream_bench.host_clocks import HostClock
from slipstream_bench.host_commands import PYTHONPATH, CommandOnHost, leave_out_nursery
from slipstream_bench.leftovers import FOLDER_MARK
from slipstream_bench.network_hosts import HostProcess, NetworkHost, NetworkHosts

PORT = 5555
DISK_MB = 300
PATIENCE_S = 400.0
"""Seconds that anything may take before the harness gives up. It is far more than anything takes."""
RIGHTLY_ENDED = {
    # its run has failed, and goes on when it is resumed
    "the run has ended before its last step": 1,
    # there was no buffer when it began, nor within `buffer.reconnect_s` after that
    "buffer.address must be a running buffer's": 2,
    "to JoinRun in": 1,
}
"""Words of a fleet that ends as the pages say, and its exit status: it is started again."""
SMALL = [
    "generators.max_sequences=8", "generators.max_model_len=64", "sampling.max_tokens=8",
    "run.steps=1000000", "learner.lr=1e-5", "learner.keep_checkpoints=4", "buffer.segment_mb=1",
    "generators.count=0", "sync.transport=tcp", "buffer.max_restarts=100000", "learner.max_restarts=100000",
    "buffer.max_attempts=1000",
]  # fmt: skip
"""Settings of every run. Numbers of deaths that end a run are out of reach."""


class ChaosFailure(RuntimeError):
    """Raised when the run does not get over a fault."""


class HarnessStopped(Exception):
    """Raised in a harness that was told to stop."""


@dataclass
class RunOnHosts:
    """One run in `folder`. `settings` are overrides of its configuration, and `fleet_settings` of each
    fleet's."""

    folder: Path
    hosts: NetworkHosts
    settings: Sequence[str]
    fleet_settings: Sequence[str]
    problems: list[str] = field(default_factory=list)
    """Everything that went wrong, in words."""
    stopped: bool = False
    """True when everybody who waits is to stop waiting."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        self.first = self.hosts[0]
        for host in self.hosts:
            host.run("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", self.disk)
        self.outside = self.find_disk(self.first)
        self.log = ChaosLog(self.outside / "run")
        make_keys(self.folder / "keys", list(KeyRole))
        self.joining = [
            f"buffer.keys={self.folder / 'keys'}", f"buffer.address=tcp://{self.first.address}:{PORT}",
        ]  # fmt: skip
        self.clocks = {host.name: HostClock(self.folder, host.name) for host in self.hosts}
        self.commands: dict[str, CommandOnHost] = {}
        """The driver and the fleets, by host."""
        self.disturbed: set[str] = set()
        """Hosts with a fault under way. Whoever disturbs one tends it alone."""
        self._ended_by_design = Counter[str]()
        """Fleets that ended as the pages say, by the words that they said."""
        self._longest_end_s = 0.0
        """Seconds that the processes of a host took to end, at most."""
        self._tending = threading.RLock()
        self._num_commands = 0
        self._nurseries = {host.name: self._start_nursery(host) for host in self.hosts}

    # ---- commands

    def _environment_of(self, host: NetworkHost) -> dict[str, str]:
        return (
            leave_out_nursery()
            | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", FOLDER_MARK: str(self.folder)}
            | self.clocks[host.name].environment
        )

    def _start_nursery(self, host: NetworkHost) -> tuple[HostProcess, str]:
        """Returns the program, and the folder in which it listens."""
        command = [sys.executable, "-P", "-m", "slipstream_bench.chaos_nursery"]
        started = host.start_program(*command, environment=self._environment_of(host))
        assert started.popen.stdout is not None, "it is a pipe"
        if not (folder := started.popen.stdout.readline().strip()).startswith("/"):
            raise ChaosFailure(f"the nursery of {host.name} does not start: {folder}")
        return started, folder

    def _start_command(self, host: NetworkHost, name: str, *overrides: str) -> None:
        self._num_commands += 1
        _, nursery = self._nurseries[host.name]
        self.commands[host.name] = CommandOnHost(
            host,
            self.folder,
            f"{self._num_commands:03d}-{host.name}-{name}",
            *overrides,
            outputs=self.disk,
            environment=self._environment_of(host) | {FOLDER: nursery},
        )

    def find_disk(self, host: NetworkHost) -> Path:
        """Returns a host's disk as this process sees it."""
        return Path(f"/proc/{host.pid}/root{self.disk}")

    def start_run(self) -> None:
        self._start_command(self.first, "run", "run.name=run", *SMALL, *self.joining, *self.settings)

    def resume_run(self) -> None:
        self._start_command(self.first, "again", f"run.resume={self.disk / 'run'}")

    def start_fleet(self, host: NetworkHost) -> None:
        more = ["generators.max_restarts=100000", *self.fleet_settings]
        self._start_command(host, "fleet", "role=generators", *self.joining, *more)

    def scale_run(self, count: int) -> None:
        """Orders this number of the run's own generators; a refusal is a problem."""
        self._num_commands += 1
        output = self.folder / f"{self._num_commands:03d}-{self.first.name}-scale.txt"
        command = [sys.executable, "-P", "-m", "slipstream.scale", self.disk / "run", str(count)]
        with open(output, "w") as file:
            environment = self._environment_of(self.first)
            popen = self.first.start_program(*command, environment=environment, output=file).popen
        deadline = time.monotonic() + PATIENCE_S
        while popen.poll() is None and time.monotonic() < deadline:
            self.sleep(0.05)
        if popen.returncode != 0:
            self.problems.append(
                f"scripts/scale.sh ended with {popen.returncode}: {tail(output.read_text())}"
            )

    def start(self) -> None:
        """Starts everything, and returns when steps are trained from groups of every fleet."""
        self.start_run()
        run = self.commands[self.first.name]
        self.wait_for(self.first, lambda: "the buffer answers at" in run.said, "buffer")
        for host in self.hosts[1:]:
            self.start_fleet(host)
        self.await_work_everywhere()

    @contextlib.contextmanager
    def disturb(self, host: NetworkHost) -> Iterator[None]:
        """Lets nobody else tend the host while the block lasts."""
        with self._tending:
            self.disturbed.add(host.name)
        try:
            yield
        finally:
            with self._tending:
                self.disturbed.discard(host.name)

    def tend(self, host: NetworkHost) -> None:
        """Starts commands again that have ended, on this host and on those that nobody disturbs."""
        with self._tending:
            for one in self.hosts:
                if one.name in self.commands and (one is host or one.name not in self.disturbed):
                    self._tend_command(one)

    def _tend_command(self, host: NetworkHost) -> None:
        """Notes why the command has ended, unless nothing else could be."""
        command = self.commands[host.name]
        if (status := command.started.popen.poll()) is None:
            return
        if host is self.first:
            self.problems.append(f"the run ended by itself with status {status}: {tail(command.said)}")
            self.resume_run()
            return
        if (words := find_rightful_end(command)) is not None:
            self._ended_by_design[words] += 1
        else:
            self.problems.append(
                f"the fleet of {host.name} ended by itself with status {status}: {tail(command.said)}"
            )
        self.start_fleet(host)

    def end_command(self, host: NetworkHost, *, within_s: float = PATIENCE_S) -> int | None:
        """Waits until the host's command has ended; returns its exit status, None where it has not ended."""
        deadline = time.monotonic() + within_s
        popen = self.commands[host.name].started.popen
        while popen.poll() is None and time.monotonic() < deadline:
            self.sleep(0.05)
        return popen.returncode

    # ---- processes

    def find_roles(self, host: NetworkHost, role: str) -> list[psutil.Process]:
        """Returns the processes of a class of roles on a host, the oldest first."""
        found = [one for one in host.list_processes() if is_named(one, f"ray::{role}")]
        return sorted(found, key=lambda process: process.pid)

    def find_role(self, host: NetworkHost, role: str) -> psutil.Process:
        """Returns a process of the role as soon as there is one."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = self.find_roles(host, role)
            return bool(found)

        self.wait_for(host, look, f"{role} on {host.name}")
        return found[0]

    def list_left(self, host: NetworkHost) -> list[str]:
        """Returns what the run has on a host: processes but for the nursery's, and shared memory."""
        of_nursery = self._find_nursery(host)
        left = [f"/dev/shm/{name}" for name in host.list_shared_memory()]
        for process in host.list_processes():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getpgid(process.pid) not in of_nursery:
                    left.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        return left

    def _find_nursery(self, host: NetworkHost) -> set[int]:
        """Returns the process groups of the host's nursery. Each worker that it forks has a group of its
        own."""
        nursery, _ = self._nurseries[host.name]
        groups = set()
        if nursery.popen.poll() is None:
            for process in (nursery.process, *nursery.process.children()):
                with contextlib.suppress(OSError):
                    groups.add(os.getpgid(process.pid))
        return groups

    def await_end(self, host: NetworkHost, what: str, within_s: float = 60.0) -> None:
        """Waits until nothing of the run is left on a host; what stays is a problem."""
        began = time.monotonic()
        while (left := self.list_left(host)) and time.monotonic() < began + within_s:
            self.sleep(0.2)
        self._longest_end_s = max(self._longest_end_s, time.monotonic() - began)
        if left:
            self.problems.append(f"left on {host.name} {within_s:.0f} s after {what}: {left}")

    # ---- waiting

    def sleep(self, seconds: float) -> None:
        """Sleeps. Raises HarnessStopped when the harness was told to stop meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.stopped:
                raise HarnessStopped
            time.sleep(min(left, 0.2))

    def wait_for(self, host: NetworkHost, holds: Callable[[], object], what: str) -> None:
        """Waits, and tends the host meanwhile. Raises ChaosFailure when it takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            self.tend(host)
            if time.monotonic() > deadline:
                raise ChaosFailure(f"no {what} within {PATIENCE_S:.0f} s: {self.describe()}")
            self.sleep(0.05)

    def await_work(self, host: NetworkHost, generator: str) -> None:
        """Returns when a group that was leased from now on, to a generator whose name begins so, has been
        accepted, and a step was trained after that. The host is tended meanwhile; where its fleet is started
        again, any generator of the new one counts."""
        place, fleet = self.find_log_end(), self.commands[host.name]
        leases, is_accepted, is_trained = set[int](), False, False

        def look() -> bool:
            nonlocal generator, place, is_accepted, is_trained
            if self.commands[host.name] is not fleet and host is not self.first:
                generator = f"{host.name}-"
            found, place = self.log.read_since(place)
            for event in found:
                match event:
                    case e.Leased(lease=lease, generator=name) if name.startswith(generator):
                        leases.add(lease)
                    case e.Accepted(lease=lease):
                        is_accepted = is_accepted or lease in leases
                    case e.Trained():
                        is_trained = is_trained or is_accepted
            return is_trained

        self.wait_for(host, look, f"step with a group of {generator or 'any generator'}")

    def await_work_everywhere(self) -> None:
        """Returns when steps are trained from groups of every fleet that were leased from now on, one fleet
        after the other."""
        for host in self.hosts[1:]:
            self.await_work(host, f"{host.name}-")

    def find_log_end(self) -> tuple[int, int]:
        return self.log.read_since((max(self.log.find_files(), default=0), 0))[1]

    def describe(self) -> str:
        """Returns the last words of every command."""
        ends = (f"{name} ({one.output}): {tail(one.said, 300)}" for name, one in self.commands.items())
        return "; ".join(ends)

    # ---- the end

    def finish(self) -> None:
        """Ends the run as Ctrl-C does, and notes what is left. The run's folder is then in `folder`."""
        self.commands[self.first.name].interrupt()
        if (status := self.end_command(self.first)) != 130:
            self.problems.append(
                f"Ctrl-C ended the run with status {status}: {tail(self.commands[self.first.name].said)}"
            )
        for host in self.hosts[1:]:
            if self.end_command(host) is None or not has_rightly_ended(self.commands[host.name]):
                self.problems.append(
                    f"the fleet of {host.name} outlives the run, or ends wrongly: "
                    f"{tail(self.commands[host.name].said)}"
                )
        for nursery, _ in self._nurseries.values():
            nursery.send_signal(signal.SIGTERM)
            nursery.popen.wait()
        for host in self.hosts:
            self.await_end(host, "the end of the run")

    def keep_folder(self) -> None:
        """Copies what is on the disks, which end with their hosts: the run's to `kept`."""
        for host in self.hosts:
            kept = self.folder / ("kept" if host is self.first else f"kept-{host.name}")
            subprocess.run(["cp", "-a", f"{self.find_disk(host)}/.", str(kept)], check=False)

    def count_steps(self) -> int:
        return self.log.count_trained_steps()

    def list_figures(self) -> dict[str, int | str]:
        ends = ", ".join(f"{times} × {words!r}" for words, times in self._ended_by_design.items())
        return {
            "fleets that ended as the pages say": ends or "none",
            "longest wait for the processes of an ended command": f"{self._longest_end_s:.1f} s",
        }


def has_rightly_ended(fleet: CommandOnHost) -> bool:
    return find_rightful_end(fleet) is not None


def find_rightful_end(fleet: CommandOnHost) -> str | None:
    """Returns the words with which a fleet has ended as the pages say; None where it has not."""
    status, said = fleet.started.popen.returncode, fleet.said
    found = (words for words, expected in RIGHTLY_ENDED.items() if words in said and status == expected)
    return next(found, None)


def is_named(process: psutil.Process, title: str) -> bool:
    try:
        return " ".join(process.cmdline()).startswith(title)
    except psutil.Error:
        return False


def tail(said: str, length: int = 600) -> str:
    """Returns the end of what a command has printed, without colours and in one line."""
    return " | ".join(re.sub(r"\x1b\[[0-9;?]*\w", "", said).split("\n"))[-length:].strip(" |")
