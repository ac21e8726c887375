"""A generator that leaves a run says so, also when it was killed: others get its leases at once."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from generator_run import OVERRIDES, GeneratorRun
from runs import ROOT

from buffers import messages as m
from buffers.client import BufferClient
from buffers.driver_messages import RUN_OVER
from buffers.keys import KeyRole, make_keys
from buffers.run_status import RunStatus
from buffers.server import BufferServer
from configs.load import load_config, to_yaml
from generators import worker
from generators.engine import Completion
from generators.episode import SimulatedEpisodes, SimulatedPrompt
from generators.simulated_engine import SimulatedEngine
from generators.task import Score
from generators.user_code.errors import WorkerDied

DRIVER = """
import sys, time
from slipstream.farewell import say_farewell
with say_farewell(*sys.argv[1:3], sys.argv[3:]):
    time.sleep(3600)
"""

ROLE = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
os.environ["RAY_RAYLET_PID"] = str(os.getpid())
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as `node.sh` does in all of Ray's processes
from slipstream.role_division import RolePlace
from slipstream.roles import GeneratorRole

class ToldGenerator:
    grace_s = None
    def leave_within(self, grace_s):
        self.grace_s = grace_s
    def run(self):
        return self.grace_s == 7.0

def join_run(*_, patience_s, **__):
    assert patience_s == 300.0
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException as told:
        print("swallowed", type(told).__name__, flush=True)
    return ToldGenerator()

sys.modules["generators.joining"] = SimpleNamespace(join_run=join_run)  # which imports engines
role = GeneratorRole("g", Path(sys.argv[1]), None, False, 7.0, 300.0)
place = RolePlace()
os._exit(0 if role.run("nowhere", "g", 0, None, place, False) else 1)
"""
"""A generator's process that gets SIGTERM while a library starts its engine, which catches all
exceptions."""


@contextmanager
def serve_buffer(folder: Path, *overrides: str) -> Iterator[BufferServer]:
    config = load_config([*OVERRIDES, *overrides])
    server = BufferServer(config, folder / "journal", config_text=to_yaml(config))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)


def fetch_status(client: BufferClient) -> RunStatus:
    return client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status


def wait_for(find: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def ignores_sigterm(process: psutil.Process) -> bool:
    (ignored,) = re.findall(r"SigIgn:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(int(ignored, 16) >> signal.SIGTERM - 1 & 1)


def test_a_driver_that_was_killed_leaves_somebody_who_says_farewell_for_its_generators(
    tmp_path: Path,
) -> None:
    """One of them has joined, the other one has not. A signal to all processes of a job changes nothing."""
    keys = tmp_path / "keys"
    make_keys(keys, list(KeyRole))
    with serve_buffer(tmp_path, f"buffer.keys={keys}") as server:
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, server.address, keys, "joined", "never"])
        client = BufferClient(server.address, keys=str(keys))
        client.call(m.JoinRun(generator="joined"), m.JoinedRun)
        client.call(m.JoinRun(generator="other"), m.JoinedRun)
        (farewell,) = wait_for(lambda: psutil.Process(driver.pid).children())
        wait_for(lambda: ignores_sigterm(farewell))
        farewell.send_signal(signal.SIGTERM)
        driver.kill()
        driver.wait()
        wait_for(lambda: list(fetch_status(client).roles) == ["other"])
        wait_for(lambda: not farewell.is_running())
        client.close()


def test_a_generator_leaves_although_a_library_that_starts_its_engine_swallows_what_the_signal_raises(
    tmp_path: Path,
) -> None:
    process = subprocess.run([sys.executable, "-c", ROLE, tmp_path], cwd=ROOT, timeout=300)
    log = (tmp_path / "g.log").read_text()
    assert process.returncode == 0 and "swallowed ToldToLeave" in log and "g has left: SIGTERM" in log, log


class StoppedEngine(SimulatedEngine):
    """Its process is told to end when it has sampled, as Ray tells it: with SystemExit."""

    def step(self) -> list[Completion]:
        if sum(self.count_sampled_tokens().values()) > 20:
            raise SystemExit("The process receives a SIGTERM.")
        return super().step()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_groups_of_a_generator_that_is_told_to_stop_do_not_count_as_failed(tmp_path: Path) -> None:
    engine = StoppedEngine(tokens_per_s=500, slots=16, mean_tokens=100, cv=0.1)
    config = load_config([*OVERRIDES, "buffer.max_attempts=1"])
    run = GeneratorRun(config, tmp_path, SimulatedEpisodes(), engine=engine)
    run.publish_version(0)
    run.threads[1].join(60)
    status = run.close()
    assert status.groups.rejected["failed"] == 0 and not status.quarantined
    assert status.groups.rejected["returned"] > 0, "they are to be had again"


class GatedEngine(SimulatedEngine):
    """Finishes nothing before its gate opens."""

    def __init__(self) -> None:
        super().__init__(tokens_per_s=2000, slots=64, mean_tokens=6, cv=0.5)
        self.gate = threading.Event()

    def step(self) -> list[Completion]:
        if not self.gate.wait(0.005):
            return []
        return super().step()


class OrphanedEpisodes(SimulatedEpisodes):
    """The processes of their task's code are killed when the event is set."""

    def __init__(self) -> None:
        self.killed = threading.Event()

    async def score_tokens(self, prompt: SimulatedPrompt, tokens: list[int]) -> Score:
        while not self.killed.is_set():
            await asyncio.sleep(0.01)
        raise WorkerDied("was killed by SIGTERM")


class WaitingEpisodes(SimulatedEpisodes):
    """Their tool never answers."""

    async def score_tokens(self, prompt: SimulatedPrompt, tokens: list[int]) -> Score:
        await asyncio.sleep(3600)
        raise AssertionError


def hold_leases(run: GeneratorRun, num_begun: int) -> None:
    """Waits until the generator has begun so many groups."""
    groups = run.generators[0]._groups
    wait_for(lambda: len(groups.lease_ids) - len(groups.waiting_ids) == num_begun)


def test_a_generator_that_is_told_to_leave_hands_in_what_it_has_begun_and_returns_the_rest_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BEGIN_S", 1e9)  # it would return them for that, too
    config = load_config([*OVERRIDES, "staleness.max_versions=1", "generators.max_sequences=24"])
    engine = GatedEngine()
    run = GeneratorRun(config, tmp_path, SimulatedEpisodes(), engine=engine)
    run.publish_version(0)
    hold_leases(run, 8)
    run.client.call(m.PublishVersion(version=1, manifest_locator="nowhere"), m.Acknowledged)
    wait_for(lambda: len(run.generators[0]._groups.waiting_ids) == 4)
    run.generators[0].leave_within(600)
    status = run.wait_for(lambda status: status.groups.rejected.get("returned") == 4)
    assert status.groups.in_flight == 8 and run.threads[1].is_alive()
    engine.gate.set()
    run.threads[1].join(60)
    status = run.wait_for(lambda status: not status.generators or "g0" not in status.roles)
    assert len(run.train_step(0)) == 4
    status = run.close()
    assert (status.groups.total, status.groups.trained, status.groups.in_flight) == (12, 4, 4)
    assert {reason for reason, number in status.groups.rejected.items() if number} == {"returned"}
    assert status.tokens.total == status.tokens.trained + status.tokens.in_flight


def test_a_group_whose_environment_ends_before_its_generator_has_left_has_not_failed(tmp_path: Path) -> None:
    """A host that ends sends SIGTERM to all processes, also to those of the task's code."""
    episodes = OrphanedEpisodes()
    run = GeneratorRun(load_config([*OVERRIDES, "buffer.max_attempts=1"]), tmp_path, episodes)
    run.publish_version(0)
    groups = run.generators[0]._groups
    wait_for(lambda: groups.is_playing and groups.activity == "scoring")
    run.generators[0].leave_within(600)
    wait_for(lambda: groups._is_leaving)
    episodes.killed.set()
    run.threads[1].join(60)
    status = run.wait_for(lambda status: "g0" not in status.roles)
    assert status.groups.rejected["returned"] == status.groups.total > 0 and not status.quarantined
    run.close()


@pytest.mark.parametrize("holdup", ["engine", "tool", "buffer"])
def test_a_generator_leaves_when_its_grace_is_over_whatever_holds_it_up(tmp_path: Path, holdup: str) -> None:
    engine, episodes = GatedEngine(), WaitingEpisodes() if holdup == "tool" else SimulatedEpisodes()
    run = GeneratorRun(load_config(OVERRIDES), tmp_path, episodes, engine=engine)
    run.publish_version(0)
    hold_leases(run, 8)
    if holdup == "tool":
        engine.gate.set()
        wait_for(lambda: not engine.num_unfinished)
    elif holdup == "buffer":
        run.server.stop()
        run.threads[0].join(60)
        engine.gate.set()
    began = time.monotonic()
    run.generators[0].leave_within(0.5)
    run.threads[1].join(60)
    assert not run.threads[1].is_alive() and time.monotonic() - began >= 0.5
    if holdup != "buffer":
        run.wait_for(lambda status: "g0" not in status.roles)
        groups = run.read_status().groups
        assert groups.rejected["returned"] == groups.total == 8, "all are to be had again"
        run.server.stop()
    run.threads[0].join(60)
    run.client.close()
    run.publisher.close()


def test_a_fleet_hears_of_the_end_of_the_run_while_it_starts(tmp_path: Path) -> None:
    with serve_buffer(tmp_path) as server:
        command = ["scripts/launch.sh", "role=generators", f"buffer.address={server.address}"]
        command += [f"run.outputs={tmp_path}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        fleet = subprocess.Popen(command, cwd=ROOT, **pipes)
        first = fleet.stdout.readline()
        client = BufferClient(server.address)
        client.call(m.StopRun(reason="SIGTERM"), m.Acknowledged)
        out, _ = fleet.communicate(timeout=300)
        assert "is at step 0; starting 2 generators" in first
        sentence = "the run has ended before its last step (SIGTERM): start this again when it is resumed\n"
        assert (fleet.returncode, out) == (1, sentence), "so that it is started again"
        server.buffer.stopping = RUN_OVER
        late = subprocess.run(command, cwd=ROOT, timeout=300, **pipes)
        assert (late.returncode, late.stdout) == (0, "the run is over\n"), "and it starts none afterwards"
        client.close()
