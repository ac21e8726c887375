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

from slipstream.stop_signals import KILLED
from slipstream_bench.network_hosts import NetworkHost
from slipstream_bench.run_on_hosts import ChaosFailure, RunOnHosts, has_rightly_ended, tail

PAGE = 4096
PREEMPTED_S = 30.0
"""Seconds between the warning of a host that is taken away, and its end."""
ROLES = ("BufferRole", "LearnerRole", "GeneratorRole")
SIGHT_S = 60.0
"""Seconds within which a disturbance must show. The kernel needs a moment, of a machine that is not busy."""
SENDER = "nsenter"
"""Name of the program by which commands are sent to a host."""
SLOW_DISK_S = 8.0
"""Seconds for which a disk is slow at least."""
STARTING_S = 12.0
"""Seconds within which a command that starts is ended: it needs about as many on a busy machine."""
SHARED_BYTES = 4 << 20
"""Bytes of shared memory that are filled: what a run may take in a moment."""
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

    def kill_buffer_while_it_recovers(self) -> float:
        first = self.run.find_role(self.host, "BufferRole")
        kill_process(first)
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = [one for one in self.run.find_roles(self.host, "BufferRole") if one.pid != first.pid]
            return bool(found)

        self.run.wait_for(self.host, look, "another life of the buffer")
        self.run.sleep(self.random.uniform(0, 1))
        return kill_process(found[0])

    def kill_control_store(self) -> float:
        """Kills Ray's process that keeps the cluster's state: the driver must end by itself, with a
        sentence."""
        return self.kill_process_of_ray("gcs_server")

    def delay_syncs(self) -> float:
        """Makes each `fsync` of the host take seconds, until a few have."""
        clock = self.run.clocks[self.host.name]
        before, began = clock.count_delayed_syncs(), time.monotonic()
        clock.delay_syncs(self.random.uniform(1, 4))
        try:
            self.run.wait_for(
                self.host, lambda: clock.count_delayed_syncs() > before + 2, "sync of a file that was slow"
            )
            self.run.sleep(max(0.0, began + SLOW_DISK_S - time.monotonic()))
        finally:
            clock.delay_syncs(0)
        return time.monotonic()

    def scale_generators(self) -> float:
        """Orders another number of the run's own generators: they must work then."""
        self.run.scale_run(self.random.choice([1, 2]))
        self.victim = "generator-"
        return time.monotonic()

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

    def fill_disk_of_fleet(self) -> float:
        """Leaves no room for the fleet's logs, which does not hinder it."""
        filler = self.run.find_disk(self.host) / "filler"
        try:
            fill_with(filler)
            self.run.sleep(self.random.uniform(5, 15))
        finally:
            filler.unlink()
        return time.monotonic()

    # ---- on any host

    def fill_shared_memory(self) -> float:
        """Leaves no room for another version: a fleet, or a run, that ends must say so."""
        filler, began = self.host.find_shared_memory() / "filler", time.monotonic()
        self.host.limit_shared_memory(SHARED_BYTES)
        try:
            fill_with(filler)
            status = self.run.end_command(self.host, within_s=self.random.uniform(5, 15))
        finally:
            self.host.limit_shared_memory(None)
            filler.unlink()
        if status is None:
            return time.monotonic()
        self.await_failure("full shared memory", "must have room for")
        self.start_again("full shared memory")
        return began

    def stop_driver(self) -> float:
        return self.stop_process(
            self.run.commands[self.host.name].started.process,
            self.random.choice([self.draw_short, self.draw_long])(),
        )

    def stop_host(self) -> float:
        """Stops all processes of a host, as one that is moved to another machine."""
        stopped = list[psutil.Process]()
        try:
            # Again: what was not stopped yet may have started others.
            while more := [one for one in self.host.list_processes() if not stand_still(one)]:
                stopped += more
                for process in more:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        suspend(process)
            self.run.sleep(self.draw_long())
        finally:
            for process in stopped:
                go_on(process)
        return time.monotonic()

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

    def end_driver_while_it_starts(self) -> float:
        """Kills the driver, starts it again, and kills it or asks it to end before it has begun."""
        self.kill_driver()
        self.run.sleep(self.random.uniform(0, STARTING_S))
        number = self.random.choice([signal.SIGKILL, signal.SIGTERM])
        command, began = self.run.commands[self.host.name], time.monotonic()
        command.started.send_signal(number)
        status = self.run.end_command(self.host)
        # Before its first lines have run, a program ends by the signal itself.
        if status not in (-number, KILLED) and not has_rightly_ended(command):
            self.run.problems.append(
                f"{number.name} ended a command that starts with status {status}: {tail(command.said)}"
            )
        self.start_again(f"{number.name} while it started")
        return began

    def kill_raylet(self) -> float:
        """Kills Ray's own process on the host: the driver must end by itself, with a sentence."""
        return self.kill_process_of_ray("raylet")

    # ---- what they are made of

    def kill_process_of_ray(self, name: str) -> float:
        found = [one for one in self.host.list_processes() if one.name() == name]
        if not found:
            raise ChaosFailure(f"there is no {name} on {self.host.name}: {self.run.describe()}")
        began = kill_process(found[0])
        self.await_failure(f"the death of the {name}", "has died")
        self.start_again(f"the death of the {name}")
        return began

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
        try:
            suspend(process)
            await_sight(lambda: is_stopped(process), f"{process} goes on after SIGSTOP")
            self.run.sleep(seconds)
            if not is_stopped(process):
                raise FaultNotDone(f"{process} was continued by somebody else")
        finally:
            go_on(process)
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
    "buffer: SIGKILL, and again while it recovers": HostFaults.kill_buffer_while_it_recovers,
    "run's driver: SIGKILL, then run.resume": HostFaults.kill_driver,
    "run's driver: ended while it starts, then run.resume": HostFaults.end_driver_while_it_starts,
    "run's driver: SIGSTOP": HostFaults.stop_driver,
    "run's raylet: SIGKILL, then run.resume": HostFaults.kill_raylet,
    "run's gcs_server: SIGKILL, then run.resume": HostFaults.kill_control_store,
    "run's disk full, then run.resume": HostFaults.fill_disk,
    "run's disk: each fsync takes seconds": HostFaults.delay_syncs,
    "run's /dev/shm full": HostFaults.fill_shared_memory,
    "run's host stands still, longer than a lease": HostFaults.stop_host,
    "run's own generators: scripts/scale.sh": HostFaults.scale_generators,
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
    "fleet's driver: ended while it starts, then started again": HostFaults.end_driver_while_it_starts,
    "fleet's driver: SIGSTOP": HostFaults.stop_driver,
    "fleet's host stands still, longer than a lease": HostFaults.stop_host,
    "fleet's /dev/shm full": HostFaults.fill_shared_memory,
    "fleet's disk full": HostFaults.fill_disk_of_fleet,
    "fleet preempted (SIGTERM, 30 s, SIGKILL), then started again": HostFaults.preempt_fleet,
    "fleet's link down, shorter than a lease": HostFaults.cut_link_briefly,
    "fleet's link down, longer than a lease": HostFaults.cut_link_for_longer_than_a_lease,
    "fleet's link down for more than 30 s": HostFaults.cut_link_for_half_a_minute,
    "fleet's link at 1 Mbit/s": HostFaults.slow_link_to_a_megabit,
    "fleet's link at 100 kbit/s": HostFaults.slow_link_to_100_kilobits,
    "fleet's host: clock set, up to an hour off": HostFaults.set_clock,
}
NEED_COMPILER = (HostFaults.set_clock, HostFaults.delay_syncs)
"""Faults that change what the C library does."""


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


def suspend(process: psutil.Process) -> None:
    """Stops a process, and before it what has sent it to its host.

    nsenter sees that its program is stopped, stops itself, and continues the program as soon as it goes on
    itself (`continue_as_child` of util-linux): a moment after `go_on`, it would end the next stop.
    """
    if (sender := find_sender(process)) is not None:
        sender.suspend()
        await_sight(lambda: stand_still(sender), f"{sender} goes on after SIGSTOP")
    process.suspend()


def go_on(process: psutil.Process) -> None:
    """Continues a process that `suspend` has stopped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()
        if (sender := find_sender(process)) is not None:
            sender.resume()


def find_sender(process: psutil.Process) -> psutil.Process | None:
    """Returns what has sent a command to its host; None for a process that was not sent."""
    sender = process.parent()
    return sender if sender is not None and sender.name() == SENDER else None


def stand_still(process: psutil.Process) -> bool:
    """True for a process that is stopped, or has ended."""
    try:
        return is_stopped(process)
    except psutil.NoSuchProcess:
        return True


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
