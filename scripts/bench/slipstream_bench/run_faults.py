"""The faults of `chaos_run.py`: each disturbs one host of a run, and returns when the run has got over it."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream_bench.network_hosts import NetworkHost
from slipstream_bench.run_on_hosts import ChaosFailure, RunOnHosts, has_rightly_ended, tail

PAGE = 4096
PREEMPTED_S = 30.0
"""Seconds between the warning of a host that is taken away, and its end."""
ROLES = ("BufferRole", "LearnerRole", "GeneratorRole")
SIGHT_S = 60.0
"""Seconds within which a disturbance must show. The kernel needs a moment, of a machine that is not busy."""
BURST_BYTES = 1 << 17
"""Bytes that a slow link lets through at once, and those that were under way: far more than there are."""


class FaultNotDone(RuntimeError):
    """Raised when the host does not show what was to be done to it: no recovery is to count then."""


@dataclass
class HostFaults:
    """The faults of one host. Each method returns the moment from which its recovery counts: that of a death,
    or of the end of a disturbance. It raises FaultNotDone where the host shows no disturbance."""

    run: RunOnHosts
    host: NetworkHost
    lease_s: float
    random: random.Random
    victim: str = ""
    """Beginning of the names of the generators whose work shows the recovery; empty: any."""

    def disturb(self, method: "FaultMethod") -> float:
        """Returns the moment from which the recovery counts."""
        self.victim = "" if self.host is self.run.first else f"{self.host.name}-"
        return method(self)

    # ---- on the host of the run

    def kill_buffer(self) -> float:
        return kill_process(self.run.find_role(self.host, "BufferRole"))

    def kill_learner(self) -> float:
        return kill_process(self.choose_rank())

    def stop_buffer_briefly(self) -> float:
        return self.stop_process(self.run.find_role(self.host, "BufferRole"), self.draw_short())

    def stop_buffer_for_longer_than_a_lease(self) -> float:
        return self.stop_process(self.run.find_role(self.host, "BufferRole"), self.draw_long())

    def stop_learner(self) -> float:
        return self.stop_process(self.choose_rank(), self.random.choice([self.draw_short, self.draw_long])())

    def fill_disk(self) -> float:
        """Leaves no room: the run must end with a sentence, and go on once there is some."""
        filler = self.run.outside / "filler"
        began = time.monotonic()
        try:
            fill_with(filler)
            self.await_failure("a full disk", "must have room for")
        finally:
            filler.unlink()
        self.start_again("a full disk")
        return began

    # ---- on the host of a fleet

    def kill_generator(self) -> float:
        return kill_process(self.choose_generator())

    def stop_generator_briefly(self) -> float:
        return self.stop_process(self.choose_generator(), self.draw_short())

    def stop_generator_for_longer_than_a_lease(self) -> float:
        return self.stop_process(self.choose_generator(), self.draw_long())

    def preempt_fleet(self) -> float:
        """SIGTERM, and SIGKILL half a minute later: the fleet must have left by then."""
        command, began = self.run.commands[self.host.name], time.monotonic()
        command.started.send_signal(signal.SIGTERM)
        status = self.run.end_command(self.host, within_s=PREEMPTED_S)
        if status != 130 and not has_rightly_ended(command):
            self.run.problems.append(f"SIGTERM ended a fleet with status {status}: {tail(command.said)}")
            command.started.send_signal(signal.SIGKILL)
            self.run.end_command(self.host)
        self.start_again("a preemption")
        return began

    # ---- on any host

    def cut_link_briefly(self) -> float:
        return self.cut_link(self.draw_short())

    def cut_link_for_longer_than_a_lease(self) -> float:
        return self.cut_link(self.draw_long())

    def cut_link_for_half_a_minute(self) -> float:
        return self.cut_link(self.random.uniform(31, 38))

    def slow_link_to_a_megabit(self) -> float:
        return self.slow_link(1_000_000)

    def slow_link_to_100_kilobits(self) -> float:
        return self.slow_link(100_000)

    def set_clock(self) -> float:
        clock = self.run.clocks[self.host.name]
        clock.set_ahead(self.random.uniform(-3600, 3600))
        for role in (one for name in ROLES for one in self.run.find_roles(self.host, name)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                if not clock.is_read_by(role):
                    raise FaultNotDone(f"{role} reads another clock than its host's")
        return time.monotonic()

    def kill_driver(self) -> float:
        began = kill_process(self.run.commands[self.host.name].started.process)
        if self.run.end_command(self.host) is None:
            raise FaultNotDone(f"the command of {self.host.name} goes on without its driver")
        self.start_again("the death of the driver")
        return began

    def kill_raylet(self) -> float:
        """Kills Ray's own process on the host: the driver must end by itself, with a sentence."""
        raylets = [one for one in self.host.list_processes() if one.name() == "raylet"]
        if not raylets:
            raise ChaosFailure(f"there is no raylet on {self.host.name}: {self.run.describe()}")
        began = kill_process(raylets[0])
        self.await_failure("the death of the raylet", "has died")
        self.start_again("the death of the raylet")
        return began

    # ---- what they are made of

    def await_failure(self, what: str, sentence: str) -> None:
        """Waits until the host's command has ended; it must have failed, and must have said why."""
        status, command = self.run.end_command(self.host), self.run.commands[self.host.name]
        if status is None:
            raise ChaosFailure(f"{self.host.name} goes on after {what}: {self.run.describe()}")
        # A fleet may have ended just before, because its run has.
        may_have_ended = self.host is not self.run.first and has_rightly_ended(command)
        if (status != 1 or sentence not in command.said) and not may_have_ended:
            said = tail(command.said)
            self.run.problems.append(f"{what} ended {self.host.name} with status {status}: {said}")

    def start_again(self, what: str) -> None:
        """Starts the host's command again, once nothing of it is left."""
        self.run.await_end(self.host, what)
        if self.host is self.run.first:
            self.run.resume_run()
        else:
            self.run.start_fleet(self.host)

    def draw_short(self) -> float:
        return self.random.uniform(0.5, 0.7 * self.lease_s)

    def draw_long(self) -> float:
        return self.random.uniform(1.2, 1.7) * self.lease_s

    def choose_rank(self) -> psutil.Process:
        """Chooses a rank of the learner."""
        first = self.run.find_role(self.host, "LearnerRole")
        return self.random.choice(self.run.find_roles(self.host, "LearnerRole") or [first])

    def choose_generator(self) -> psutil.Process:
        """Chooses a generator of the host's fleet, which must be at work again itself."""
        found: dict[str, psutil.Process] = {}

        def look() -> bool:
            roles = self.run.find_roles(self.host, "GeneratorRole")
            # Until it writes its own log, a process has no name.
            found.update({name: one for one in roles if (name := name_role(one)).startswith(self.victim)})
            return bool(found)

        self.run.wait_for(self.host, look, f"generator on {self.host.name}")
        self.victim = self.random.choice(sorted(found))
        return found[self.victim]

    def stop_process(self, process: psutil.Process, seconds: float) -> float:
        process.suspend()
        try:
            await_sight(lambda: is_stopped(process), f"{process} goes on after SIGSTOP")
            self.run.sleep(seconds)
            if not is_stopped(process):
                raise FaultNotDone(f"{process} was continued by somebody else")
        finally:
            process.resume()
        return time.monotonic()

    def cut_link(self, seconds: float) -> float:
        self.run.hosts.cut_link(self.host)
        try:
            for other in self.run.hosts:
                if other is not self.host and self.host.reaches(other):
                    raise FaultNotDone(f"{self.host.name} reaches {other.name} over a link that is down")
            self.run.sleep(seconds)
        finally:
            self.run.hosts.mend_link(self.host)
        return time.monotonic()

    def slow_link(self, bits_per_s: int) -> float:
        self.run.hosts.limit_link(self.host, bits_per_s)
        began, before = time.monotonic(), self.host.count_received_bytes()
        try:
            self.run.sleep(self.random.uniform(5, 15))
            most = bits_per_s / 8 * (time.monotonic() - began) + BURST_BYTES
            if (received := self.host.count_received_bytes() - before) > most:
                raise FaultNotDone(f"{received} bytes came over a link that lets {most:.0f} through")
        finally:
            self.run.hosts.limit_link(self.host, None)
        return time.monotonic()


FaultMethod = Callable[[HostFaults], float]
FAULTS_OF_RUN: dict[str, FaultMethod] = {
    "buffer: SIGKILL": HostFaults.kill_buffer,
    "buffer: SIGSTOP, shorter than a lease": HostFaults.stop_buffer_briefly,
    "buffer: SIGSTOP, longer than a lease": HostFaults.stop_buffer_for_longer_than_a_lease,
    "learner: SIGKILL": HostFaults.kill_learner,
    "learner: SIGSTOP": HostFaults.stop_learner,
    "run's driver: SIGKILL, then run.resume": HostFaults.kill_driver,
    "run's raylet: SIGKILL, then run.resume": HostFaults.kill_raylet,
    "run's disk full, then run.resume": HostFaults.fill_disk,
    "run's link down, longer than a lease": HostFaults.cut_link_for_longer_than_a_lease,
    "run's link down for more than 30 s": HostFaults.cut_link_for_half_a_minute,
    "run's link at 1 Mbit/s": HostFaults.slow_link_to_a_megabit,
    "run's host: clock set, up to an hour off": HostFaults.set_clock,
}
FAULTS_OF_FLEET: dict[str, FaultMethod] = {
    "generator: SIGKILL": HostFaults.kill_generator,
    "generator: SIGSTOP, shorter than a lease": HostFaults.stop_generator_briefly,
    "generator: SIGSTOP, longer than a lease": HostFaults.stop_generator_for_longer_than_a_lease,
    "fleet's driver: SIGKILL, then started again": HostFaults.kill_driver,
    "fleet's raylet: SIGKILL, then started again": HostFaults.kill_raylet,
    "fleet preempted (SIGTERM, 30 s, SIGKILL), then started again": HostFaults.preempt_fleet,
    "fleet's link down, shorter than a lease": HostFaults.cut_link_briefly,
    "fleet's link down, longer than a lease": HostFaults.cut_link_for_longer_than_a_lease,
    "fleet's link down for more than 30 s": HostFaults.cut_link_for_half_a_minute,
    "fleet's link at 1 Mbit/s": HostFaults.slow_link_to_a_megabit,
    "fleet's link at 100 kbit/s": HostFaults.slow_link_to_100_kilobits,
    "fleet's host: clock set, up to an hour off": HostFaults.set_clock,
}


def fill_with(filler: Path) -> None:
    """Makes a file that takes what is left of its disk."""
    size, place = 64 << 20, 0
    with open(filler, "wb") as file:
        while size >= PAGE:
            try:
                os.posix_fallocate(file.fileno(), place, size)
                place += size
            except OSError:
                size //= 2


def name_role(process: psutil.Process) -> str:
    """Returns the name of a role, by the log file that its process writes; empty for one that has ended."""
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem
    return ""


def kill_process(process: psutil.Process) -> float:
    """Kills a process; returns when that was."""
    process.kill()
    died = time.monotonic()
    await_sight(lambda: has_died(process), f"{process} goes on after SIGKILL")
    return died


def await_sight(shows: Callable[[], bool], otherwise: str) -> None:
    """Waits until something shows. Raises FaultNotDone where it does not."""
    deadline = time.monotonic() + SIGHT_S
    while not shows():
        if time.monotonic() > deadline:
            raise FaultNotDone(otherwise)
        time.sleep(0.005)


def has_died(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_stopped(process: psutil.Process) -> bool:
    """True while SIGSTOP holds. Raises NoSuchProcess for a process that has died."""
    if has_died(process):
        raise psutil.NoSuchProcess(process.pid)
    return process.status() == psutil.STATUS_STOPPED
