"""Weights on a bad day: hostile messages, folders that others made, stuck processes, dead relays, slow
links, full disks."""

import contextlib
import errno
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from weight_ends import fetcher_of, fetching_end, relay_server, server_of

from buffers.keys import Authenticator, KeyRole, make_keys, show_key, start_authenticator
from configs.disk import DiskFull
from sync import folders, locks
from sync.announcement import TransferFailed, announce_version
from sync.extents import ENTRY, Extents
from sync.folders import shared_memory_folder, sweep_folders
from sync.locks import LockTimedOut, hold_lock
from sync.manifest import DigestMismatch, Manifest, parse_manifest
from sync.patch import patch_name
from sync.publisher import Publisher
from sync.snapshot import Snapshot, read_manifest
from sync.stream import whole_parts
from sync.subscriber import Subscriber
from sync.transports import messages, puller
from sync.transports.fetcher import Fetcher
from sync.transports.messages import Chunk, EnlistRelay, FileGone, GetChunk, TransferRefused
from sync.transports.nccl import BroadcastEnd
from sync.transports.puller import Puller
from sync.transports.relay_chains import CHAIN_LENGTH, RelayChains
from sync.transports.server import SnapshotServer
from sync.transports.tcp import FetchingEnd
from sync.weight_source import WeightSource

ROOT = Path(__file__).parents[1]


def make_weights(seed: int, rows: int = 300) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(rows, 256, generator=generator), "b": torch.randn(256, generator=generator)}


def holds_tensors(found: WeightSource, wanted: dict[str, torch.Tensor]) -> bool:
    """Verifies a snapshot, and compares its tensors."""
    assert isinstance(found, Snapshot)
    found.verify_bytes()
    return all(torch.equal(tensor, wanted[name]) for name, tensor in found.named_tensors())


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(puller, "FIRST_BYTES", 1 << 16)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    folder = tmp_path / "weights"
    publisher = Publisher(folder, "life", ends=[SnapshotServer(folder)])
    yield publisher
    publisher.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory that is not made yet. It is removed afterwards, with those of its name beside
    it."""
    folder = shared_memory_folder(f"test-{uuid.uuid4().hex}")
    yield folder
    for left in folder.parent.glob(f"{folder.name}*"):
        if left.is_symlink():
            left.unlink()
        else:
            subprocess.run(["rm", "-rf", str(left)], check=True)


def announce_elsewhere(publisher: Publisher, manifest: Manifest, address: str | None = None) -> str:
    _, _, digest, path = announce_version(manifest).split("#", 3)
    return "#".join((address or server_of(publisher).address, "another host", digest, path))


# ---- messages


@pytest.fixture
def stranger() -> Iterator["zmq.Socket[bytes]"]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    yield socket
    socket.close(linger=0)


NESTED = b"\x91" * 3000 + b"\x90"
HOSTILE = {
    "nested in an unknown field": b"\x95\xa8GetChunk\xacv0-life.json\x00\x0a" + NESTED,
    "nested in a known field": b"\x94\xa8GetChunk" + NESTED + b"\x00\x0a",
    "nested in an unknown message": b"\x92\xa9GetChunks" + NESTED,
    "nested and nothing else": NESTED,
    "not UTF-8": b"\x94\xa8GetChunk\xa2\xff\xfe\x00\x0a",
    "2**64 - 1": msgspec.msgpack.encode(["GetChunk", "v0-life.json", 2**64 - 1, 1]),
    "2**63": msgspec.msgpack.encode(["GetChunk", "v0-life.json", 0, 2**63]),
    "-1": msgspec.msgpack.encode(["GetChunk", "v0-life.json", -1, 1]),
    "a long name": msgspec.msgpack.encode(["GetChunk", "v" * 3000, 0, 1]),
    "a long address": msgspec.msgpack.encode(["EnlistRelay", "v0-life.json", f"tcp://{'x' * 300}:1"]),
    "an address and a line": msgspec.msgpack.encode(["EnlistRelay", "v0-life.json", "tcp://x:1\n"]),
    "to be sent by NCCL": msgspec.msgpack.encode(["RequestBroadcast", "v0-life", "0123456789abcdef"]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_request_is_refused_and_counted_and_the_next_one_is_answered(
    publisher: Publisher, stranger: "zmq.Socket[bytes]", what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr("sync.transports.nccl.NcclLink", lambda host: imported.append("vllm"))
    publisher.publish_version(0, whole_parts(make_weights(0)))
    stranger.connect(server_of(publisher).address)
    stranger.send(HOSTILE[what])
    stranger.send(messages.encode(GetChunk("v0-life.json", 0, 10)))
    assert stranger.poll(20_000) and isinstance(messages.replies.decode(stranger.recv()), TransferRefused)
    assert stranger.poll(20_000) and isinstance(messages.replies.decode(stranger.recv_multipart()[0]), Chunk)
    assert server_of(publisher).refused.total() == 1 and imported == [], (
        "nothing is made ready for NCCL, which imports vLLM"
    )
    publisher.publish_version(1, whole_parts(make_weights(1)))


def test_a_message_of_many_frames_is_refused_and_a_large_one_ends_its_connection_only(
    publisher: Publisher, stranger: "zmq.Socket[bytes]"
) -> None:
    publisher.publish_version(0, whole_parts(make_weights(0)))
    stranger.connect(server_of(publisher).address)
    stranger.send_multipart([b"x" * 4000] * 1000)
    stranger.send(messages.encode(GetChunk("v0-life.json", 0, 10)))
    assert isinstance(messages.replies.decode(stranger.recv()), TransferRefused)
    assert isinstance(messages.replies.decode(stranger.recv_multipart()[0]), Chunk)
    stranger.send(
        b"x" * (messages.MAX_REQUEST_BYTES + 1)
    )  # libzmq cuts the line; the socket connects again by itself
    deadline = time.monotonic() + 30
    while not stranger.poll(200) and time.monotonic() < deadline:
        stranger.send(messages.encode(GetChunk("v0-life.json", 0, 10)))
    assert isinstance(messages.replies.decode(stranger.recv_multipart()[0]), Chunk)


HOSTILE_ANSWERS = HOSTILE | {"no address": b"\x93\xa6Parent\xa1x\xa1y", "nothing": b""}


@pytest.mark.parametrize("what", HOSTILE_ANSWERS)
def test_a_hostile_answer_is_as_none(tmp_path: Path, what: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    evil = context.socket(zmq.ROUTER)
    port = evil.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        sender, _ = evil.recv_multipart()
        evil.send_multipart([sender, HOSTILE_ANSWERS[what]])

    thread = threading.Thread(target=answer)
    thread.start()
    fetcher = Fetcher(tmp_path / "far", timeout_s=0.5)
    with pytest.raises(TransferFailed):
        fetcher.fetch_manifest(f"tcp://127.0.0.1:{port}", "v0-life.json")
    thread.join()
    fetcher.close()
    evil.close(linger=0)
    context.term()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        lambda data: data.replace(b'"num_bytes":', b'"num_bytes":-'),
        lambda data: data.replace(b'"version":0', b'"version":18446744073709551615'),
        lambda data: data.replace(b'"version":0', b'"version":1'),
        lambda data: data.replace(b'"float32"', b'"Tensor"'),
        lambda data: data.replace(b"[300,", b"[-300,"),
        lambda data: data.replace(b'"life"', b'"li\xffe"'),
    ],
    ids=["nested", "negative size", "2**64-1", "another version", "no dtype", "negative shape", "not UTF-8"],
)
def test_a_hostile_manifest_is_a_mismatch(publisher: Publisher, change: Callable[[bytes], bytes]) -> None:
    data = Path(publisher.publish_version(0, whole_parts(make_weights(0))).locator).read_bytes()
    parse_manifest(data, "it", "v0-life")
    assert change(data) != data
    with pytest.raises(DigestMismatch, match="^it "):
        parse_manifest(change(data), "it", "v0-life")


def test_a_server_thread_that_dies_ends_its_publisher_and_its_relay(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = Subscriber(FetchingEnd(Fetcher(tmp_path / "far", timeout_s=3), SnapshotServer))
    announced = announce_elsewhere(publisher, publisher.publish_version(0, whole_parts(make_weights(0))))
    far.prepare_version(announced)

    def die(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(SnapshotServer, "_take_request", die)
    assert relay_server(far) is not None
    for one in (server_of(publisher), relay_server(far)):
        asking: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        asking.connect(one.address)
        asking.send(b"")
        one._thread.join(20)
        asking.close(linger=0)
    with pytest.raises(RuntimeError, match="has died") as ended:
        publisher.publish_version(1, whole_parts(make_weights(1)))
    assert isinstance(ended.value.__cause__, ZeroDivisionError), "with the traceback of what was the cause"
    with pytest.raises(RuntimeError, match="has died"):
        far.prepare_version(announced)
    far.close()


def test_a_server_with_keys_sees_a_revoked_key_on_an_open_connection_and_the_death_of_its_door(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, ["generator", "learner"])
    server = SnapshotServer(folder, secure=lambda socket: start_authenticator(socket, keys))
    publisher = Publisher(folder, "life", ends=[server])
    name = Path(publisher.publish_version(0, whole_parts(make_weights(0))).path).name
    show = {
        role: lambda socket, role=role: show_key(socket, keys, role)
        for role in (KeyRole.generator, KeyRole.learner)
    }
    puller, stranger = Puller(show[KeyRole.generator]), Puller(show[KeyRole.learner])
    assert puller.read_file(server.address, name, 1 << 20, 20.0)
    (keys / "allowed" / "generator" / "generator.key").unlink()
    deadline = time.monotonic() + 20
    with pytest.raises(TransferFailed, match="refuses"):
        while time.monotonic() < deadline:
            puller.ask_server(server.address, GetChunk(name, 0, 1), 20.0)

    def die(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Authenticator, "_answer_question", die)
    with pytest.raises(TransferFailed):
        stranger.ask_server(server.address, GetChunk(name, 0, 1), 0.5)
    server._thread.join(20)
    with pytest.raises(RuntimeError, match="has died") as ended:
        publisher.check_alive()
    assert ended.value.__cause__ is not None and isinstance(
        ended.value.__cause__.__cause__, ZeroDivisionError
    )
    for one in (puller, stranger, publisher):
        one.close()


# ---- what was announced


def test_a_snapshot_and_manifest_swapped_together_are_noticed_whichever_way_they_come(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    far = Subscriber(FetchingEnd(Fetcher(tmp_path / "far", timeout_s=3)))
    nccl = Subscriber(BroadcastEnd(Fetcher(tmp_path / "nccl", timeout_s=3)))
    for announced in (publisher.announce_version(manifest), announce_version(manifest)):
        assert holds_tensors(Subscriber().prepare_version(announced), make_weights(0))
    other = Publisher(tmp_path / "other", "life")
    swapped = other.publish_version(0, whole_parts(make_weights(1)))
    for name in (manifest.path, manifest.locator):
        os.replace(Path(swapped.path).parent / Path(name).name, name)
    other.close()
    (
        read_manifest(manifest.locator),
        Snapshot(read_manifest(manifest.locator)).verify_bytes(),
    )  # a pair that fits
    for subscriber, announced in (
        (Subscriber(), publisher.announce_version(manifest)),
        (Subscriber(), announce_version(manifest)),
        (far, announce_elsewhere(publisher, manifest)),
        (nccl, announce_elsewhere(publisher, manifest)),
    ):
        with pytest.raises(DigestMismatch, match="was announced"):
            subscriber.prepare_version(announced)
    for subscriber in (far, nccl):
        subscriber.close()


def test_a_file_put_in_the_place_of_a_sealed_one_is_noticed(publisher: Publisher, tmp_path: Path) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    Subscriber().prepare_version(announce_version(manifest))
    damaged = bytearray(Path(manifest.path).read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    os.replace(tmp_path / "damaged", manifest.path)
    with pytest.raises(DigestMismatch, match="1 of 2 tensors"):
        Subscriber().prepare_version(announce_version(manifest))


@pytest.mark.parametrize(
    "announced", ["", "w", "/dev/shm/x/v0-life.json", "a#b#c#d", f"##{'0' * 32}#/etc/passwd"]
)
def test_what_is_no_announcement_is_a_version_that_is_not_to_be_had(announced: str) -> None:
    with pytest.raises(TransferFailed, match="must be announced as"):
        Subscriber().prepare_version(announced)


# ---- folders


def test_a_folder_in_shared_memory_is_private(folder: Path) -> None:
    before = os.umask(0)
    try:
        publisher = Publisher(folder, "life")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    publisher.close()


def make_link(folder: Path) -> None:
    folder.with_name(f"{folder.name}-real").mkdir()
    folder.symlink_to(folder.with_name(f"{folder.name}-real"))


def make_strangers(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give a folder to another user")
    folder.mkdir()
    os.chown(folder, 12345, -1)


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (make_link, "a link"),
        (make_strangers, "user 12345"),
        (lambda folder: (folder.mkdir(), folder.chmod(0o777)), "mode 0777"),
        (lambda folder: (folder.mkdir(), folder.chmod(0o770)), "mode 0770"),
    ],
    ids=["link", "stranger", "0777", "0770"],
)
def test_a_folder_that_someone_else_made_or_may_write_to_is_refused(
    folder: Path, make: Callable[[Path], None], got: str
) -> None:
    make(folder)
    for use in (lambda: Publisher(folder, "life"), Fetcher(folder).open_folder):
        with pytest.raises(ValueError, match=rf"^{folder} must be a folder that belongs to user .*{got}"):
            use()
    announced = f"##{'0' * 32}#{folder}/v0-life.json"
    with pytest.raises(ValueError, match=f"^{folder} must be"):
        Subscriber().prepare_version(announced)


def test_folders_without_owner_are_swept_when_they_are_old_and_unlocked_and_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("empty", "claimed", "locked", "young", "users")
    empty, claimed, locked, young, users = made = [
        folder.with_name(f"{folder.name}-{name}") for name in names
    ]
    for one in made:
        one.mkdir()
    (claimed / "owner.4711").touch()
    (claimed / "v3-life.safetensors").write_bytes(b"x")
    (users / "thesis.tex").touch()
    with hold_lock(locked / "lock", "is at it"):
        for one in made:
            for path in (*one.iterdir(), one):
                if one != young:
                    os.utime(path, (time.time() - folders.ORPHANED_S - 60,) * 2)
        assert {one for one in sweep_folders(folder.parent) if one in made} == {empty, claimed}
    assert [one.exists() for one in made] == [False, False, True, True, True]


# ---- locks

HOLD = """
import sys, time
from pathlib import Path
from sync.locks import hold_lock
with hold_lock(Path(sys.argv[1]), "does something long") as lock:
    print(flush=True)
    while True:
        time.sleep(0.02)
        lock.note_progress()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_a_stopped_holder_is_named_after_a_deadline_that_its_progress_puts_off(
    holder: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    def take() -> float:
        began = time.monotonic()
        says = f"locked by process {holder.pid}, which does something long, which has made no"
        with pytest.raises(LockTimedOut, match=says), hold_lock(tmp_path / "lock", "waits", patience_s=3):
            pass
        return time.monotonic() - began

    stop = threading.Timer(4, holder.send_signal, [signal.SIGSTOP])
    stop.start()
    assert take() > 6, "as long as it made progress it was not given up"
    holder.send_signal(signal.SIGKILL)
    with hold_lock(tmp_path / "lock", "has it", patience_s=20):
        pass


FETCH = """
import sys
from pathlib import Path
from sync.transports import fetcher, puller, messages
messages.CHUNK_BYTES = puller.FIRST_BYTES = 1 << 12
print(flush=True)
print(fetcher.Fetcher(Path(sys.argv[1])).fetch_version(sys.argv[2], sys.argv[3]), flush=True)
"""


class SlowServer(SnapshotServer):
    def _make_reply(self, request: object) -> tuple[object, list[memoryview]]:  # type: ignore[override]
        time.sleep(0.04)
        return super()._make_reply(request)  # type: ignore[arg-type]


def test_a_process_stopped_in_the_middle_of_a_fetch_does_not_stop_its_host(
    publisher: Publisher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    slow = SlowServer(publisher.folder)
    stopped = subprocess.Popen(
        [sys.executable, "-c", FETCH, str(folder), slow.address, Path(manifest.locator).name],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not list(folder.glob("*.chunks")):
        time.sleep(0.01)
    stopped.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(locks, "PATIENCE_S", 1.0)
    other = Subscriber(FetchingEnd(Fetcher(folder, timeout_s=3), SnapshotServer))
    found = other.prepare_version(announce_elsewhere(publisher, manifest))
    assert isinstance(found, Snapshot) and holds_tensors(found, make_weights(0))
    assert Path(found.manifest.path).parent.name == f"{folder.name}-2"
    second = announce_elsewhere(publisher, publisher.publish_version(1, whole_parts(make_weights(1))))
    assert holds_tensors(other.prepare_version(second), make_weights(1))
    assert fetching_end(other).relay.served == fetcher_of(other).folder, (
        "what it serves to others is there too"
    )
    stopped.send_signal(signal.SIGCONT)
    out, _ = stopped.communicate(timeout=60)
    assert out.strip() == str(folder / "v0-life.json"), "who was stopped goes on where it was"
    slow.close()
    other.close()
    # Other processes of the host sweep too, and may have been first.
    sweep_folders(folder.parent)
    assert not list(folder.parent.glob(f"{folder.name}*")), "nothing stays behind"


def test_who_is_stopped_while_it_verifies_does_not_stop_the_others(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    monkeypatch.setattr(locks, "PATIENCE_S", 0.5)
    monkeypatch.setattr("sync.snapshot.boot_id", lambda: "here")
    with hold_lock(
        Path(manifest.path).with_suffix(".here"), "verifies version 0"
    ):  # another descriptor: as another process
        found = Subscriber().prepare_version(announce_version(manifest))
    assert isinstance(found, Snapshot) and found.checks == 1
    assert re.search(rf"locked by process {os.getpid()}, which verifies version 0, .*for itself", caplog.text)


# ---- relays and slow links


def record_of(fetcher: Fetcher) -> int:
    """Returns how many bytes from the beginning have come; 0 too where the record is gone: all has come."""
    come = Extents()
    for path in fetcher.folder.glob("*.chunks"):
        # The fetcher removes its record the moment all has come, which may be now.
        with contextlib.suppress(FileNotFoundError):
            file = os.open(path, os.O_RDONLY)
            come.read_record(file, 0)
            os.close(file)
    return come.end_from(0)


def test_extents_know_what_is_there_in_whatever_order_it_comes(tmp_path: Path) -> None:
    come = Extents()
    for begin, end in ((40, 50), (0, 10), (10, 20), (60, 70), (45, 65), (15, 18)):
        come.add_range(begin, end)
    assert come.missing_ranges(100) == [(20, 40), (70, 100)] and Extents().missing_ranges(3) == [(0, 3)]
    assert [come.end_from(at) for at in (0, 19, 20, 30, 40, 69, 99)] == [20, 20, 20, 30, 70, 70, 99]
    record = tmp_path / "record"
    record.write_bytes(ENTRY.pack(0, 5) + ENTRY.pack(9, 4) + ENTRY.pack(5, 7)[:9])
    torn, file = Extents(), os.open(record, os.O_RDONLY)
    assert torn.read_record(file, 0) == 32 and torn.end_from(0) == 5, "a torn entry is as none"
    os.close(file)


def test_a_relay_hands_on_what_has_come_while_it_still_fetches(publisher: Publisher, tmp_path: Path) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0, rows=4000)))  # 63 chunks
    slow = SlowServer(publisher.folder)
    hosts = [
        Subscriber(FetchingEnd(Fetcher(tmp_path / f"far-{n}", timeout_s=20), SnapshotServer))
        for n in range(6)
    ]
    together = False
    try:  # servers that a failure leaves open would hold up whoever collects their contexts
        with ThreadPoolExecutor(6) as pool:
            under_way = [
                pool.submit(one.prepare_version, announce_elsewhere(publisher, manifest, slow.address))
                for one in hosts
            ]
            while not any(one.done() for one in under_way):
                come = sorted(record_of(fetcher_of(one)) for one in hosts if fetcher_of(one))
                together |= come[0] > 0 and come[-1] < manifest.num_bytes
                time.sleep(0.01)
            assert all(holds_tensors(one.result(), make_weights(0, rows=4000)) for one in under_way)
        assert together, "the last had some of it when the first had not all of it yet"
        assert slow.bytes_sent < 2 * manifest.num_bytes
    finally:
        for one in hosts:
            one.close()
        slow.close()


RELAY = """
import sys, time
from pathlib import Path
from sync.subscriber import Subscriber
from sync.transports.nccl import BroadcastEnd
from sync.transports.tcp import FetchingEnd
from sync.transports import messages
from sync.transports.fetcher import Fetcher
from sync.transports.server import SnapshotServer
messages.CHUNK_BYTES = 1 << 16
subscriber = Subscriber(FetchingEnd(Fetcher(Path(sys.argv[1])), SnapshotServer))
for announced in sys.stdin:
    subscriber.prepare_version(announced.strip())
    print(subscriber.end.relay.server.address, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_relay_is_asked_once_and_nobody_is_sent_there_again(
    publisher: Publisher, tmp_path: Path, how: signal.Signals
) -> None:
    relays = [
        subprocess.Popen(
            [sys.executable, "-c", RELAY, str(tmp_path / f"relay-{n}")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for n in range(2)
    ]  # fmt: skip
    hosts = [
        Subscriber(FetchingEnd(Fetcher(tmp_path / f"far-{n}", patience_s=1.0), SnapshotServer))
        for n in range(2)
    ]
    try:
        addresses = []
        announced = announce_elsewhere(publisher, publisher.publish_version(0, whole_parts(make_weights(0))))
        for relay in relays:
            assert relay.stdin is not None and relay.stdout is not None
            relay.stdin.write(f"{announced}\n")
            relay.stdin.flush()
            addresses.append(relay.stdout.readline().strip())
        for relay in relays:
            relay.send_signal(how)
        assert server_of(publisher).chains.relays_of("v0-life.safetensors") == addresses
        began, before = time.monotonic(), server_of(publisher).bytes_sent
        for host in hosts:  # the first is told to ask one that is dead, then the other
            assert holds_tensors(host.prepare_version(announced), make_weights(0))
        assert time.monotonic() - began > 1.0 and server_of(publisher).bytes_sent > before
        assert not set(addresses) & set(server_of(publisher).chains.relays_of("v0-life.safetensors"))
        announced = announce_elsewhere(publisher, publisher.publish_version(1, whole_parts(make_weights(1))))
        silent = [dict(fetcher_of(host).silent_relays) for host in hosts]
        for host in hosts:
            assert holds_tensors(host.prepare_version(announced), make_weights(1))
        assert silent == [fetcher_of(host).silent_relays for host in hosts], "nobody was sent there"
    finally:
        for host in hosts:
            host.close()
        for relay in relays:
            relay.kill()
            relay.communicate()


class DamagingServer(SnapshotServer):
    def _make_reply(self, request: object) -> tuple[object, list[memoryview]]:  # type: ignore[override]
        reply, payload = super()._make_reply(request)  # type: ignore[arg-type]
        if isinstance(reply, Chunk) and not reply.name.endswith(".json"):
            payload = [memoryview(bytes(payload[0])[:-1] + b"\xff")]
        return reply, payload


def test_a_relay_that_sends_a_byte_now_and_then_is_passed_over(publisher: Publisher, tmp_path: Path) -> None:
    manifest, address = (
        publisher.publish_version(0, whole_parts({"w": torch.zeros(1_000_000)})),
        server_of(publisher).address,
    )
    name, ended = Path(manifest.path).name, threading.Event()
    relay: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    port = relay.bind_to_random_port("tcp://127.0.0.1")

    def trickle() -> None:
        while not ended.wait(0.1):
            while relay.poll(0):
                sender, _ = relay.recv_multipart()
                offset = asked.setdefault(sender, 0)
                asked[sender] += 1
                relay.send_multipart(
                    [sender, messages.encode(Chunk(name, offset, manifest.num_bytes)), b"\0"]
                )

    asked: dict[bytes, int] = {}
    thread = threading.Thread(target=trickle)
    thread.start()
    puller = Puller()
    puller.ask_server(address, EnlistRelay(name, f"tcp://127.0.0.1:{port}"), 20.0)
    far = Fetcher(tmp_path / "far", serve_at="tcp://127.0.0.1:1", timeout_s=2)
    far.fetch_version(address, Path(manifest.locator).name)
    assert asked and far.bytes_received >= manifest.num_bytes - 100, (
        "the publisher itself was asked for the rest"
    )
    far.close()
    puller.close()
    ended.set()
    thread.join()
    relay.close(linger=0)


def test_a_relay_that_hands_on_damaged_bytes_costs_its_children_one_fetch(
    publisher: Publisher, tmp_path: Path
) -> None:
    relay = Subscriber(FetchingEnd(Fetcher(tmp_path / "relay"), DamagingServer))
    child = Subscriber(FetchingEnd(Fetcher(tmp_path / "child"), SnapshotServer))
    for version in range(2):
        announced = announce_elsewhere(
            publisher, publisher.publish_version(version, whole_parts(make_weights(version)))
        )
        relay.prepare_version(announced)
        with pytest.raises(DigestMismatch):
            child.prepare_version(announced)
        assert holds_tensors(child.prepare_version(announced, again=True), make_weights(version))
    for one in (relay, child):
        one.close()


class NarrowServer(SnapshotServer):
    """A server behind a link of so many bytes a second."""

    rate = 1e9

    def _make_reply(self, request: object) -> tuple[object, list[memoryview]]:  # type: ignore[override]
        reply, payload = super()._make_reply(request)  # type: ignore[arg-type]
        time.sleep(sum(len(part) for part in payload) / self.rate)
        return reply, payload


def test_on_a_slow_link_less_is_asked_for_at_a_time_and_what_comes_counts(
    publisher: Publisher, tmp_path: Path
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0, rows=100)))
    narrow = NarrowServer(publisher.folder)
    narrow.rate = 20_000  # a chunk of 64 kB takes longer than anybody waits
    fetcher = Fetcher(tmp_path / "far", timeout_s=1.5)
    asked, failed = [], 0
    reply = narrow._make_reply

    def note_size(request: object) -> tuple[object, list[memoryview]]:
        asked.append(getattr(request, "size", 0))
        return reply(request)

    narrow._make_reply = note_size  # type: ignore[method-assign]
    while True:
        try:
            local = fetcher.fetch_version(narrow.address, Path(manifest.locator).name)
            break
        except TransferFailed:
            failed += 1
            assert failed < 4
    assert holds_tensors(Snapshot(read_manifest(local)), make_weights(0, rows=100))
    assert max(asked) == puller.FIRST_BYTES and min(asked[-9:]) < 1.5 * narrow.rate
    assert fetcher.bytes_received == manifest.num_bytes, "what had come was kept"
    fetcher.close()
    narrow.close()


def test_the_record_of_a_fetcher_killed_when_it_was_done_is_not_believed(
    publisher: Publisher, tmp_path: Path
) -> None:
    far = Subscriber(FetchingEnd(Fetcher(tmp_path / "far")))
    for version in range(
        4
    ):  # from the third on there is a spare, in whose memory the next version is fetched
        manifest = publisher.publish_version(version, whole_parts(make_weights(version)))
        if version == 3:
            stem = tmp_path / "far" / "v3-life"
            stem.with_suffix(".chunks").write_bytes(ENTRY.pack(0, manifest.num_bytes))
            stem.with_suffix(".safetensors").write_bytes(b"whole, but its manifest was not written any more")
        assert holds_tensors(
            far.prepare_version(announce_elsewhere(publisher, manifest)), make_weights(version)
        )
    far.close()


# ---- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Makes a file system of 4 MB in memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("there is no right here to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


MEGABYTE = torch.ones(1 << 18)


def test_a_publication_without_room_is_named_and_leaves_the_versions_before_in_service(
    small_disk: Path,
) -> None:
    publisher = Publisher(small_disk / "weights", "life")
    before = publisher.publish_version(0, whole_parts({"a": MEGABYTE}))
    with pytest.raises(
        DiskFull, match=rf"^the disk of {small_disk}\S+ must have room for 6,291,456 bytes .* got [\d,]+ b"
    ):
        publisher.publish_version(1, whole_parts({name: MEGABYTE for name in "abcdef"}))
    assert holds_tensors(Subscriber().prepare_version(announce_version(before)), {"a": MEGABYTE})
    assert not [path for path in publisher.folder.iterdir() if path.name.startswith("v1")], (
        "no remains take room"
    )
    again = publisher.publish_version(2, whole_parts({"a": MEGABYTE, "b": MEGABYTE}))
    assert holds_tensors(
        Subscriber().prepare_version(announce_version(again)), {"a": MEGABYTE, "b": MEGABYTE}
    )
    publisher.close()


def test_a_fetch_without_room_is_named(publisher: Publisher, small_disk: Path) -> None:
    manifest = publisher.publish_version(0, whole_parts({name: MEGABYTE for name in "abcdef"}))
    fetcher = Fetcher(small_disk / "far")
    with pytest.raises(DiskFull, match=rf"the disk of {small_disk}.* must have room for"):
        fetcher.fetch_version(server_of(publisher).address, Path(manifest.locator).name)
    fetcher.close()


@pytest.mark.parametrize("lack", [OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
def test_a_patch_without_room_leaves_nothing(
    lack: Exception, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half a patch")
        raise lack

    monkeypatch.setattr("sync.patch.save_file", fill)
    server_of(publisher).patches.note_interest()
    state = make_weights(0)
    for version in range(2):
        manifest = publisher.publish_version(version, whole_parts(state))
        state["b"] = state["b"] + 1
    while server_of(publisher).patches.find_route("v0-life", "v1-life") is None:
        time.sleep(0.01)
    assert server_of(publisher).patches.find_route("v0-life", "v1-life") == []
    assert {path.suffix for path in publisher.folder.glob("v*")} == {
        ".safetensors",
        ".json",
    } and manifest.version == 1


def test_patches_and_slow_hosts_give_way_where_a_version_would_have_no_room(small_disk: Path) -> None:
    folder, held = small_disk / "weights", list[Snapshot]()
    server, asking = SnapshotServer(folder), Puller()
    publisher = Publisher(folder, "life", ends=[server])
    state, first = torch.randn(300_000).bfloat16(), GetChunk("v0-life.safetensors", 0, 1)
    for version in range(12):  # two that are kept, an older one in an engine, a slow host's, and patches
        manifest = publisher.publish_version(version, whole_parts({"a": state}))
        held = [*held[-2:], Snapshot(manifest)]
        server.patches.note_interest()
        while server.patches.find_route(f"v{version - 1}-life", f"v{version}-life") is None:
            time.sleep(0.01)
        if version < 4:
            assert isinstance(asking.ask_server(server.address, first, 5.0), Chunk)
        state = torch.where(torch.rand(len(state)) < 0.15, state + 1, state)
    assert server.patches.find_route("v10-life", "v11-life"), "patches are made when there is room again"
    assert asking.ask_server(server.address, first, 5.0) == FileGone("v0-life.safetensors")
    assert {path.name for path in folder.glob("*.patch")} == {
        patch_name(base, one) for one, (base, _) in server.patches._links.items()
    }
    asking.close()
    publisher.close()


def test_a_patch_that_is_not_wanted_any_more_when_it_is_written_leaves_nothing(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches, state = server_of(publisher).patches, make_weights(0)

    def write_late(tensors: object, path: Path, metadata: object) -> None:
        patches.drop_patches()
        path.write_bytes(b"a patch")

    monkeypatch.setattr("sync.patch.save_file", write_late)
    patches.note_interest()
    for version in range(2):
        publisher.publish_version(version, whole_parts(state))
        state["b"] = state["b"] + 1
    patches._thread.submit(int).result(timeout=10)
    assert patches.find_route("v0-life", "v1-life") == [] and not list(publisher.folder.glob("*.patch"))


def test_a_relay_that_two_hosts_have_asked_in_vain_is_in_no_chain_for_ten_minutes() -> None:
    """It lives and fetches every version, but nobody reaches it."""
    now = 0.0
    chains = RelayChains(clock=lambda: now)
    far, *hosts = (f"tcp://host-{n}:1" for n in range(4))

    def ask(version: int, host: str, lost: str = "") -> str:
        return chains.find_parent(EnlistRelay(f"v{version}-life.safetensors", host, lost=lost))

    for version in (0, 1):  # one host alone may be what is wrong
        assert ask(version, far) == "" and ask(version, hosts[0]) == far
        assert ask(version, hosts[0], lost=far) == ""
    assert ask(2, far) == "" and ask(2, hosts[1]) == far and ask(2, hosts[1], lost=far) == ""
    assert [ask(3, far), ask(3, hosts[0]), ask(3, hosts[1])] == ["", "", hosts[0]]
    now = 601.0
    assert ask(4, far) == "" and ask(4, hosts[2]) == far


def test_when_the_learner_stands_still_no_relay_behind_it_is_shunned(publisher: Publisher) -> None:
    """Every host sees no byte for a while, and knows only of the relay before it."""
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    name = Path(manifest.path).name
    waiting = SnapshotServer(publisher.folder.with_name("far"))  # a relay to which nothing comes
    waiting.files.folder.mkdir()
    for suffix in (".part", ".chunks"):
        (waiting.files.folder / name).with_suffix(suffix).write_bytes(b"\0" * 32)
    chains = server_of(publisher).chains
    for number in range(3):
        child = Fetcher(publisher.folder.with_name(f"child-{number}"), timeout_s=0.5)
        child.serve_at = f"tcp://child-{number}:1"
        chains._relays[name] = [waiting.address]
        assert child.fetch_version(server_of(publisher).address, Path(manifest.locator).name).exists()
        child.close()
    assert not chains._asked_in_vain and waiting.address not in chains.relays_of(name)
    waiting.close()


def test_many_relays_are_two_chains_and_a_lost_one_is_bridged(publisher: Publisher) -> None:
    ask = server_of(publisher).chains.find_parent
    hosts = [f"tcp://host-{n}:1" for n in range(20)]
    parents = [ask(EnlistRelay("v0-life.safetensors", host)) for host in hosts]
    assert [n for n, parent in enumerate(parents) if not parent] == [0, CHAIN_LENGTH]
    told = [parent for parent in parents if parent]
    assert len(set(told)) == len(told) == 18, "nobody is asked by two"
    assert all(hosts.index(parent) < n for n, parent in enumerate(parents) if parent)
    assert ask(EnlistRelay("v0-life.safetensors", hosts[3], lost=hosts[2])) == hosts[1]
    assert ask(EnlistRelay("v1-life.safetensors", hosts[9])) == "", (
        "of every file there is a chain of its own"
    )
