"""Keys have roles, can be taken away while everything runs, and let nobody in when whoever checks them is
dead."""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import zmq
from buffer_harness import SMALL_RUN
from runs import SIMULATED, StartedRun

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, KeysRefused, RefusedByBuffer
from buffers.journal import read_groups
from buffers.keys import (
    RELOAD_S,
    REQUEST_ROLES,
    Authenticator,
    KeyRole,
    make_keys,
    show_key,
    start_authenticator,
)
from buffers.run_status import GeneratorReport
from buffers.server import BufferServer
from configs.load import load_config

Connect = Callable[..., BufferClient]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", list(KeyRole))
    return tmp_path / "keys"


class Served:
    def __init__(self, folder: Path, journal: Path) -> None:
        self.server = BufferServer(load_config([*SMALL_RUN, f"buffer.keys={folder}"]), journal)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except RuntimeError as error:
            self.error = error


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Iterator[Served]:
    running = Served(folder, tmp_path / "journal")
    yield running
    running.server.stop()
    running.thread.join(timeout=30)
    assert not running.thread.is_alive()


@pytest.fixture
def connect(served: Served, folder: Path) -> Iterator[Connect]:
    clients: list[BufferClient] = []

    def make(role: KeyRole, keys: Path = folder, timeout_s: float = 30.0) -> BufferClient:
        clients.append(BufferClient(served.server.address, timeout_s=timeout_s, keys=str(keys), role=role))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def wait_until(holds: Callable[[], object], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


REQUESTS: list[m.Request] = [
    m.JoinRun(generator="g"),
    m.LeaveRun(generator="g"),
    m.RequestLeases(generator="g", count=1, wait_s=0.0),
    m.GeneratorHeartbeat(generator="g", progress={}, report=GeneratorReport()),
    m.SubmitGroups(generator="g", leases=[1], rows=[1], schema=1),
    m.SubmitEvaluation(
        generator="g", lease=1, rewards=[0.0], num_tokens=0, oldest_version=0, newest_version=0
    ),
    m.FailLease(generator="g", lease=1, num_tokens=0, error="e"),
    m.ListParcels(),
    m.ReadParcelPart(parcel="model", file=0, offset=0, size=0),
    m.LocateJournal(),
    m.RequestBatch(step=0, wait_s=0.0),
    m.ReadBatchPart(segment=0, offset=0, size=0),
    m.ReportDamagedGroups(groups=[0]),
    m.PublishVersion(version=0, manifest_locator="w"),
    m.ReportTrainedStep(step=0, num_trained=0, idle_s=0.0, alive_s=0.0, metrics={}),
    m.ReportCheckpoint(step=0, oldest=0),
    m.RewindToStep(step=0),
    m.SubmitParityProbe(generator="g", manifest_locator="w"),
    m.RequestParityProbe(wait_s=0.0),
    m.AwaitEvaluations(wait_s=0.0),
    m.WatchRun(after=0, wait_s=0.0),
    m.WatchGenerators(generators=["g"], wait_s=0.0),
    m.StopRun(reason="r"),
]


KILLED = """
import os, sys
from pathlib import Path
from buffers.keys import KeyRole, make_keys
from zmq import auth

def make_until_killed(folder, num_steps):
    left = num_steps

    def count(event, arguments):
        nonlocal left
        if event in ("open", "os.rename") and folder in str(arguments[0]):
            left -= 1
            if left < 0:
                os._exit(9)

    sys.addaudithook(count)
    make_keys(Path(folder), list(KeyRole))
    os._exit(0)

for num_steps in range(1000):
    folder = Path(sys.argv[1]) / str(num_steps)
    folder.mkdir()
    if (pid := os.fork()) == 0:
        make_until_killed(str(folder), num_steps)
    _, status = os.waitpid(pid, 0)
    make_keys(folder, list(KeyRole))
    for role in KeyRole:
        public, secret = auth.load_certificate(folder / f"{role}.key_secret")
        assert secret is not None, (num_steps, role)
        for path in (folder / f"{role}.key", folder / "allowed" / role / f"{role}.key"):
            assert auth.load_certificate(path)[0] == public, (num_steps, path)
    if status == 0:
        print(num_steps)
        break
"""


def test_keys_that_were_half_made_when_their_maker_was_killed_are_made_anew(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= 3 * len(KeyRole), "it was killed at every step"


def test_every_request_has_roles_that_may_send_it() -> None:
    assert set(get_args(m.Request)) == set(REQUEST_ROLES)
    assert all(REQUEST_ROLES.values())


@pytest.mark.parametrize("role", KeyRole)
def test_a_key_may_send_what_its_role_sends_and_nothing_else(connect: Connect, role: KeyRole) -> None:
    client = connect(role)
    for request in REQUESTS:
        said = f"{type(request).__name__} must not be sent with the key of a {role}"
        try:
            client.exchange(request)
            forbidden = False
        except RefusedByBuffer as error:
            forbidden = said in str(error)
        assert forbidden == (role not in REQUEST_ROLES[type(request)]), request


def test_a_generators_key_cannot_publish_stop_or_rewind(connect: Connect, served: Served) -> None:
    generator, operator = connect(KeyRole.generator), connect(KeyRole.operator)
    for request in (
        m.PublishVersion(version=0, manifest_locator="w"),
        m.StopRun(reason="r"),
        m.RewindToStep(step=0),
    ):
        with pytest.raises(RefusedByBuffer, match="must not be sent with the key of a generator"):
            generator.exchange(request)
    status = operator.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status
    assert (
        status.version == -1
        and status.refused_requests == {"forbidden": 3}
        and served.server.buffer.stopping is None
    )


def test_a_key_that_is_deleted_is_shut_out_within_a_second_on_open_connections_too(
    connect: Connect, folder: Path, served: Served
) -> None:
    generator, learner = connect(KeyRole.generator), connect(KeyRole.learner)
    generator.call(m.JoinRun(generator="g"), m.JoinedRun)
    assert RELOAD_S <= 0.5
    generator.send_request(m.RequestLeases(generator="g", count=9, wait_s=600.0))
    wait_until(lambda: served.server._waiting_room.lease_requests)
    (folder / "allowed" / "generator" / "generator.key").unlink()
    wait_until(lambda: not served.server._waiting_room.lease_requests)
    assert not list(generator.receive_answers(0.2)), "the question was forgotten, not answered"
    learner.call(
        m.PublishVersion(version=0, manifest_locator="w"), m.Acknowledged
    )  # would answer the question
    with pytest.raises(KeysRefused, match="it has refused this client's"):
        for _ in range(20):
            generator.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
    with pytest.raises(KeysRefused):
        connect(KeyRole.generator).call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
    status = learner.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status
    assert status.refused_requests["revoked key"] == 1 and status.groups.total == 0, "no lease went to it"


def test_a_key_that_is_added_is_let_in_without_a_restart(
    connect: Connect, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(folder, ["generator:other"])
    machine = tmp_path / "machine"
    machine.mkdir(mode=0o700)
    shutil.copy(folder / "server.key", machine)
    for suffix in ("key", "key_secret"):
        shutil.copy(folder / f"other.{suffix}", machine / f"generator.{suffix}")
    connect(KeyRole.generator, machine).call(m.JoinRun(generator="other"), m.JoinedRun)
    (folder / "allowed" / "watcher" / "broken.key").write_text("no key at all")
    wait_until(lambda: "nobody is let in by" in caplog.text)
    connect(KeyRole.generator).call(m.JoinRun(generator="g"), m.JoinedRun)


def test_when_the_authenticator_dies_nobody_gets_in_and_the_server_ends_with_its_traceback(
    connect: Connect, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(KeyRole.watcher).call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)

    def die(*_: object) -> list[bytes]:
        raise OSError("a disk has gone")

    monkeypatch.setattr(Authenticator, "_answer_question", die)
    with pytest.raises((BufferGone, KeysRefused)):
        connect(KeyRole.watcher, timeout_s=1.0).call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
    served.thread.join(timeout=30)
    assert not served.thread.is_alive() and "the thread that lets clients in has died" in str(served.error)
    assert isinstance(served.error, RuntimeError) and "a disk has gone" in str(served.error.__cause__)


def test_a_socket_whose_authenticator_is_dead_lets_nobody_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, client = context.socket(zmq.ROUTER), zmq.Context.instance().socket(zmq.DEALER)
    for socket in (server, client):
        socket.setsockopt(zmq.LINGER, 0)
    door = start_authenticator(server, folder)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    door.close()  # its socket is gone, as after its death
    show_key(client, folder)
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send(b"let me in")
    assert not server.poll(1000)
    client.close()
    server.close()
    context.term()


def test_keys_of_a_folder_without_roles_are_not_let_in(folder: Path, tmp_path: Path) -> None:
    for path in (folder / "allowed").glob("*/*.key"):
        path.rename(folder / "allowed" / path.name)
    with pytest.raises(ValueError, match="public key of at least one client in `allowed/ROLE`"):
        BufferServer(load_config([*SMALL_RUN, f"buffer.keys={folder}"]), tmp_path / "journal")
    with pytest.raises(
        ValueError, match="ROLE or ROLE:NAME with one of generator, learner, watcher, operator, got 'king'"
    ):
        make_keys(folder, ["king"])


@pytest.mark.timeout(500)
def test_a_run_with_keys_is_one_command_and_a_machine_joins_it_with_a_generators_pair(
    start: Callable[..., StartedRun], folder: Path, tmp_path: Path
) -> None:
    make_keys(folder, ["generator:machine"])
    machine = tmp_path / "machine"
    machine.mkdir(mode=0o700)
    shutil.copy(folder / "server.key", machine)
    for suffix in ("key", "key_secret"):
        shutil.copy(folder / f"machine.{suffix}", machine / f"generator.{suffix}")
    run = start(*SIMULATED, "run.steps=1000", "generators.count=1", f"buffer.keys={folder}")
    run.wait_for(lambda: run.steps() >= 1, "first step", timeout_s=180)
    address = re.search(r"tcp://\S+", (run.folder / "logs" / "buffer.log").read_text())
    assert address is not None
    joined = start(
        "role=generators", "generators.count=1", f"buffer.address={address[0]}", f"buffer.keys={machine}"
    )

    def makers() -> set[str]:
        return {
            name
            for batch in read_groups(run.folder / "journal")
            for name in batch.column("generator").to_pylist()
        }

    run.wait_for(lambda: len(makers()) == 2, "group from the machine that joined", timeout_s=150)
    (folder / "allowed" / "generator" / "machine.key").unlink()
    code, out = joined.finish()
    assert code == 1 and "buffer.keys must hold a key that the buffer" in out, out
    run.process.send_signal(signal.SIGINT)
    code, out = run.finish()
    assert code == 130 and "the run has failed" not in out, out
    log = (run.folder / "logs" / "buffer.log").read_text()
    assert "revoked key" in log and "forbidden" not in log


def test_generators_whose_buffer_refuses_them_end_with_a_sentence(
    served: Served,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The key is taken away between two questions of the command that has started them."""
    from slipstream import answers, generator_fleet
    from slipstream.stop_signals import StopSignals

    # There is no Ray here, and a question to it would start one.
    monkeypatch.setattr(answers, "check_this_node", lambda: None)

    def wait_for_results(refs: list[object], *_: object) -> list[object]:
        (folder / "allowed" / "generator" / "generator.key").unlink(missing_ok=True)
        time.sleep(1.0)
        return []

    fleet_class = generator_fleet.GeneratorFleet
    monkeypatch.setattr(generator_fleet, "wait_for_results", wait_for_results)
    monkeypatch.setattr(generator_fleet, "run_cluster", lambda config: contextlib.nullcontext())
    places = SimpleNamespace(read_log_end=str, end_roles=lambda: None)
    monkeypatch.setattr(generator_fleet, "RolePlaces", lambda *_: places)
    monkeypatch.setattr(
        fleet_class, "_launch_generators", lambda self, places: {"a reference": self._names[0]}
    )
    overrides = [
        f"buffer.address={served.server.address}",
        f"buffer.keys={folder}",
        f"run.outputs={tmp_path}",
    ]
    fleet = fleet_class(load_config([*SMALL_RUN, *overrides]), StopSignals())
    assert fleet.drive() == 1
    assert re.search("revoked|not allowed any more|must hold a key", capsys.readouterr().err)
