"""Connections cost a server bounded memory, file descriptors and names, whoever holds their other ends."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import psutil
import pytest
import zmq
from buffer_harness import SMALL_RUN, BufferHarness
from raw_clients import open_raw_client

from buffers import messages as m
from buffers.client import BufferClient
from buffers.connections import BorrowedDescriptor, Connection, Connections, watch_small_requests
from buffers.keys import WEIGHT_REQUEST_ROLES, KeyRole, make_keys, show_key, start_authenticator
from sync.transports import messages
from sync.transports.server import SnapshotServer

ROOT = Path(__file__).parents[1]


def wait_until(condition: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# ---- messages that do not end

SERVE = """
import sys, zmq
from buffers.connections import watch_small_requests
server = zmq.Context().socket(zmq.ROUTER)
watch = watch_small_requests(server, encrypted=False, max_unread=1 << 30)
print(server.bind_to_random_port("tcp://127.0.0.1"), flush=True)
while True:
    drained = not server.poll(50)
    if not drained:
        watch.count(server.recv_multipart(copy=False))
    for _ in watch.shut_down_unfinished(drained=drained):
        print("ended", flush=True)
"""


def test_the_memory_of_messages_that_do_not_end_is_given_back() -> None:
    """Frames of 4 kB are freed one by one, and the C library keeps their pages where nobody gives them
    back."""
    server = subprocess.Popen([sys.executable, "-c", SERVE], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        memory = psutil.Process(server.pid).memory_info
        frame = (b"\x03" + (4000).to_bytes(8, "big") + bytes(4000)) * 16
        before = memory().rss
        for _ in range(4):
            stranger = open_raw_client(port)
            stranger.settimeout(2.0)
            with pytest.raises(OSError):
                for _ in range((400 << 20) // len(frame)):
                    stranger.sendall(frame)
            stranger.close()
            assert server.stdout.readline() == "ended\n"
        wait_until(
            lambda: memory().rss < before + (24 << 20),
            f"{(memory().rss - before) >> 20} MiB are kept",
            within_s=10,
        )
    finally:
        server.kill()
        server.wait()


def test_the_limit_on_all_unfinished_messages_holds_while_a_flood_lasts() -> None:
    """The server never comes to the end of what has come; nobody sends more than a message may have."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, flooder, large = (
        context.socket(zmq.ROUTER),
        context.socket(zmq.DEALER),
        context.socket(zmq.DEALER),
    )
    limits = {"max_message": 64 << 20, "max_waiting": 4, "max_total": 30 << 20, "max_unread": 1 << 30}
    server.setsockopt(zmq.RCVHWM, 4)
    connections = Connections(server, encrypted=False, **limits)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    for client in (flooder, large):
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://127.0.0.1:{port}")
    strangers = [open_raw_client(port) for _ in range(4)]
    frame, ended, came = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20), list[int](), 0
    deadline = time.monotonic() + 60
    while not ended and time.monotonic() < deadline:
        for stranger in strangers:
            if came < 10 * 4:
                stranger.sendall(frame)
                came += 1
        large.send(bytes(8 << 20), zmq.NOBLOCK) if large.poll(0, zmq.POLLOUT) else None
        for _ in range(100):
            flooder.send(b"x")
        for _ in range(100):
            connections.count(server.recv_multipart(copy=False))
        ended += connections.shut_down_unfinished(drained=False)
    assert came == 40 and ended and all(left > (9 << 20) for left in ended), (
        "they are ended, not those whose messages come whole"
    )
    assert sum(ended) >= 10 << 20 and len(ended) < 4, "no more than had to be"
    for stranger in strangers:
        stranger.close()
    connections.close()
    context.destroy(linger=0)


# ---- numbers

LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from buffers.server import BufferServer
from configs.load import load_config
server = BufferServer(load_config(sys.argv[2:]), Path(sys.argv[1]))
print(server.address, flush=True)
server.run()
"""


def test_more_connections_than_a_process_may_have_do_not_stop_the_buffer(tmp_path: Path) -> None:
    """Silent ones, three times as many as there are file descriptors: the honest go on, and newcomers are let
    in."""
    with open(tmp_path / "log", "w") as log:
        command = [sys.executable, "-c", LIMITED, str(tmp_path / "journal"), *SMALL_RUN]
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    crowd: list[socket.socket] = []
    try:
        address = server.stdout.readline().strip()
        port = int(address.rpartition(":")[2])
        honest = BufferClient(address, timeout_s=20.0)
        honest.call(m.PublishVersion(version=0, manifest_locator="w"), m.Acknowledged)
        for number in range(600):
            crowd.append(socket.create_connection(("127.0.0.1", port), timeout=20.0))
            if number % 50 == 0:
                honest.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
        newcomer = BufferClient(address, timeout_s=20.0)
        newcomer.call(m.JoinRun(generator="g"), m.JoinedRun)
        assert newcomer.call(m.RequestLeases(generator="g", count=1, wait_s=5.0), m.LeaseGrant).leases
        wait_until(lambda: psutil.Process(server.pid).num_fds() < 160, "file descriptors are free again")
        refused = honest.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status.refused_requests
        assert refused["too many connections"] >= 400 and server.poll() is None, (
            tmp_path / "log"
        ).read_text()
        honest.close()
        newcomer.close()
    finally:
        for one in crowd:
            one.close()
        server.kill()
        server.wait()


def test_many_who_come_at_once_need_not_try_twice(tmp_path: Path) -> None:
    """The server stands still meanwhile: the kernel lets them in, until the server accepts them."""
    allowed = int(Path("/proc/sys/net/core/somaxconn").read_text())
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "journal"), *SMALL_RUN]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    crowd: list[socket.socket] = []
    try:
        port = int(server.stdout.readline().strip().rpartition(":")[2])
        server.send_signal(signal.SIGSTOP)
        for _ in range(min(500, allowed)):
            crowd.append(socket.create_connection(("127.0.0.1", port), timeout=20.0))
    finally:
        for one in crowd:
            one.close()
        server.kill()
        server.wait()


def test_the_kernel_is_asked_about_a_few_connections_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns, and none is left out."""
    monkeypatch.setattr("buffers.connections.MAX_LOOKS", 3)
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    connections = watch_small_requests(server, encrypted=False, max_unread=1 << 30)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    crowd = [open_raw_client(port) for _ in range(8)]
    asked = list[int]()
    ask_kernel = connections._borrowed.ask_kernel
    monkeypatch.setattr(
        connections._borrowed, "ask_kernel", lambda fd, one: (asked.append(fd), ask_kernel(fd, one))[1]
    )
    connections._read_events()
    wait_until(lambda: (connections._read_events(), len(connections._open))[1] == 8, "all are accepted")
    for num_asked in (3, 6, 8, 11):
        assert not connections.shut_down_unfinished(drained=True) and not connections.shut_down_deaf()
        assert len(asked) == num_asked
    assert set(asked[:8]) == set(connections._open)
    crowd[-1].sendall(b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(64 << 10))
    wait_until(
        lambda: connections.shut_down_unfinished(drained=True) or connections._num_unfinished > 60 << 10,
        "what the last one leaves unfinished is counted",
    )
    for one in crowd:
        one.close()
    connections.close()
    context.destroy(linger=0)


def test_who_has_taken_its_answers_since_the_last_look_is_not_ended() -> None:
    context = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    connections = watch_small_requests(server, encrypted=False, max_unread=1000)
    client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
    client.send(b"question")
    asked = server.recv_multipart(copy=False)
    connections.count(asked)
    connections.shut_down_unfinished(drained=True)
    answer = [asked[0].bytes, bytes(5000)]
    server.send_multipart(answer)
    connections.count_sent(answer)
    client.recv()
    ((descriptor, connection),) = connections._open.items()
    wait_until(
        lambda: connections._borrowed.ask_kernel(descriptor, connection)[0] >= 5000, "the answer is taken"
    )
    assert connection.num_sent - connection.num_acked > 1000, "what the last look has seen"
    assert not connections.shut_down_deaf() and connections._open
    connections.close()
    context.destroy(linger=0)


def test_a_connection_is_ended_when_the_process_has_no_file_descriptor_left() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    connections = watch_small_requests(server, encrypted=False, max_unread=1 << 30)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    stranger = open_raw_client(port)
    connections.shut_down_unfinished(drained=True)
    (descriptor,) = connections._open
    taken, limits = list[int](), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 20, limits[1]))
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        assert connections.shut_down(descriptor)
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert stranger.recv(100) == b"", "it is ended"
    stranger.close()
    connections.close()
    context.destroy(linger=0)


def test_a_descriptor_that_is_a_files_by_now_is_left_alone() -> None:
    loan, gone = BorrowedDescriptor(), Connection(inode=7, num_read=3, num_sent=4)
    with open(os.devnull) as file:
        assert loan.ask_kernel(file.fileno(), gone) == (4, 3)
        loan.shut_down(file.fileno(), gone)
    assert loan.ask_kernel(10**6, gone) == (4, 3), "and one that is closed"
    loan.close()


def test_the_kernel_asks_silent_connections_whether_they_are_there(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness()
    run.status()
    for descriptor in run.server._connections._open:
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            assert [accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [15, 5, 3]
    assert run.server._connections._open


def test_learners_whose_connection_has_ended_are_forgotten(harness: Callable[..., BufferHarness]) -> None:
    run = harness()
    run.publish(0)
    for life in range(30):
        learner = BufferClient(run.server.address, timeout_s=5.0)
        learner.call(m.RequestBatch(step=0, wait_s=0.0), m.NotReadyYet)
        if life % 10 == 0:
            run.client.call(m.RewindToStep(step=0), m.Acknowledged)
            run.publish(0)
        learner.close()
    wait_until(
        lambda: len(run.server._learners._current | run.server._learners._outdated) <= 2,
        "only those who are there are remembered",
    )
    wait_until(lambda: not run.server._connections._gone, "and nobody who is gone")


# ---- readers of weights


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Callable[..., SnapshotServer]]:
    servers: list[SnapshotServer] = []
    folder = tmp_path / "weights"
    folder.mkdir()
    with open(folder / "v0-life.safetensors", "wb") as file:
        file.truncate(64 << 20)

    def serve(keys: Path | None = None) -> SnapshotServer:
        watch = partial(
            watch_small_requests, encrypted=keys is not None, max_unread=messages.MAX_UNREAD_BYTES
        )
        door = None if keys is None else (lambda socket: start_authenticator(socket, keys))
        servers.append(SnapshotServer(folder, secure=door, watch=watch))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def ask_for_a_window(port: int) -> socket.socket:
    """A host that has asked for as much as a puller asks for at a time, and has little room for what
    comes."""
    connection = open_raw_client(port, room=128 << 10)
    for number in range(8):
        body = messages.encode(
            messages.GetChunk("v0-life.safetensors", number * messages.CHUNK_BYTES, messages.CHUNK_BYTES)
        )
        connection.sendall(b"\x00" + bytes([len(body)]) + body)
    return connection


def test_a_host_that_never_reads_its_weights_is_ended_and_a_slow_one_is_not(
    weights: Callable[..., SnapshotServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffers.connections.UNREAD_S", 4.0)
    server = weights()
    port = int(server.address.rpartition(":")[2])
    deaf, slow = ask_for_a_window(port), ask_for_a_window(port)
    began, num_bytes = time.monotonic(), 0
    while time.monotonic() - began < 9.0:
        num_bytes += len(slow.recv(1 << 15))
        time.sleep(max(0.0, began + num_bytes / 1e6 - time.monotonic()))  # 1 MB/s
    assert 7e6 < num_bytes < 10e6 and server.refused == {"unread answers": 1}
    with pytest.raises(OSError):  # what had reached it, and then the end
        while deaf.recv(1 << 20):
            pass
        raise OSError("ended")
    assert slow.recv(1 << 15), "it goes on"
    deaf.close()
    slow.close()


def test_whoever_asks_for_more_than_it_reads_loses_its_connection(
    weights: Callable[..., SnapshotServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_UNREAD_BYTES", 40 << 20)
    server = weights()
    port = int(server.address.rpartition(":")[2])
    greedy = ask_for_a_window(port)
    assert not server.refused
    body = messages.encode(messages.GetChunk("v0-life.safetensors", 0, 64 << 20))
    greedy.sendall(b"\x00" + bytes([len(body)]) + body)
    wait_until(lambda: server.refused["unread answers"] == 1, "it is ended")
    greedy.close()


REQUESTS: list[messages.Request] = [
    messages.GetChunk("v0-life.safetensors", 0, 10),
    messages.GetPatchRoute("v1-life", "v0-life"),
    messages.EnlistRelay("v0-life.json", "tcp://10.0.0.7:5555"),
    messages.RequestBroadcast("v0-life", "0123456789abcdef"),
]


def test_every_request_for_weights_has_roles_that_may_send_it() -> None:
    assert (
        {kind.__name__ for kind in get_args(messages.Request)}
        == set(WEIGHT_REQUEST_ROLES)
        == {type(r).__name__ for r in REQUESTS}
    )


@pytest.mark.parametrize("role", KeyRole)
def test_weights_are_for_keys_of_generators(
    weights: Callable[..., SnapshotServer], tmp_path: Path, role: KeyRole
) -> None:
    make_keys(tmp_path / "keys", list(KeyRole))
    server = weights(tmp_path / "keys")
    asker = zmq.Context.instance().socket(zmq.DEALER)
    show_key(asker, tmp_path / "keys", role)
    asker.connect(server.address)
    for request in REQUESTS:
        asker.send(messages.encode(request))
        assert asker.poll(20_000)
        reply = messages.replies.decode(asker.recv_multipart()[0])
        said = f"{type(request).__name__} must not be sent with the key of a {role}"
        assert (isinstance(reply, messages.TransferRefused) and said in reply.reason) == (
            role is not KeyRole.generator
        ), reply
    assert server.refused["forbidden"] == (0 if role is KeyRole.generator else len(REQUESTS))
    asker.close(linger=0)
