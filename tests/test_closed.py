"""The buffer is closed to strangers, whatever key they show and whatever they send."""

import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pyarrow as pa
import pytest
import zmq
from buffer_harness import SMALL_RUN, compress_batch, make_group
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, KeysRefused
from buffers.group_checks import ExpectedGroup, GroupFacts, check_groups
from buffers.journal import read_groups
from buffers.keys import KeyRole, make_keys
from buffers.run_status import GeneratorReport
from buffers.server import BufferServer
from buffers.trajectory import SCHEMA, SCHEMA_VERSION, MalformedGroup, encode_batch, to_batch
from configs.load import load_config

ROOT = Path(__file__).parents[1]
LEASE = m.Lease(id=1, split="train", task="t", index=0, seed=0, group=0, due=0, min_version=0, num_samples=2)


# ---- keys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    command = [
        sys.executable,
        "-P",
        "-m",
        "slipstream.keys",
        str(tmp_path / "keys"),
        "generator",
        "operator",
        "generator:friend",
    ]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "server.key_secret" in out and f"buffer.keys={tmp_path / 'keys'}" in out
    return tmp_path / "keys"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., BufferServer]]:
    running: list[tuple[BufferServer, threading.Thread]] = []

    def start(*overrides: str) -> BufferServer:
        server = BufferServer(
            load_config([*SMALL_RUN, *overrides]), tmp_path / f"journal-{len(running)}", config_text="text"
        )
        running.append((server, threading.Thread(target=server.run)))
        running[-1][1].start()
        return server

    yield start
    for server, thread in running:
        server.stop()
        thread.join(timeout=5)
        assert not thread.is_alive()


def welcome(address: str, keys: str | None, timeout_s: float = 5.0) -> str:
    client = BufferClient(address, timeout_s=timeout_s, keys=keys)
    try:
        return client.call(m.JoinRun(generator="g"), m.JoinedRun).config
    finally:
        client.close()


def test_only_clients_with_an_allowed_key_are_let_in(
    serve: Callable[..., BufferServer], keys: Path, tmp_path: Path
) -> None:
    server = serve(f"buffer.keys={keys}", "buffer.address=tcp://0.0.0.0:0", "sync.address=tcp://127.0.0.1:0")
    address = server.address.replace("0.0.0.0", "127.0.0.1")
    assert welcome(address, str(keys)) == "text"
    make_keys(tmp_path / "others", ["generator"])
    (tmp_path / "others" / "server.key").write_bytes((keys / "server.key").read_bytes())
    with pytest.raises(
        KeysRefused, match=f"buffer.keys must hold a key that the buffer at {address} lets in"
    ):
        welcome(address, str(tmp_path / "others"))
    for stranger in (None, str(impostor(tmp_path / "impostor", keys))):
        with pytest.raises((KeysRefused, BufferGone)):
            welcome(address, stranger, timeout_s=1.0)
    assert welcome(address, str(keys)) == "text", "the others have not disturbed it"


def impostor(folder: Path, keys: Path) -> Path:
    """Makes the keys of a client that the server allows, and that takes another server for the true one."""
    make_keys(folder, ["generator"])
    for name in ("generator.key", "generator.key_secret"):
        (folder / name).write_bytes((keys / name).read_bytes())
    (folder / "generator.key_secret").chmod(0o600)
    return folder


def test_what_travels_is_encrypted(serve: Callable[..., BufferServer], keys: Path) -> None:
    for with_keys, visible in ((False, True), (True, False)):
        server = serve(*([f"buffer.keys={keys}"] if with_keys else []))
        seen, port = wiretap(int(server.address.rpartition(":")[2]))
        shown = str(keys) if with_keys else None
        client = BufferClient(f"tcp://127.0.0.1:{port}", timeout_s=5.0, keys=shown, role=KeyRole.operator)
        client.call(m.StopRun(reason="a very secret reason"), m.Acknowledged)
        client.close()
        assert (b"a very secret reason" in bytes(seen)) == visible


def wiretap(port: int) -> tuple[bytearray, int]:
    """Starts a proxy in front of a port; returns (all bytes that go through it, its port)."""
    seen, listener = bytearray(), socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            seen.extend(data)
            target.sendall(data)

    def accept() -> None:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for pair in ((near, far), (far, near)):
            threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return seen, int(listener.getsockname()[1])


def test_secrets_are_for_their_owner_and_are_not_made_twice(
    keys: Path, serve: Callable[..., BufferServer]
) -> None:
    assert keys.stat().st_mode & 0o777 == 0o700
    secrets = sorted(keys.glob("*.key_secret"))
    assert [path.name for path in secrets] == [
        "friend.key_secret",
        "generator.key_secret",
        "operator.key_secret",
        "server.key_secret",
    ]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in secrets)
    allowed = sorted(str(path.relative_to(keys / "allowed")) for path in (keys / "allowed").rglob("*.key"))
    assert allowed == ["generator/friend.key", "generator/generator.key", "operator/operator.key"]
    before = [path.read_bytes() for path in secrets]
    assert (
        make_keys(keys, ["generator", "generator:friend"]) == []
        and [path.read_bytes() for path in secrets] == before
    )
    secrets[-1].chmod(0o644)
    with pytest.raises(
        ValueError, match=r"only their owner can read \(chmod 600\), got .*server.key_secret with 644"
    ):
        serve(f"buffer.keys={keys}")


def test_missing_keys_are_named_with_the_command_that_makes_them(
    tmp_path: Path, serve: Callable[..., BufferServer]
) -> None:
    with pytest.raises(
        ValueError, match=r"buffer.keys must be a folder with server.key_secret \(`scripts/keys.sh"
    ):
        serve(f"buffer.keys={tmp_path}/nowhere")
    with pytest.raises(ValueError, match="buffer.keys must be a folder with generator.key_secret"):
        BufferClient("tcp://127.0.0.1:1", keys=str(tmp_path / "nowhere"))


# ---- whatever can be sent


def obeys_all_rules(batch: pa.RecordBatch, group: int, newest: int) -> bool:
    """Checks the rules of a whole group in a slow and simple way."""
    batch.validate(full=True)
    rows = batch.to_pylist()
    assert [row["sample"] for row in rows] == [0, 1] and all(row["group"] == group for row in rows)
    for row in rows:
        length = len(row["tokens"])
        assert length >= 1 and all(len(row[name]) == length for name in ("sampled", "logprobs", "versions"))
        assert not row["sampled"][0] and all(token >= 0 for token in row["tokens"])
        assert all(
            (version >= 0) == sampled
            for version, sampled in zip(row["versions"], row["sampled"], strict=True)
        )
        assert all(version <= newest for version in row["versions"]) and np.isfinite(row["reward"])
        assert all(np.isfinite(logprob) and logprob <= 1e-3 for logprob in row["logprobs"])
    return any(any(row["sampled"]) for row in rows)


VALID = encode_batch(to_batch(make_group(LEASE))).to_pybytes()
mutations = st.lists(
    st.tuples(
        st.integers(0, len(VALID) - 1),
        st.sampled_from(["flip", "byte", "long", "int"]),
        st.integers(-(2**63), 2**63 - 1),
    ),
    min_size=1,
    max_size=4,
)


def mutate_message(changes: list[tuple[int, str, int]], data: bytes = VALID) -> bytes:
    changed = bytearray(data)
    for place, kind, value in changes:
        match kind:
            case "flip":
                changed[place] ^= 1 << value % 8
            case "byte":
                changed[place] = value % 256
            case "int":
                struct.pack_into(
                    "<i", changed, min(place // 4 * 4, len(data) - 4), (value + 2**31) % 2**32 - 2**31
                )
            case "long":
                struct.pack_into("<q", changed, min(place // 8 * 8, len(data) - 8), value)
    return bytes(changed)


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutations, st.none() | st.integers(0, len(VALID)))
def test_a_changed_message_is_refused_or_still_obeys_all_rules(
    changes: list[tuple[int, str, int]], cut: int | None
) -> None:
    data = mutate_message(changes)[:cut]
    try:
        found = check_groups(data, [ExpectedGroup(0, 0, 0, 2)], num_samples=2, newest_version=3)
    except MalformedGroup:
        return
    (facts,) = found.verdicts
    if isinstance(facts, GroupFacts):
        assert obeys_all_rules(found.batch, group=0, newest=3)
        assert facts.num_tokens == sum(sum(row) for row in found.batch["sampled"].to_pylist())


def claim_place(buffer: int, offset: int, length: int) -> bytes:
    """Returns the valid message, in which one buffer claims another place."""
    place = VALID.index(struct.pack("<qq", *buffers_of(VALID)[buffer]))
    return VALID[:place] + struct.pack("<qq", offset, length) + VALID[place + 16 :]


def buffers_of(data: bytes) -> list[list[int]]:
    from buffers.arrow_ipc import check_record_batch

    return check_record_batch(memoryview(data))[1]


def counts_buffers(more: int) -> bytes:
    """Returns the valid message, whose metadata counts so many buffers more than it has (or fewer)."""
    count = len(buffers_of(VALID))
    first = struct.pack("<qq", *buffers_of(VALID)[0])
    place = VALID.index(struct.pack("<I", count) + first)
    return VALID[:place] + struct.pack("<I", count + more) + VALID[place + 4 :]


HOSTILE = {
    "one buffer less than the schema has, that of an empty column": counts_buffers(-1),
    "a body that claims to be huge when decompressed": compress_batch(
        to_batch(make_group(LEASE))
    ).to_pybytes(),
    "a schema": SCHEMA.serialize().to_pybytes(),
    "random bytes": random.Random(0).randbytes(5000),
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a buffer beyond the end": claim_place(30, 0, 1 << 40),
    "a buffer before the beginning": claim_place(30, -64, 64),
    "a buffer whose end overflows": claim_place(30, 2**63 - 8, 2**63 - 8),
    "metadata longer than the message": b"\xff\xff\xff\xff\xff\xff\xff\x7f" + VALID[8:],
    "a stream instead of a message": SCHEMA.serialize().to_pybytes() + VALID,
    "nested nulls": pa.RecordBatch.from_pydict({"tokens": [[1, None], None]}).serialize().to_pybytes(),
    "dictionaries": pa.RecordBatch.from_pydict({"task": pa.array(["a", "b"]).dictionary_encode()})
    .serialize()
    .to_pybytes(),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_buffers_are_malformed(kind: str) -> None:
    with pytest.raises(MalformedGroup):
        check_groups(HOSTILE[kind], [ExpectedGroup(0, 0, 0, 2)], num_samples=2, newest_version=3)


SERVER = """
import sys; from pathlib import Path
from buffers.server import BufferServer; from configs.load import load_config
server = BufferServer(load_config(sys.argv[2:]), Path(sys.argv[1]))
print(server.address, flush=True); server.run()
"""


def test_a_run_goes_on_while_strangers_send_whatever_they_like(tmp_path: Path) -> None:
    overrides = [
        *SMALL_RUN,
        "run.steps=100000",
        "staleness.max_versions=2",
        "buffer.max_attempts=100000",
        "buffer.lease_s=2",
    ]
    command = [sys.executable, "-c", SERVER, str(tmp_path), *overrides]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    client = BufferClient(address, timeout_s=10.0)
    client.call(m.PublishVersion(version=0, manifest_locator="w"), m.Acknowledged)
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(address)
    rng, step, deadline = random.Random(7), 0, time.monotonic() + 8
    before, sent = psutil.Process(server.pid).memory_info().rss, 0
    held: list[m.Lease] = []
    while time.monotonic() < deadline:
        for _ in range(30):
            stranger.send_multipart(make_nonsense(rng, held), copy=False)
            sent += 1
        while stranger.poll(0):
            stranger.recv_multipart()
        held = client.call(m.RequestLeases(generator="honest", count=4, wait_s=0.0), m.LeaseGrant).leases
        for lease in held:
            client.submit_groups(
                "honest",
                [lease.id],
                [lease.num_samples],
                to_batch(make_group(lease, version=lease.min_version)),
            )
        taken = client.take_batch(step, wait_s=0.0)
        if not isinstance(taken, m.NotReadyYet | m.RunStopped):
            done = m.ReportTrainedStep(step=step, num_trained=8, idle_s=0.0, alive_s=1.0, metrics={})
            client.call(done, m.Acknowledged)
            step += 1
            client.call(m.PublishVersion(version=step, manifest_locator=f"w{step}"), m.Acknowledged)
    status = client.call(m.WatchRun(after=sys.maxsize, wait_s=0.0), m.RunNews).status
    assert server.poll() is None and step > 20 and sent > 1000, status
    assert psutil.Process(server.pid).memory_info().rss - before < 200 << 20
    assert set(status.refused_requests) <= {
        "malformed message",
        "malformed group",
        "malformed evaluation",
        "wrong step",
        "wrong version",
        "wrong count",
        "out of bounds",
        "another's lease",
    }
    assert (
        status.refused_requests["malformed message"] > 100 and status.refused_requests["malformed group"] > 0
    )
    tokens, groups = status.tokens, status.groups
    assert tokens.total == tokens.trained + tokens.masked + sum(tokens.rejected.values()) + tokens.in_flight
    assert (
        groups.total == groups.trained + sum(groups.rejected.values()) + groups.in_flight
        and groups.trained == 2 * step
    )
    client.close()
    stranger.close()
    server.kill()
    server.wait()
    stored = list(read_groups(tmp_path))
    assert len(stored) >= 2 * step
    assert all(obeys_all_rules(batch, batch["group"][0].as_py(), newest=step) for batch in stored)


def make_nonsense(rng: random.Random, leases: list[m.Lease]) -> list[bytes]:
    """Returns a stranger's message that is broken at one level or another."""
    number = rng.randbytes(8)
    lease = rng.choice(leases).id if leases and rng.random() < 0.5 else rng.randrange(2**62)
    wrong = make_group(LEASE) if rng.random() < 0.5 else make_group(LEASE, reward=float("nan"))
    submit = m.encoder.encode(
        m.SubmitGroups(generator="stranger", leases=[lease], rows=[2], schema=SCHEMA_VERSION)
    )
    payload = rng.choice(
        [
            mutate_message([(rng.randrange(len(VALID)), "byte", rng.getrandbits(8))]),
            *HOSTILE.values(),
            encode_batch(to_batch(wrong)).to_pybytes(),
        ]
    )
    request = rng.choice(
        [
            m.GeneratorHeartbeat(
                generator="x" * rng.choice([1, 150]),
                progress={lease: rng.choice([-5, 0, 3])},
                report=GeneratorReport(),
            ),
            m.PublishVersion(version=-5, manifest_locator=""),
            m.ReportTrainedStep(step=-3, num_trained=1, idle_s=0, alive_s=0, metrics={}),
            m.RequestBatch(step=-1, wait_s=float("inf")),
            m.WatchRun(after=-7, wait_s=float("nan")),
            m.SubmitEvaluation(
                generator="s",
                lease=lease,
                rewards=[float("nan")],
                num_tokens=0,
                oldest_version=0,
                newest_version=0,
            ),
            m.ReportTrainedStep(step=10**9, num_trained=1, idle_s=0, alive_s=0, metrics={}),
            m.LeaveRun(generator="stranger"),
        ]
    )
    return rng.choice(
        [
            [],
            [number],
            [number, rng.randbytes(rng.randrange(200))],
            [number, submit],
            [number, submit, payload],
            [number, submit, payload, payload],
            [number, submit, *[b"x"] * rng.randrange(3, 50)],
            [number * 20, submit, payload],
            [number, m.encoder.encode(request)],
            [number, m.encoder.encode(request)[: rng.randrange(20)]],
            [
                number,
                msgspec.msgpack.encode(
                    {
                        "type": "RequestLeases",
                        "generator": rng.choice([1, None, "a" * 300]),
                        "count": 1,
                        "wait_s": 1,
                    }
                ),
            ],
            [number, msgspec.msgpack.encode({"type": rng.choice(["Nope", "Lease", 7])})],
        ]
    ) or [b""]
