"""Weights over TCP: whole, resumed, relayed, and never other than published, whatever happens on the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file
from weight_ends import fetching_end, locate_manifest, relay_server, server_of

from benchmark_relays import ThrottledServer
from buffers.keys import make_keys, show_key, start_authenticator
from sync import patch
from sync.adapters import PEFT_PREFIX, describe_adapters
from sync.announcement import TransferFailed, announce_version
from sync.manifest import DigestMismatch, Manifest
from sync.patch import apply_patches, make_patch, patch_name
from sync.publisher import Publisher
from sync.snapshot import Snapshot, read_manifest
from sync.stream import whole_parts
from sync.subscriber import Subscriber
from sync.transports import messages, puller, served_files, server
from sync.transports.fetcher import Fetcher
from sync.transports.messages import Chunk, EnlistRelay, FileGone, GetChunk
from sync.transports.puller import Puller
from sync.transports.relay import HostRelay
from sync.transports.server import SnapshotServer
from sync.transports.tcp import FetchingEnd
from sync.weight_source import WeightSource

NUM_CHUNKS = 12


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(puller, "FIRST_BYTES", 1 << 16)
    monkeypatch.setattr("sync.snapshot.boot_id", lambda: "here")
    monkeypatch.setattr("sync.announcement.boot_id", lambda: "here")
    monkeypatch.setattr("sync.transports.shared_memory.boot_id", lambda: "here")


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "model.embed.weight": (300, 256),
        "model.layers.0.mlp.weight": (400, 256),
        "model.norm.weight": (256,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in sizes.items()}


MakeHost = Callable[..., "FarHost"]


class FarHost:
    """A host that does not see the learner's folder: a fetcher, and a server of its own if it is a relay."""

    def __init__(self, folder: Path, relay: bool = False, **arguments: object) -> None:
        self.folder = folder
        self.fetcher = Fetcher(folder, **{"timeout_s": 60.0, **arguments})  # type: ignore[arg-type]
        self.subscriber = Subscriber(FetchingEnd(self.fetcher, SnapshotServer if relay else None))

    @property
    def server(self) -> SnapshotServer | None:
        return relay_server(self.subscriber)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[MakeHost]:
    hosts: list[FarHost] = []

    def make(**arguments: object) -> FarHost:
        hosts.append(FarHost(tmp_path / f"host-{len(hosts)}", **arguments))  # type: ignore[arg-type]
        return hosts[-1]

    yield make
    for one in hosts:
        made = [merged._shared.path for merged in one.subscriber.merged.values()]
        one.subscriber.close()
        assert not any(folder.exists() for folder in (one.folder, *made)), "nothing stays behind"


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    folder = tmp_path / "weights"
    publisher = Publisher(folder, "life", ends=[SnapshotServer(folder)])
    yield publisher
    publisher.close()


def announce_elsewhere(publisher: Publisher, manifest: Manifest, address: str | None = None) -> str:
    """Returns the announcement of a version by a learner on another host."""
    return announce_version(manifest, address or server_of(publisher).address).replace(
        "#here#", "#another host#"
    )


def read_tensors(found: str | WeightSource) -> dict[str, torch.Tensor]:
    """Returns the verified tensors of a snapshot, or of the one whose manifest is named."""
    snapshot = Snapshot(read_manifest(found)) if isinstance(found, str) else found
    assert isinstance(snapshot, Snapshot)
    snapshot.verify_bytes()
    return dict(snapshot.named_tensors())


def are_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_host_fetches_a_version_once_and_only_from_elsewhere(publisher: Publisher, host: MakeHost) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    near, far = host(), host()
    assert locate_manifest(near.subscriber, publisher.announce_version(manifest)) == manifest.locator, (
        "the same host reads the file itself"
    )
    assert near.fetcher.bytes_received == 0
    first = far.subscriber.prepare_version(announce_elsewhere(publisher, manifest)).manifest.locator
    assert Path(first).parent == far.folder and are_equal(read_tensors(first), make_weights(0))
    assert far.fetcher.bytes_received == manifest.num_bytes
    second = Fetcher(far.folder)  # another engine of that host
    assert str(second.fetch_version("tcp://127.0.0.1:9", Path(manifest.locator).name)) == first, (
        "nobody is asked"
    )
    second.close()
    assert Path(first).exists(), "the folder stays as long as one of them uses it"


def test_old_versions_go_and_a_mapped_one_stays(publisher: Publisher, host: MakeHost) -> None:
    far, held = host(), None
    for version in range(4):
        manifest = publisher.publish_version(version, whole_parts(make_weights(version)))
        held = held or far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))
        locate_manifest(far.subscriber, announce_elsewhere(publisher, manifest))
    assert sorted(path.name for path in far.folder.glob("*.json")) == ["v2-life.json", "v3-life.json"]
    assert len(list(far.folder.glob("v*"))) <= 2 * 3 + 2, "the two, their seals, and a spare"
    assert held is not None and are_equal(dict(held.named_tensors()), make_weights(0))


class FaultyServer(SnapshotServer):
    """A server that damages the third chunk of a snapshot."""

    fault: str = ""

    def _make_reply(self, request: object) -> tuple[object, list[memoryview]]:  # type: ignore[override]
        reply, payload = super()._make_reply(request)  # type: ignore[arg-type]
        if (
            isinstance(request, GetChunk)
            and request.offset == 2 * messages.CHUNK_BYTES
            and isinstance(reply, Chunk)
        ):
            match self.fault:
                case "flip":
                    changed = bytearray(payload[0])
                    changed[77] ^= 4
                    payload = [memoryview(changed)]
                case "truncate":
                    payload = [payload[0][:-1]]
                case "reorder":
                    reply = Chunk(reply.name, reply.offset + messages.CHUNK_BYTES, reply.total)
                case "replay":
                    with open(self.files.folder / "v0-life.safetensors", "rb") as old:
                        old.seek(request.offset)
                        payload = [memoryview(old.read(len(payload[0])))]
                case "misplace":
                    reply = Chunk(reply.name, reply.offset + 1, reply.total)
        return reply, payload


@pytest.mark.parametrize("fault", ["flip", "truncate", "reorder", "replay", "misplace"])
def test_what_is_damaged_on_the_way_is_never_taken_for_what_was_published(
    publisher: Publisher, host: MakeHost, fault: str
) -> None:
    publisher.publish_version(0, whole_parts(make_weights(0)))
    manifest = publisher.publish_version(1, whole_parts(make_weights(1)))
    server, far = FaultyServer(publisher.folder), host(timeout_s=0.5)
    server.fault = fault
    for _ in range(2):
        if fault == "truncate":  # a server may send less than was asked for; the rest is asked for again
            assert are_equal(
                read_tensors(
                    far.subscriber.prepare_version(announce_elsewhere(publisher, manifest, server.address))
                ),
                make_weights(1),
            )
        else:
            with pytest.raises((DigestMismatch, TransferFailed)):
                far.subscriber.prepare_version(announce_elsewhere(publisher, manifest, server.address))
    server.close()
    good = locate_manifest(far.subscriber, announce_elsewhere(publisher, manifest), again=True)
    assert are_equal(read_tensors(good), make_weights(1))


def test_a_relay_hands_on_and_the_publisher_serves_few(publisher: Publisher, host: MakeHost) -> None:
    hosts = [host(relay=True, patience_s=60.0) for _ in range(7)]
    for version in range(2):
        manifest = publisher.publish_version(version, whole_parts(make_weights(version)))
        with ThreadPoolExecutor(7) as pool:
            announced = [announce_elsewhere(publisher, manifest)] * 7
            found = list(pool.map(lambda one, where: one.subscriber.prepare_version(where), hosts, announced))
        assert all(are_equal(read_tensors(locator), make_weights(version)) for locator in found)
    assert server_of(publisher).bytes_sent < 1.5 * 2 * manifest.num_bytes
    assert sum(one.server.bytes_sent for one in hosts if one.server) >= 6 * 2 * manifest.num_bytes


def test_of_adapters_a_host_fetches_the_adapters_and_hands_them_on(tmp_path: Path, host: MakeHost) -> None:
    rank, rows = 2, 512
    base, names = {"up.weight": torch.randn(rows, rows), "norm.weight": torch.randn(rows)}, ("A", "B")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    save_torch_file(base, tmp_path / "model" / "model.safetensors")
    publisher = Publisher(
        tmp_path / "weights", "life", ends=[SnapshotServer(tmp_path / "weights")],
        adapter=describe_adapters(tmp_path / "model", "float32", 0.5),
    )  # fmt: skip
    hosts = [host(relay=True, patience_s=60.0) for _ in range(3)]
    for version in range(3):
        matrices = [torch.randn(rank, rows), torch.randn(rows, rank)]
        named = {f"{PEFT_PREFIX}up.lora_{name}.weight": m for name, m in zip(names, matrices, strict=True)}
        manifest = publisher.publish_version(version, whole_parts(named))
        with ThreadPoolExecutor(3) as pool:
            announced = [announce_elsewhere(publisher, manifest)] * 3
            found = list(pool.map(lambda one, where: one.subscriber.prepare_version(where), hosts, announced))
        for snapshot in found:
            whole = read_tensors(snapshot)
            torch.testing.assert_close(
                whole["up.weight"], base["up.weight"] + 0.5 * matrices[1] @ matrices[0]
            )
            assert torch.equal(whole["norm.weight"], base["norm.weight"])
        for one in hosts:
            one.subscriber.refresh_spare()
    for one in hosts:
        assert one.fetcher.bytes_received == 3 * manifest.num_bytes < 3 * 0.03 * found[0].manifest.num_bytes
    publisher.close()


def test_one_process_of_a_host_hands_on_for_all_and_another_takes_its_place(
    publisher: Publisher, tmp_path: Path
) -> None:
    folder = tmp_path / "far"
    first, second = (Subscriber(FetchingEnd(Fetcher(folder, timeout_s=60), SnapshotServer)) for _ in range(2))
    first.prepare_version(
        announce_elsewhere(publisher, publisher.publish_version(0, whole_parts(make_weights(0))))
    )
    second.prepare_version(
        announce_elsewhere(publisher, publisher.publish_version(1, whole_parts(make_weights(1))))
    )
    assert relay_server(first) is not None and relay_server(second) is None
    assert list(server_of(publisher).chains._relays.values()) == 2 * [[relay_server(first).address]], (
        "the host is known by one address"
    )
    first.close()
    assert are_equal(
        read_tensors(
            second.prepare_version(
                announce_elsewhere(publisher, publisher.publish_version(2, whole_parts(make_weights(2))))
            )
        ),
        make_weights(2),
    )
    assert relay_server(second) is not None
    second.close()
    assert not folder.exists()


def test_a_container_that_does_not_see_the_learners_memory_fetches(
    publisher: Publisher, host: MakeHost
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    hidden = publisher.announce_version(manifest).replace(str(publisher.folder), "/dev/shm/not-visible-here")
    assert are_equal(read_tensors(host().subscriber.prepare_version(hidden)), make_weights(0))


def test_a_relay_that_is_gone_or_wrong_is_passed_over(publisher: Publisher, host: MakeHost) -> None:
    relays, last = [host(relay=True) for _ in range(2)], host(relay=True, timeout_s=0.5, patience_s=0.2)
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    for relay in relays:
        relay.subscriber.prepare_version(announce_elsewhere(publisher, manifest))
    for relay in relays:
        copy = Path(relay.folder / Path(manifest.path).name)
        raw = bytearray(copy.read_bytes())
        raw[-5] ^= 1
        copy.write_bytes(raw)
    announced = announce_elsewhere(publisher, manifest)
    with pytest.raises(DigestMismatch, match="1 of 3 tensors"):
        last.subscriber.prepare_version(announced)
    assert are_equal(
        read_tensors(locate_manifest(last.subscriber, announced, again=True)), make_weights(0)
    ), "the publisher itself is asked"
    for relay in relays:
        assert relay.server is not None
        relay.server.close()
        fetching_end(relay.subscriber).relay.server = None
    manifest = publisher.publish_version(1, whole_parts(make_weights(1)))
    assert are_equal(
        read_tensors(last.subscriber.prepare_version(announce_elsewhere(publisher, manifest))),
        make_weights(1),
    )


@pytest.mark.parametrize("is_publisher_fast", [True, False])
def test_a_slow_relay_is_left_where_the_publisher_is_far_faster_and_only_there(
    is_publisher_fast: bool, tmp_path: Path, host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThrottledServer, "mb_per_s", 0.1 if is_publisher_fast else 1.0)
    folder = tmp_path / "weights"
    server = (SnapshotServer if is_publisher_fast else ThrottledServer)(folder)
    publisher, weights = Publisher(folder, "life", ends=[server]), {"a": torch.randn(300_000)}
    try:
        manifest = publisher.publish_version(0, whole_parts(weights))
        first, last = host(), host(relay=True, timeout_s=1.0 if is_publisher_fast else 0.2)
        fetching_end(first.subscriber).relay = HostRelay(first.fetcher, ThrottledServer)
        announced = announce_elsewhere(publisher, manifest)
        first.subscriber.prepare_version(announced)
        assert are_equal(read_tensors(last.subscriber.prepare_version(announced)), weights)
        chain = server.chains.relays_of(Path(manifest.path).name)
        assert len(chain) == (1 if is_publisher_fast else 2), "a relay that was left is in it no more"
        assert not last.fetcher.silent_relays, "the next file is asked of it again"
    finally:
        publisher.close()


SERVE = """
import sys, time
from pathlib import Path
from sync.transports.server import SnapshotServer
class SlowServer(SnapshotServer):
    def _make_reply(self, request):
        time.sleep(0.05)
        return super()._make_reply(request)
server = SlowServer(Path(sys.argv[1]), sys.argv[2])
print(server.address, flush=True)
time.sleep(60)
"""
FETCH = """
import sys
from pathlib import Path
from sync.transports import fetcher, messages, puller
messages.CHUNK_BYTES = puller.FIRST_BYTES = 1 << 16
print(fetcher.Fetcher(Path(sys.argv[1])).fetch_version(sys.argv[2], sys.argv[3]))
"""


def serve_slowly(folder: Path, address: str = "tcp://127.0.0.1:*") -> tuple["subprocess.Popen[str]", str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(folder), address],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def chunks_in(folder: Path) -> int:
    return sum(path.stat().st_size // 16 for path in folder.glob("*.chunks"))


def test_a_server_killed_in_the_middle_is_given_up_and_what_came_is_kept(
    publisher: Publisher, host: MakeHost
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    process, address = serve_slowly(publisher.folder)
    far = host(timeout_s=1.0)

    def kill_server() -> None:
        while chunks_in(far.folder) < 3:
            time.sleep(0.01)
        process.kill()

    thread = threading.Thread(target=kill_server)
    thread.start()
    with pytest.raises(TransferFailed, match="nobody has answered|nobody answers"):
        far.subscriber.prepare_version(announce_elsewhere(publisher, manifest, address))
    thread.join()
    process.wait()
    kept = far.fetcher.bytes_received
    assert 3 * messages.CHUNK_BYTES <= kept < manifest.num_bytes and not list(far.folder.glob("*.json"))
    assert are_equal(
        read_tensors(far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))), make_weights(0)
    )
    assert far.fetcher.bytes_received == manifest.num_bytes, "no byte came twice"


def test_a_fetcher_killed_in_the_middle_is_followed_by_one_that_goes_on(
    publisher: Publisher, host: MakeHost, tmp_path: Path
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    process, address = serve_slowly(publisher.folder)
    far = host()
    fetching = subprocess.Popen(
        [sys.executable, "-c", FETCH, str(far.folder), address, Path(manifest.locator).name],
        cwd=Path(__file__).parents[1],
    )
    while chunks_in(far.folder) < 3:
        time.sleep(0.01)
        assert fetching.poll() is None
    fetching.send_signal(signal.SIGKILL)
    fetching.wait()
    process.kill()
    process.wait()
    assert are_equal(
        read_tensors(far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))), make_weights(0)
    )
    assert far.fetcher.bytes_received <= manifest.num_bytes - 3 * messages.CHUNK_BYTES


def test_who_has_begun_may_end_when_the_version_is_gone_and_others_are_told(
    publisher: Publisher, host: MakeHost
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    process, address = serve_slowly(publisher.folder)
    far, late = host(), host()
    found: list[Snapshot] = []
    announced = announce_elsewhere(publisher, manifest, address)
    thread = threading.Thread(target=lambda: found.append(far.subscriber.prepare_version(announced)))
    thread.start()
    while chunks_in(far.folder) < 2:
        time.sleep(0.01)
    for version in (1, 2, 3):
        publisher.publish_version(version, whole_parts(make_weights(version)))
    assert not Path(manifest.path).exists()
    thread.join(timeout=20)
    process.kill()
    process.wait()
    assert are_equal(read_tensors(found[0]), make_weights(0))
    with pytest.raises(TransferFailed, match="is gone"):
        late.subscriber.prepare_version(announce_elsewhere(publisher, manifest))


def test_only_snapshots_are_served(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    publisher.publish_version(0, whole_parts(make_weights(0)))
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(server_of(publisher).address)
    hostile = [
        GetChunk("../secret", 0, 10),
        GetChunk("owner", 0, 10),
        GetChunk("v0-life.json", 10**12, 10),
        GetChunk("v0-life.json", -1, 5),
    ]
    hostile += [GetChunk("v0-life.json", 0, -1), GetChunk("v0-life.json", 0, 1 << 60)]
    hostile += [
        messages.RequestBroadcast("../secret", "r"),
        messages.EnlistRelay("v0-life.json", "tcp://x:1\n" * 9),
    ]  # type: ignore[list-item]
    hostile += [
        messages.EnlistRelay("v0-life.json", "ipc:///tmp/x"),
        messages.EnlistRelay("owner", "tcp://x:1"),
    ]  # type: ignore[list-item]
    for request in hostile:
        socket.send(messages.encode(request))
    for garbage in (b"", b"\xc1", os.urandom(100)):
        socket.send(garbage)
    socket.send(messages.encode(GetChunk("v9-life.json", 0, 10)))
    for _ in range(len(hostile) + 3):
        header, *rest = socket.recv_multipart()
        assert isinstance(messages.replies.decode(header), messages.TransferRefused) and not rest
    assert messages.replies.decode(socket.recv_multipart()[0]) == messages.FileGone("v9-life.json"), (
        "it lives"
    )
    assert server_of(publisher).refused.total() == len(hostile) + 3
    socket.close(linger=0)


def test_strangers_get_nothing_where_there_are_keys(host: MakeHost, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["generator"])
    folder = tmp_path / "weights"
    server = SnapshotServer(folder, secure=lambda socket: start_authenticator(socket, tmp_path / "keys"))
    publisher = Publisher(folder, "life", ends=[server])
    try:
        manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
        announced = announce_elsewhere(publisher, manifest)
        with pytest.raises(TransferFailed, match="nobody has answered"):
            host(timeout_s=0.5).subscriber.prepare_version(announced)
        known = host(secure=lambda socket: show_key(socket, tmp_path / "keys"))
        assert are_equal(read_tensors(known.subscriber.prepare_version(announced)), make_weights(0))
    finally:
        publisher.close()


def test_what_zeromq_has_not_let_go_of_is_not_written_over(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host asks for everything and reads nothing: what was sent lies in ZeroMQ's queue, as views of the
    file.

    ZeroMQ's own word for it is no help: a multipart message's tracker speaks for its last frame.
    """
    monkeypatch.setattr(served_files, "IDLE_S", 0.0)  # the server itself lets go of the file at once
    large = {"a": torch.arange(12 << 20, dtype=torch.float32)}  # 48 MB: more than the buffers of sockets hold
    first = publisher.publish_version(0, whole_parts(large))
    inode, whole = os.stat(first.path).st_ino, Path(first.path).read_bytes()
    stalled: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    stalled.setsockopt(zmq.RCVHWM, 1)
    stalled.connect(server_of(publisher).address)
    size = 1 << 20
    offsets = range(0, first.num_bytes, size)
    for offset in offsets:
        stalled.send(messages.encode(GetChunk("v0-life.safetensors", offset, size)))
    while server_of(publisher).bytes_sent < first.num_bytes:
        time.sleep(0.01)
    while len(server_of(publisher).files):
        time.sleep(0.01)
    for version in range(1, 8):
        manifest = publisher.publish_version(version, whole_parts({"a": large["a"] + version}))
        assert os.stat(manifest.path).st_ino != inode, "somebody has yet to be sent this file"
    for offset in offsets:
        header, data = stalled.recv_multipart()
        assert messages.replies.decode(header) == Chunk("v0-life.safetensors", offset, first.num_bytes)
        assert data == whole[offset : offset + size], f"the bytes at {offset} are another version's"
    stalled.close(linger=0)


def test_a_multipart_tracker_speaks_for_its_last_frame_only() -> None:
    """Shows why nothing here relies on ZeroMQ's trackers. If this fails, pyzmq has mended them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender, receiver = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    try:
        receiver.setsockopt(zmq.RCVHWM, 1)
        sender.connect(f"tcp://127.0.0.1:{receiver.bind_to_random_port('tcp://127.0.0.1')}")
        tracker = sender.send_multipart([bytearray(64 << 20), b"small"], copy=False, track=True)
        assert tracker.done, "64 MB are said to be sent, and nobody has received a byte"
        assert len(receiver.recv_multipart()[0]) == 64 << 20
    finally:
        sender.close(linger=0)
        receiver.close(linger=0)
        context.term()


def change_some(tensors: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Returns the tensors with another number in about this share of the places."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < share, tensor + 1, tensor)
        for name, tensor in tensors.items()
    }


def test_hundreds_of_patches_lose_nothing(publisher: Publisher, host: MakeHost) -> None:
    far, state = host(), {name: tensor.bfloat16() for name, tensor in make_weights(0).items()}
    fetched, inodes = 0, set()
    for version in range(200):
        manifest = publisher.publish_version(version, whole_parts(state))
        if version % 3 != 1:  # now and then a version is passed over
            found = far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))
            assert are_equal(read_tensors(found), state)
            inodes.add(os.stat(found.manifest.path).st_ino)
            del found  # as an engine does
            fetched += 1
        if version % 5 < 3:
            far.subscriber.refresh_spare()
        state = change_some(state, 0.01, version)
    assert far.fetcher.patches == fetched - 1, "only the first came whole"
    assert len(inodes) <= 4, "files are written over"
    patched = 200 * 0.01 * 3 * 1.2  # an index and a value take 6 bytes where a number takes 2
    assert far.fetcher.bytes_received < (1 + patched) * manifest.num_bytes


def test_what_an_engine_has_mapped_is_never_written_over(publisher: Publisher, host: MakeHost) -> None:
    far, state = host(), make_weights(0)
    held = []
    for version in range(12):
        manifest = publisher.publish_version(version, whole_parts(state))
        found = far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))
        if version in (0, 3, 4, 7):
            held.append((found, state))
        del found
        far.subscriber.refresh_spare()
        state = change_some(state, 0.01, version)
    assert far.fetcher.patches == 11
    for snapshot, was in held:
        snapshot.verify_bytes()
        assert are_equal(dict(snapshot.named_tensors()), was)


def test_a_patch_in_the_making_holds_up_nobody_but_those_who_asked_for_it(
    publisher: Publisher, host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, other, state = host(), host(), make_weights(0)
    far.subscriber.prepare_version(
        announce_elsewhere(publisher, publisher.publish_version(0, whole_parts(state)))
    )
    made = threading.Event()

    def slowly(*arguments: object) -> bool:
        made.wait(20)
        return make_patch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("sync.patch.make_patch", slowly)
    with ThreadPoolExecutor(1) as pool:
        state = change_some(state, 0.01, 1)
        manifest = publisher.publish_version(1, whole_parts(state))
        waiting = pool.submit(far.subscriber.prepare_version, announce_elsewhere(publisher, manifest))
        deadline = time.monotonic() + 20
        while not (server_of(publisher) and server_of(publisher)._parked):  # it has asked for the patch
            assert time.monotonic() < deadline and not waiting.done()
            time.sleep(0.001)
        for version in (2, 3, 4):  # the learner goes on
            publisher.publish_version(version, whole_parts(make_weights(version)))
        newest = publisher.publish_version(5, whole_parts(make_weights(5)))
        assert are_equal(
            read_tensors(other.subscriber.prepare_version(announce_elsewhere(publisher, newest))),
            make_weights(5),
        )
        assert not waiting.done()
        made.set()
        assert are_equal(read_tensors(waiting.result(timeout=20)), state)
    assert far.fetcher.patches == 1, "made from the two versions, which are gone by now"


def test_a_patch_that_takes_longer_than_a_silence_may_last_is_waited_for(
    publisher: Publisher, host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ROUTE_PARKED_S", 0.1)
    far, state, made, asked = host(timeout_s=2.0), make_weights(0), threading.Event(), threading.Event()
    far.subscriber.prepare_version(
        announce_elsewhere(publisher, publisher.publish_version(0, whole_parts(state)))
    )

    def slowly(*arguments: object) -> bool:
        made.wait(60)
        return make_patch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("sync.patch.make_patch", slowly)
    monkeypatch.setattr(far.fetcher._shared, "note_progress", asked.set)
    state = change_some(state, 0.01, 1)
    manifest = publisher.publish_version(1, whole_parts(state))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(far.subscriber.prepare_version, announce_elsewhere(publisher, manifest))
        for _ in range(25):  # longer than the publisher may be silent
            assert asked.wait(10), "it has heard that the patch is in the making"
            asked.clear()
        assert not waiting.done()
        made.set()
        assert are_equal(read_tensors(waiting.result(timeout=20)), state)
    assert far.fetcher.patches == 1


def test_a_patch_that_would_not_be_smaller_is_not_made(publisher: Publisher, host: MakeHost) -> None:
    far = host()
    for version in range(2):
        manifest = publisher.publish_version(version, whole_parts(make_weights(version)))
        assert are_equal(
            read_tensors(far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))),
            make_weights(version),
        )
    assert far.fetcher.patches == 0 and far.fetcher.bytes_received == 2 * manifest.num_bytes
    assert not list(publisher.folder.glob("*.patch"))


def test_a_patch_that_cannot_be_made_costs_its_saving_and_no_more(
    publisher: Publisher, host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sync.patch.make_patch", full)
    far, state = host(), make_weights(0)
    for version in range(3):
        manifest = publisher.publish_version(version, whole_parts(state))
        assert are_equal(
            read_tensors(far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))), state
        )
        state = change_some(state, 0.01, version)
    assert far.fetcher.patches == 0


def test_a_learner_faster_than_its_patches_does_not_pile_them_up(
    publisher: Publisher, host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, going = host(), threading.Event()
    made: list[int] = []

    def slowly(base: Snapshot, new: Snapshot, *arguments: object) -> bool:
        going.wait(20)
        made.append(new.manifest.version)
        return False

    monkeypatch.setattr("sync.patch.make_patch", slowly)
    far.subscriber.prepare_version(
        announce_elsewhere(publisher, publisher.publish_version(0, whole_parts(make_weights(0))))
    )
    inodes = {
        os.stat(publisher.publish_version(version, whole_parts(make_weights(version))).path).st_ino
        for version in range(1, 12)
    }
    going.set()
    manifest = publisher.publish_version(12, whole_parts(make_weights(12)))
    assert are_equal(
        read_tensors(far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))),
        make_weights(12),
    )
    assert len(made) <= patch.BACKLOG + 1
    assert len(inodes) <= 6, "what is not waited for is written over"


def test_who_is_too_far_behind_is_given_the_whole(publisher: Publisher, host: MakeHost) -> None:
    far, state = host(), make_weights(0)
    far.subscriber.prepare_version(
        announce_elsewhere(publisher, publisher.publish_version(0, whole_parts(state)))
    )
    for version in range(1, 2 * patch.KEEP):
        state = change_some(state, 0.001, version)
        manifest = publisher.publish_version(version, whole_parts(state))
    assert are_equal(
        read_tensors(far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))), state
    )
    assert far.fetcher.patches == 0
    assert len(list(publisher.folder.glob("*.patch"))) <= patch.KEEP


@pytest.mark.parametrize("change", ["flip", "cut", "base", "index", "garbage"])
def test_a_damaged_patch_is_refused_or_found_out_and_the_whole_follows(
    publisher: Publisher, host: MakeHost, tmp_path: Path, change: str
) -> None:
    far, state = host(), make_weights(0)
    old = publisher.publish_version(0, whole_parts(state))
    far.subscriber.prepare_version(announce_elsewhere(publisher, old))
    state = change_some(state, 0.01, 1)
    manifest = publisher.publish_version(1, whole_parts(state))
    path = publisher.folder / patch_name("v0-life", "v1-life")
    while server_of(publisher).patches.find_route("v0-life", "v1-life") is None:
        time.sleep(0.01)
    raw = bytearray(path.read_bytes())
    match change:
        case "flip":
            raw[-9] ^= 1
        case "cut":
            del raw[-40:]
        case "garbage":
            raw = bytearray(os.urandom(len(raw)))
        case "base":
            raw = bytearray(bytes(raw).replace(old.digest.encode(), old.digest[::-1].encode()))
        case "index":
            held = load_file(path)
            name = next(name for name in held if name.endswith("indices"))
            held[name] = held[name] + np.uint32(10**6)
            save_file(held, path, metadata={"base": old.digest, "version": manifest.digest})
            raw = bytearray(path.read_bytes())
    path.write_bytes(raw)
    size: Future[int] = Future()
    size.set_result(len(raw))
    server_of(publisher).patches._links["v1-life"] = ("v0-life", size)
    announced = announce_elsewhere(publisher, manifest)
    if change == "flip":  # well-formed: only the digest can tell
        with pytest.raises(DigestMismatch, match="1 of 3 tensors"):
            far.subscriber.prepare_version(announced)
        found = far.subscriber.prepare_version(announced, again=True)
    else:
        found = far.subscriber.prepare_version(announced)
    assert are_equal(read_tensors(found), state) and are_equal(
        read_tensors(str(far.folder / "v0-life.json")), make_weights(0)
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_a_patch_is_lossless_and_idempotent_for_any_bits(
    tmp_path_factory: pytest.TempPathFactory, seed: int, dtype: torch.dtype
) -> None:
    folder = tmp_path_factory.mktemp("patch")
    publisher = Publisher(folder / "weights", "x")
    rng = np.random.default_rng(seed)
    kind = {4: np.uint32, 2: np.uint16}[dtype.itemsize]
    bits = {f"t{i}": rng.integers(0, np.iinfo(kind).max, rng.integers(1, 300), kind) for i in range(4)}
    try:
        old = publisher.publish_version(
            0, whole_parts({k: torch.from_numpy(v.copy()).view(dtype) for k, v in bits.items()})
        )
        for values in bits.values():  # NaN, infinity and -0 among them
            values[rng.random(len(values)) < 0.1] ^= kind(1 << rng.integers(0, 8 * dtype.itemsize))
        new = publisher.publish_version(
            1, whole_parts({k: torch.from_numpy(v.copy()).view(dtype) for k, v in bits.items()})
        )
        made, into = folder / "a.patch", folder / "into.safetensors"
        if not make_patch(Snapshot(old), Snapshot(new), made):
            return
        into.write_bytes(Path(old.path).read_bytes())
        for _ in range(2):
            apply_patches(msgspec.structs.replace(old, path=str(into)), [made])
            Snapshot(msgspec.structs.replace(new, path=str(into))).verify_bytes()
        with pytest.raises(DigestMismatch, match="is for the base"):
            apply_patches(msgspec.structs.replace(new, path=str(into)), [made])
    finally:
        publisher.close()


def test_a_file_that_is_gone_is_served_to_its_end_however_slowly_it_is_asked_for(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_files, "IDLE_S", 0.0)
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    name, size = Path(manifest.path).name, manifest.num_bytes // 2 + 1
    asking, address = Puller(), server_of(publisher).address
    assert isinstance(asking.ask_server(address, GetChunk(name, 0, size), 5.0), Chunk)
    os.unlink(manifest.path)
    time.sleep(3 * server.TICK_S)
    assert isinstance(asking.ask_server(address, GetChunk(name, size, size), 5.0), Chunk)
    while len(server_of(publisher).files):
        time.sleep(0.01)
    assert isinstance(asking.ask_server(address, GetChunk(name, 0, size), 5.0), FileGone)
    asking.close()


@pytest.fixture
def asking() -> Iterator[Puller]:
    own = Puller()
    yield own
    own.close()


def test_a_snapshot_waits_for_whoever_fetches_its_manifest_however_slowly_that_comes(
    publisher: Publisher, asking: Puller
) -> None:
    address = server_of(publisher).address
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    assert isinstance(asking.ask_server(address, GetChunk("v0-life.json", 0, 9), 5.0), Chunk)
    for version in range(1, 6):  # a link so slow that the learner goes on meanwhile
        publisher.publish_version(version, whole_parts(make_weights(version)))
    assert not Path(manifest.path).exists()
    for name in ("v0-life.json", "v0-life.safetensors"):
        assert isinstance(asking.ask_server(address, GetChunk(name, 9, 9), 5.0), Chunk)


def test_a_host_keeps_few_connections_however_many_relays_it_asks(asking: Puller) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    relays = context.socket(zmq.ROUTER)
    ports = [relays.bind_to_random_port("tcp://127.0.0.1") for _ in range(puller.MAX_CONNECTIONS + 4)]

    def answer() -> None:
        for _ in ports:
            sender, data = relays.recv_multipart()
            asked = messages.requests.decode(data)
            relays.send_multipart([sender, messages.encode(Chunk(asked.name, 0, 4)), b"data"])

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer)
        for port in ports:
            assert asking.read_file(f"tcp://127.0.0.1:{port}", "v0-life.safetensors", 4, 5.0) == b"data"
        answered.result(timeout=5)
    assert len(asking._sockets) == puller.MAX_CONNECTIONS, "ZeroMQ has no more than 1,023"
    relays.close(linger=0)
    context.term()


def test_a_relay_that_names_an_address_which_is_none_is_passed_over(
    publisher: Publisher, host: MakeHost
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    lie = EnlistRelay(Path(manifest.path).name, "tcp://-:5555")
    server_of(publisher).chains.find_parent(lie)
    far = host(relay=True)
    found = far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))
    assert are_equal(read_tensors(found), make_weights(0))
    assert list(far.fetcher.silent_relays) == ["tcp://-:5555"]


def test_a_host_without_a_way_to_the_publisher_has_not_the_version_for_now(
    publisher: Publisher, host: MakeHost
) -> None:
    manifest, far = publisher.publish_version(0, whole_parts(make_weights(0))), host(relay=True)
    for _ in range(2):  # no route leads to the address of all hosts, as when a link is down
        with pytest.raises(TransferFailed, match="there is no way to tcp://255.255.255.255:5556"):
            far.subscriber.prepare_version(
                announce_elsewhere(publisher, manifest, "tcp://255.255.255.255:5556")
            )
    found = far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))
    assert are_equal(read_tensors(found), make_weights(0)) and far.server is not None, "it serves then"


def test_a_clock_that_is_set_back_makes_no_older_version_the_newest(
    publisher: Publisher, host: MakeHost
) -> None:
    far, state = host(), make_weights(0)
    for version in range(12):
        manifest = publisher.publish_version(version, whole_parts(state))
        found = far.subscriber.prepare_version(announce_elsewhere(publisher, manifest))
        if version == 1:  # the clock is set back by an hour after this
            os.utime(found.manifest.locator, (time.time() + 3600, time.time() + 3600))
        far.subscriber.refresh_spare()
        assert [path.name for path in far.folder.glob("*.json")] == [f"v{version}-life.json"]
        state = change_some(state, 0.001, version)
    assert far.fetcher.patches == 11


def test_what_came_damaged_is_fetched_again_once_for_all_engines_of_a_host(
    publisher: Publisher, host: MakeHost
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    first, announced = host(), announce_elsewhere(publisher, manifest)
    engines = [first.subscriber, *(Subscriber(FetchingEnd(Fetcher(first.folder))) for _ in range(2))]
    with open(locate_manifest(first.subscriber, announced).replace(".json", ".safetensors"), "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"x")
    for engine in engines:
        with pytest.raises(DigestMismatch):
            engine.prepare_version(announced)
    found = [engine.prepare_version(announced, again=True) for engine in engines]
    assert all(are_equal(read_tensors(one), make_weights(0)) for one in found)
    assert sum(engine.fetched_bytes for engine in engines) == 2 * manifest.num_bytes
    for engine in engines[1:]:
        engine.close()


def test_a_relay_that_is_ahead_of_slow_hosts_is_asked_for_the_next_version_all_the_same(
    publisher: Publisher, host: MakeHost
) -> None:
    ahead, slow = host(relay=True), [host(relay=True), host(relay=True)]
    publisher.needed_versions = frozenset({0, 1})
    announced = []
    for version in range(4):
        manifest = publisher.publish_version(version, whole_parts(make_weights(version)))
        announced.append(announce_elsewhere(publisher, manifest))
        locate_manifest(ahead.subscriber, announced[-1])
    for late, one in enumerate(slow):  # the relay that is before it in the chain has this version no more
        assert not list(ahead.folder.glob(f"v{late}-life.safetensors"))
        assert are_equal(read_tensors(one.subscriber.prepare_version(announced[late])), make_weights(late))
    manifest = publisher.publish_version(4, whole_parts(make_weights(4)))
    announced.append(announce_elsewhere(publisher, manifest))
    before = server_of(publisher).bytes_sent
    for one in (ahead, *slow):
        assert are_equal(read_tensors(one.subscriber.prepare_version(announced[4])), make_weights(4))
    manifests = 3 * Path(manifest.locator).stat().st_size
    assert server_of(publisher).bytes_sent - before == manifest.num_bytes + manifests, "one copy"
