"""A short run of `scripts/bench/chaos_run.py`: real roles over two hosts get over what is done to them, the
audit can fail, and so can a fault."""

import copy
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console
from test_chaos import rewrite_log

from buffers import events as e
from buffers.ledger import Ledger
from chaos_run import (
    SETTINGS,
    ChaosOfRun,
    Ending,
    RunSettings,
    draw_settings,
    find_sameness,
    print_recoveries,
)
from configs.load import load_study_config
from slipstream_bench.audit import audit_whole_run
from slipstream_bench.host_clocks import HostClock, find_compiler
from slipstream_bench.network_hosts import NetworkHosts, find_obstacle
from slipstream_bench.noise import find_noise
from slipstream_bench.run_faults import FAULTS_OF_FLEET, FAULTS_OF_RUN, FaultNotDone, HostFaults

needs_hosts = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())
OVERRIDES = [
    "staleness.max_versions=2", "buffer.lease_s=4", "learner.checkpoint_every=5", "learner.groups_per_step=2",
    "learner.samples_per_prompt=4",
]  # fmt: skip
OF_RUN = ["buffer: SIGKILL", "learner: SIGKILL", "run's driver: SIGKILL, then run.resume"]
OF_FLEET = ["generator: SIGKILL", "fleet's driver: SIGKILL, then started again"]


@pytest.mark.whole_run
@needs_hosts
def test_a_run_whose_roles_are_killed_on_every_host_loses_nothing_and_is_what_its_journal_says(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_run = {name: FAULTS_OF_RUN[name] for name in OF_RUN}
    of_fleet = {name: FAULTS_OF_FLEET[name] for name in OF_FLEET}
    said: list[str] = []
    chaos = ChaosOfRun(tmp_path / "chaos", 0, 1, 5, 1, of_run, of_fleet, False, said.append)
    chaos.settings = RunSettings(OVERRIDES, ["generators.count=1"], lease_s=4.0)
    chaos.disturb_and_audit()
    assert chaos.problems == []
    assert len(chaos.recoveries) == len(said) == 5
    assert int(chaos.figures["groups acknowledged to producers"]) > 10
    assert "bit for bit the same" in str(chaos.figures["replayed"])
    assert_audit_can_fail(tmp_path / "chaos", monkeypatch)


def assert_audit_can_fail(witnesses: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits the folder of a whole run again and again, each time with another lie in it."""
    run = witnesses / "kept" / "run"
    summary = json.loads((run / "summary.json").read_text())

    def audit(summary: dict[str, Any], witnesses: Path = witnesses, bound: int | None = None) -> list[str]:
        config = load_study_config(run, [])
        if bound is not None:
            config.staleness.max_versions = bound
        return audit_whole_run(run, witnesses, config, summary).problems

    assert audit(summary) == []
    (witnesses / "another.acknowledged").write_text("123456789 999999\n")
    assert audit(summary) == ["acknowledged group 999999 (lease 123456789) is lost"]
    (witnesses / "another.acknowledged").unlink()
    assert "the generators wrote down 0 of" in " ".join(audit(summary, run))
    # All tokens are then too old.
    assert "that steps were handed were more than `max_versions`" in " ".join(audit(summary, bound=-1))

    wrong = copy.deepcopy(summary)
    for name in ("trained", "leased"):
        wrong["groups"][name] += 1
    assert [text.partition(":")[0] for text in audit(wrong)] == ["groups leased", "groups trained"]

    def give_up(events: list[e.AnyEvent]) -> list[e.AnyEvent]:
        place = next(place for place, event in enumerate(events) if isinstance(event, e.Accepted))
        group = events[place].group  # type: ignore[union-attr]
        return [*events[: place + 1], e.Rejected(group, "damaged"), *events[place + 1 :]]

    before = shutil.copytree(run, witnesses / "before")
    rewrite_log(run, give_up)
    assert "was accepted and given up as damaged" in " ".join(audit(summary))
    shutil.rmtree(run)
    before.rename(run)
    rewrite_log(run, lambda events: events)  # without the states, which know better
    with monkeypatch.context() as broken:
        broken.setattr(Ledger, "count_lease", lambda ledger: None)
        assert "leases; the log has granted" in " ".join(audit(summary))


def test_a_replay_that_compares_no_checkpoint_of_the_last_step_proves_nothing() -> None:
    said = "trained 12 steps\nbit for bit the same as the run in its checkpoints of steps 5, 10, 12\n"
    assert find_sameness(said, 12) and find_sameness(said, None)
    assert not find_sameness(said, 13) and not find_sameness(said, 2)
    assert not find_sameness("NOT the same as the run: 3 tensors differ, the first is step 12", 12)


def test_so_many_runs_as_a_setting_has_values_try_all_of_them() -> None:
    most = max(map(len, SETTINGS.values()))
    drawn = [draw_settings(3, number).overrides for number in range(most)]
    for values in SETTINGS.values():
        assert all(any(set(value) <= set(overrides) for overrides in drawn) for value in values)


def test_where_no_run_was_audited_nobody_says_that_all_adds_up() -> None:
    console = Console(file=io.StringIO(), record=True)
    print_recoveries([], console)
    assert console.export_text() == "no run was audited\n"


def test_no_fault_begins_after_a_signal_or_the_time_given_and_a_second_signal_ends_all() -> None:
    ending = Ending()
    assert not ending.has_come()
    ending.note_signal()
    assert ending.has_come()
    with pytest.raises(KeyboardInterrupt):
        ending.note_signal()
    assert Ending(minutes=0).has_come() and not Ending(minutes=10).has_come()


# ---- a fault that is not done


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[NetworkHosts]:
    with NetworkHosts(2) as hosts:
        yield hosts


def make_faults(hosts: Any, two_hosts: NetworkHosts, **more: Any) -> HostFaults:
    """Returns the faults of the second host, which end in a moment. `hosts` does what is done to links."""
    run = SimpleNamespace(hosts=hosts, sleep=lambda seconds: time.sleep(0.3), **more)
    return HostFaults(run, two_hosts[1], 4.0, random.Random(0))  # type: ignore[arg-type]


class IdleHosts:
    """Two hosts, to whose links nothing is done."""

    def __init__(self, hosts: NetworkHosts) -> None:
        self._hosts = hosts

    def __iter__(self) -> Iterator[Any]:
        return iter(self._hosts)

    def cut_link(self, host: Any) -> None: ...
    def mend_link(self, host: Any) -> None: ...
    def limit_link(self, host: Any, bits_per_s: int | None) -> None: ...


@needs_hosts
def test_a_link_that_is_cut_lets_nothing_through_and_one_that_is_not_cut_is_no_fault(
    two_hosts: NetworkHosts,
) -> None:
    make_faults(two_hosts, two_hosts).cut_link(1.0)
    assert two_hosts[1].reaches(two_hosts[0], timeout_s=30)
    with pytest.raises(FaultNotDone, match="over a link that is down"):
        make_faults(IdleHosts(two_hosts), two_hosts).cut_link(1.0)


@needs_hosts
def test_a_slow_link_lets_little_through_and_one_that_is_not_slow_is_no_fault(
    two_hosts: NetworkHosts,
) -> None:
    flood = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"while True: s.sendto(bytes(1400), ('{two_hosts[1].address}', 9))"
    )
    two_hosts[0].start_program(sys.executable, "-c", flood, output=subprocess.DEVNULL)
    before, deadline = two_hosts[1].count_received_bytes(), time.monotonic() + 60
    while two_hosts[1].count_received_bytes() < before + 1_000_000 and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        make_faults(two_hosts, two_hosts).slow_link(100_000)
        with pytest.raises(FaultNotDone, match="came over a link that lets"):
            make_faults(IdleHosts(two_hosts), two_hosts).slow_link(100_000)
    finally:
        for process in two_hosts[0].list_processes():
            process.kill()


def keep_going(process: psutil.Process) -> Callable[[float], None]:
    return lambda seconds: process.send_signal(18)


@needs_hosts
def test_a_process_that_somebody_continues_was_not_stopped_for_that_long(two_hosts: NetworkHosts) -> None:
    started = two_hosts[1].start_program("sleep", "1000")
    faults = make_faults(two_hosts, two_hosts)
    faults.run.sleep = lambda seconds: None  # type: ignore[method-assign]
    for _ in range(50):  # what has sent the program to its host continues it at no other time
        faults.stop_process(started.process, 1.0)
        assert started.process.status() != psutil.STATUS_STOPPED
    faults.run.sleep = keep_going(started.process)  # type: ignore[method-assign]
    with pytest.raises(FaultNotDone, match="continued by somebody else"):
        faults.stop_process(started.process, 1.0)
    started.process.kill()
    assert started.popen.wait(30) != 0  # what has sent the program goes on too, and sees its end


@needs_hosts
@pytest.mark.skipif(find_compiler() is None, reason="no clock can be set without a compiler")
def test_a_clock_that_a_role_does_not_read_was_not_set(two_hosts: NetworkHosts, tmp_path: Path) -> None:
    clock = HostClock(tmp_path, two_hosts[1].name)
    wait = (sys.executable, "-c", "print(flush=True); import time; time.sleep(1000)")
    started = [two_hosts[1].start_program(*wait, environment=one) for one in (clock.environment, {})]
    right, wrong = [one.process for one in started if one.popen.stdout and one.popen.stdout.readline()]
    found = [right]
    run = {"clocks": {two_hosts[1].name: clock}, "find_roles": lambda host, role: found}
    make_faults(two_hosts, two_hosts, **run).set_clock()
    found.append(wrong)
    with pytest.raises(FaultNotDone, match="reads another clock"):
        make_faults(two_hosts, two_hosts, **run).set_clock()
    for process in (right, wrong):
        process.kill()


@needs_hosts
@pytest.mark.skipif(find_compiler() is None, reason="no disk is slow without a compiler")
def test_a_slow_disk_holds_up_each_fsync_of_a_host_and_counts_them(tmp_path: Path) -> None:
    clock = HostClock(tmp_path, "host-1")
    code = (
        "import os, time; file = os.open('file', os.O_CREAT | os.O_WRONLY); began = time.monotonic()\n"
        "os.fsync(file); os.fdatasync(file); print(time.monotonic() - began)"
    )

    def sync_twice() -> float:
        command = [sys.executable, "-c", code]
        environment = os.environ | clock.environment
        return float(subprocess.check_output(command, cwd=tmp_path, env=environment, text=True))

    sync_twice()
    assert clock.count_delayed_syncs() == 0
    clock.delay_syncs(0.5)
    assert sync_twice() >= 1.0 and clock.count_delayed_syncs() == 2
    clock.delay_syncs(0)
    sync_twice()
    assert clock.count_delayed_syncs() == 2


@needs_hosts
def test_a_host_that_stands_still_does_nothing_until_it_goes_on(two_hosts: NetworkHosts) -> None:
    host = two_hosts[1]
    count = "import time\nwhile True: print(1, flush=True); time.sleep(0.01)"
    started = host.start_program(sys.executable, "-c", count)
    program, output = started.process, started.popen.stdout
    assert output is not None and output.readline()
    faults, seen = make_faults(two_hosts, two_hosts), list[str]()
    faults.run.sleep = lambda seconds: seen.append(program.status())  # type: ignore[method-assign]
    faults.stop_host()
    assert seen == [psutil.STATUS_STOPPED] and program.status() != psutil.STATUS_STOPPED
    program.kill()
    assert started.popen.wait(30) != 0  # what has sent the program goes on too, and sees its end


@needs_hosts
def test_full_shared_memory_takes_no_more_and_has_room_again_afterwards(two_hosts: NetworkHosts) -> None:
    host, write = two_hosts[1], ("sh", "-c", "head -c 100000 /dev/zero > /dev/shm/more")

    def write_and_go_on(host: Any, within_s: float) -> None:
        with pytest.raises(subprocess.SubprocessError, match="No space left"):
            two_hosts[1].run(*write)
        two_hosts[1].run("rm", "/dev/shm/more")

    more = {"commands": {host.name: None}, "end_command": write_and_go_on}
    make_faults(two_hosts, two_hosts, **more).fill_shared_memory()
    assert host.list_shared_memory() == []
    host.run(*write)
    host.run("rm", "/dev/shm/more")


def test_a_console_with_a_traceback_and_a_log_with_a_busy_loop_are_noise(tmp_path: Path) -> None:
    console, log = tmp_path / "001-run.txt", tmp_path / "buffer.log"
    console.write_text("step 3\nthe disk must have room\n")
    lines = [f"2026-11-24 11:00:{second:02},123 INFO slipstream: a line\n" for second in range(60)]
    log.write_text("".join(lines * 3))
    assert find_noise([console], [log]) == []
    console.write_text("Traceback (most recent call last):\n")
    log.write_text("".join(lines[:1] * 3000 + lines[1:]))
    assert [text[:40] for text in find_noise([console], [log])] == [
        "a traceback on the console 001-run.txt, ", "buffer.log has 3000 lines of one second,",
    ]  # fmt: skip
