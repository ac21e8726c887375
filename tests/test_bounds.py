"""Nothing that arrives can overflow, hang or fill the buffer: every field has a bound, and so has every
queue."""

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import psutil
import pytest
import zmq
from buffer_harness import SMALL_RUN, BufferHarness, make_group
from msgspec import inspect
from raw_clients import open_raw_client

from buffers import client as buffer_client
from buffers import messages as m
from buffers.buffer import LeaseRoom
from buffers.client import BufferClient, RefusedByBuffer, TooLarge, send_groups
from buffers.connections import BorrowedDescriptor
from buffers.immediate_answers import ImmediateAnswers
from buffers.message_fields import MAX_TEXT, RoleName, shorten
from buffers.role_registry import MAX_GENERATORS, MAX_SUM, RoleRegistry
from buffers.run_status import GeneratorReport
from buffers.server import BufferServer
from buffers.trajectory import SCHEMA_VERSION, encode_batch, to_batch
from buffers.vocabulary import read_vocabulary
from buffers.waiting_room import MAX_WAITERS_OF_CLIENT
from configs.load import load_config


def find_unbounded(kind: inspect.Type, path: str) -> Iterator[str]:
    """Yields the places in a type at which a number, a text or a collection may be of any size."""
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema={"description": _}):
            assert isinstance(inner, inspect.FloatType), f"{path} is any {inner}"  # said to be any number
        case inspect.Metadata(type=inner):
            yield from find_unbounded(inner, path)
        case inspect.IntType() | inspect.FloatType():
            if kind.ge is None or kind.le is None:
                yield path
        case inspect.StrType() | inspect.BytesType():
            if kind.max_length is None:
                yield path
        case (
            inspect.ListType(item_type=item)
            | inspect.VarTupleType(item_type=item)
            | inspect.SetType(item_type=item)
        ):
            if kind.max_length is None:
                yield path
            yield from find_unbounded(item, f"{path}[]")
        case inspect.DictType(key_type=key, value_type=value):
            if kind.max_length is None:
                yield path
            yield from find_unbounded(key, f"{path}.key")
            yield from find_unbounded(value, f"{path}.value")
        case inspect.UnionType(types=types):
            for one in types:
                yield from find_unbounded(one, path)
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from find_unbounded(field.type, f"{path}.{field.name}")
        case inspect.TupleType(item_types=types):
            for number, one in enumerate(types):
                yield from find_unbounded(one, f"{path}[{number}]")
        case inspect.BoolType() | inspect.NoneType() | inspect.EnumType() | inspect.LiteralType():
            pass
        case _:
            yield f"{path}, a {kind}"


@pytest.mark.parametrize("request_type", get_args(m.Request), ids=lambda kind: kind.__name__)
def test_every_field_of_a_request_has_a_bound(request_type: type) -> None:
    assert list(find_unbounded(inspect.type_info(request_type), request_type.__name__)) == []


def test_the_test_of_bounds_finds_a_field_without_one() -> None:
    class Loose(msgspec.Struct):
        number: int
        words: list[RoleName]
        text: str | None = None

    assert list(find_unbounded(inspect.type_info(Loose), "Loose")) == [
        "Loose.number",
        "Loose.words",
        "Loose.text",
    ]


def send_requests(address: str, *bodies: bytes) -> list[m.Reply]:
    """Sends these bytes as requests; returns the buffer's answers."""
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(address)
    try:
        for number, body in enumerate(bodies):
            stranger.send_multipart([bytes([number]), body])
        answers = {}
        while len(answers) < len(bodies):
            assert stranger.poll(5000), f"{len(bodies) - len(answers)} requests have no answer"
            number, reply = stranger.recv_multipart()
            answers[number[0]] = m.reply_decoder.decode(reply)
        return [answers[number] for number in range(len(bodies))]
    finally:
        stranger.close()


@pytest.mark.parametrize(
    "opening", [b"\x91", b"\x81\xa1a", b"\x81\x01"], ids=["lists", "maps", "maps of ints"]
)
@pytest.mark.parametrize("depth", [1_000, 60_000])
def test_deep_nesting_in_a_field_that_nobody_knows_is_refused(
    harness: Callable[..., BufferHarness], opening: bytes, depth: int
) -> None:
    run = harness()
    plain = m.encoder.encode(m.RequestLeases(generator="g", count=1, wait_s=0.0))
    nested = bytes([plain[0] + 1]) + plain[1:] + b"\xa7unknown" + opening * depth + b"\xc0"
    (reply,) = send_requests(run.server.address, nested)
    assert isinstance(reply, m.RefusedRequest), reply
    assert run.status().refused_requests == {"malformed message": 1}


EXTREMES = [-(2**63), -1, 2**31, 2**40 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def test_no_number_overflows_the_status_or_the_log(
    harness: Callable[..., BufferHarness], tmp_path: Path
) -> None:
    """Sends every integer of every request at its extremes, then replays the log."""
    run = harness("staleness.max_versions=1")
    run.publish(0)
    lease, *_ = run.ask()
    bodies = [
        msgspec.msgpack.encode(fields)
        for value in (*EXTREMES, float("nan"), float("inf"), 1e308)
        for fields in make_extreme_requests(lease.id, value)
    ]
    for reply in send_requests(run.server.address, *bodies[:200]):
        assert not isinstance(reply, m.RunStopped), reply
    before = run.status()
    assert run.server.buffer.book.ledger.closes() and before.tokens.total < 1000, before.tokens
    assert (
        before.refused_requests["malformed message"] + before.refused_requests.get("out of bounds", 0)
        > len(bodies) // 2
    )
    run.close()
    again = BufferHarness(load_config([*SMALL_RUN, "staleness.max_versions=1"]), tmp_path / "journal")
    assert again.status().tokens == before.tokens
    again.close()


def make_extreme_requests(lease: int, value: Any) -> list[dict[str, Any]]:
    """Returns requests in which one number has this value."""
    told = {"generator": "x", "progress": {}, "report": {}}
    answered = {"generator": "x", "lease": lease, "rewards": [1.0], "num_tokens": 1}
    answered |= {"oldest_version": 0, "newest_version": 0}
    return [
        {"type": "FailLease", "generator": "x", "lease": 5, "num_tokens": value, "error": "e"},
        {"type": "FailLease", "generator": "x", "lease": lease, "num_tokens": value, "error": "e"},
        {"type": "FailLease", "generator": "x", "lease": value, "num_tokens": 1, "error": "e"},
        {"type": "GeneratorHeartbeat", **told, "progress": {lease: value}},
        {"type": "GeneratorHeartbeat", **told, "report": {"sampled_tokens": value, "idle_s": value}},
        {"type": "ReportCheckpoint", "step": value, "oldest": value},
        {"type": "ReportCheckpoint", "step": 0, "oldest": value},
        {"type": "RewindToStep", "step": value},
        {"type": "SubmitEvaluation", **answered, "rewards": [value]},
        {"type": "SubmitEvaluation", **answered, "num_tokens": value},
        {"type": "SubmitEvaluation", **answered, "oldest_version": value, "newest_version": value},
        {
            "type": "ReportTrainedStep",
            "step": 0,
            "num_trained": value,
            "idle_s": value,
            "alive_s": 1.0,
            "metrics": {"m": value},
        },
        {"type": "WatchRun", "after": value, "wait_s": 0.0},
        {"type": "WatchRun", "after": 0, "wait_s": value} if value != 2**31 else {"type": "LocateJournal"},
        {"type": "RequestLeases", "generator": "x", "count": value, "wait_s": 0.0}
        if abs(value) > 2**14
        else {"type": "LocateJournal"},
        {"type": "PublishVersion", "version": value, "manifest_locator": "w"},
    ]


def test_a_lease_cannot_have_more_tokens_than_it_can_sample(harness: Callable[..., BufferHarness]) -> None:
    run = harness("sampling.max_tokens=8", "generators.max_model_len=100", "episodes.max_turns=3")
    run.publish(0)
    lease, *_ = run.ask()
    most = 2 * 3 * 100
    with pytest.raises(
        RefusedByBuffer, match=f"num_tokens of a lease must be at most {most}, got {most + 1}"
    ):
        run.client.call(
            m.FailLease(generator="g", lease=lease.id, num_tokens=most + 1, error="e"), m.LeaseReceipt
        )
    with pytest.raises(RefusedByBuffer, match=f"progress of a lease must be at most {most}, got {most + 1}"):
        beat = m.GeneratorHeartbeat(generator="g", progress={lease.id: most + 1}, report=GeneratorReport())
        run.client.call(beat, m.GeneratorStanding)
    run.client.call(m.FailLease(generator="g", lease=lease.id, num_tokens=most, error="e"), m.LeaseReceipt)
    status = run.status()
    assert status.tokens.total == most and status.refused_requests == {"out of bounds": 2}


def test_a_checkpoint_is_of_a_step_that_was_trained(harness: Callable[..., BufferHarness]) -> None:
    run = harness()
    run.publish(0)
    for step, oldest in ((2**31 - 1, 0), (0, 2**31 - 1), (1, 0)):
        with pytest.raises(RefusedByBuffer, match="must be at most 0, got"):
            run.client.call(m.ReportCheckpoint(step=step, oldest=oldest), m.Acknowledged)
    run.client.call(m.ReportCheckpoint(step=0, oldest=0), m.Acknowledged)


def test_a_text_that_is_too_long_for_a_message_keeps_its_beginning_and_its_end() -> None:
    text = shorten("KeyError: begins" + "x" * (1 << 20) + "ends")
    assert len(text) <= MAX_TEXT and text.startswith("KeyError: begins") and text.endswith("ends")
    assert "1,048,596 characters" in text and shorten("short") == "short"
    m.decode_request(m.encoder.encode(m.FailLease(generator="g", lease=1, num_tokens=1, error=text)))


def test_running_totals_stop_where_an_answer_could_not_hold_them() -> None:
    registry, most = RoleRegistry(), GeneratorReport(sampled_tokens=2**50, update_bytes=2**50, updates=2**50)
    for life in range(5000):
        name = f"g{life % 3}"
        registry.begin_life(name, now=0.0)
        registry.note_generator(m.GeneratorHeartbeat(generator=name, progress={}, report=most), now=0.0)
    assert registry.summarize(0.0)["weight_bytes"] <= MAX_SUM + 3 * 2**50
    for number in range(3 * MAX_GENERATORS):
        registry.begin_life(f"other{number}", now=0.0)
    assert len(registry.summarize(0.0)["generators"]) == MAX_GENERATORS
    assert registry.summarize(0.0)["weight_bytes"] == MAX_SUM, "what the forgotten have done still counts"


# ---- sizes


def test_a_client_does_not_send_what_no_buffer_takes_in(
    harness: Callable[..., BufferHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = harness("staleness.max_versions=1")
    run.publish(0)
    leases = run.ask()
    rows = [row for lease in leases for row in make_group(lease)]
    one = encode_batch(to_batch(rows[:2])).size
    monkeypatch.setattr(m, "MAX_PAYLOAD_BYTES", one + 100)
    with pytest.raises(TooLarge, match=rf"must have at most {one + 100:,} bytes together, got"):
        run.client.submit_groups("g", [lease.id for lease in leases], [2] * len(leases), to_batch(rows))
    assert not run.client._unanswered, "nothing waits to be sent again"
    send_groups(run.client, "g", [lease.id for lease in leases], [2] * len(leases), to_batch(rows))
    assert collect_verdicts(run.client, len(leases)) == {lease.id: "accepted" for lease in leases}
    assert run.train(0) == [0, 1]


def test_a_group_that_is_too_large_for_a_message_fails_by_its_size_and_the_others_are_taken(
    harness: Callable[..., BufferHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = harness("staleness.max_versions=0", "buffer.max_attempts=1", "generators.max_model_len=5000")
    run.publish(0)
    leases = run.ask()
    length = 4000
    large = {"tokens": [1] * length, "sampled": [False] + [True] * (length - 1)}
    large |= {"logprobs": [0.0] + [-1.0] * (length - 1), "versions": [-1] + [0] * (length - 1)}
    rows = make_group(leases[0], **large) + make_group(leases[1])
    monkeypatch.setattr(m, "MAX_PAYLOAD_BYTES", 20_000)
    send_groups(run.client, "g", [lease.id for lease in leases], [2] * len(leases), to_batch(rows))
    assert collect_verdicts(run.client, 2) == {leases[0].id: "failed", leases[1].id: "accepted"}
    status = run.status()
    assert "must have at most 20,000 bytes together, got" in status.quarantined[0]
    assert status.tokens.rejected["failed"] == 2 * (length - 1)


def collect_verdicts(client: BufferClient, count: int) -> dict[int, str]:
    found: dict[int, str] = {}
    while len(found) < count:
        for answer in client.receive_answers(5.0):
            assert isinstance(answer.reply, m.LeaseReceipt), answer
            found |= dict(zip(answer.reply.leases, answer.reply.verdicts, strict=True))
    return found


def test_a_request_with_four_million_leases_is_refused_and_nothing_is_logged(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness()
    run.publish(0)
    log = run.server.buffer.journal.folder
    before = sum(path.stat().st_size for path in log.rglob("*") if path.is_file())
    many = {"type": "SubmitGroups", "generator": "g", "leases": [0] * 900_000, "schema": 1}
    too_many = {"type": "SubmitGroups", "generator": "g", "leases": [0] * 4_000_000, "schema": 1}
    replies = send_requests(
        run.server.address, msgspec.msgpack.encode(many), msgspec.msgpack.encode(too_many)
    )
    assert all(isinstance(reply, m.RefusedRequest) for reply in replies)
    assert run.status().refused_requests == {"malformed message": 2}
    assert sum(path.stat().st_size for path in log.rglob("*") if path.is_file()) == before


# ---- queues


def test_whoever_asks_without_end_is_refused_and_others_are_served(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness()
    greedy = BufferClient(run.server.address, timeout_s=5.0)
    for number in range(MAX_WAITERS_OF_CLIENT + 50):
        greedy.send_request(m.RequestLeases(generator=f"greedy-{number}", count=1, wait_s=50.0))
    refused = 0
    while refused < 50:
        refused += sum(isinstance(answer.reply, m.RefusedRequest) for answer in greedy.receive_answers(5.0))
    run.publish(0)
    assert run.status().refused_requests == {"too many requests": 50}
    greedy.close()


def test_a_message_that_never_ends_costs_its_sender_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client by hand: every frame says that more follow. What ZeroMQ keeps of it must stay below the
    limit."""
    monkeypatch.setattr(m, "MAX_PAYLOAD_BYTES", 32 << 20)
    server = BufferServer(load_config(SMALL_RUN), tmp_path / "journal")
    thread = threading.Thread(target=server.run)
    thread.start()
    honest = BufferClient(server.address, timeout_s=5.0)
    honest.call(m.PublishVersion(version=0, manifest_locator="w"), m.Acknowledged)
    before, sent = psutil.Process().memory_info().rss, 0
    stranger = open_raw_client(int(server.address.rpartition(":")[2]))
    frame = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)  # a long frame, and more follow
    peak, broken = before, False
    for _ in range(400):
        try:
            stranger.sendall(frame)
        except OSError:
            broken = True
            break
        sent += 1
        peak = max(peak, psutil.Process().memory_info().rss)
        honest.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
    status = honest.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status
    assert broken and sent < 200, f"{sent} MB of one message were taken in"
    assert status.refused_requests["unfinished message"] == 1 and peak - before < 150 << 20, (
        peak - before
    ) >> 20
    for client in (honest, stranger):
        client.close()
    server.stop()
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_honest_traffic_is_never_taken_for_an_unfinished_message(
    harness: Callable[..., BufferHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel and the server count the bytes that a connection has sent: the two stay equal."""
    run = harness("staleness.max_versions=3", "run.steps=50")
    rng = random.Random(1)
    run.publish(0)
    for _ in range(300):
        beat = m.GeneratorHeartbeat(
            generator="g" * rng.randint(1, 200),
            progress=dict.fromkeys(range(rng.randint(0, 400)), 1),
            report=GeneratorReport(),
        )
        run.client.call(beat, m.GeneratorStanding)
    for lease in run.ask():
        run.submit(lease)
    loan = BorrowedDescriptor()
    for fd, connection in run.server._connections._open.items():
        acked, received = loan.ask_kernel(fd, connection)
        assert abs(received - connection.num_read) < 500 and abs(connection.num_sent - acked) < 500, (
            connection
        )
        assert connection.num_read > 100_000
    loan.close()


def test_a_client_that_takes_no_answers_loses_its_connection(
    harness: Callable[..., BufferHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffers.server.MAX_UNREAD_BYTES", 16 << 20)
    huge = m.RefusedRequest(reason="x" * (1 << 20))
    monkeypatch.setattr(ImmediateAnswers, "carry_out", lambda *_: (huge, []))
    run = harness()
    deaf = open_raw_client(int(run.server.address.rpartition(":")[2]))
    body = m.encoder.encode(m.LocateJournal())
    message = b"\x01\x01n\x00" + bytes([len(body)]) + body
    before, deadline = psutil.Process().memory_info().rss, time.monotonic() + 60
    with pytest.raises(OSError):
        while time.monotonic() < deadline:
            deaf.sendall(message)
            time.sleep(0.01)
    assert psutil.Process().memory_info().rss - before < 150 << 20
    assert run.status().refused_requests["unread answers"] == 1
    deaf.close()


def test_clients_that_take_no_answers_share_a_bound_and_an_honest_one_is_served(
    harness: Callable[..., BufferHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffers.server.MAX_TOTAL_UNREAD_BYTES", 64 << 20)
    run = harness()
    huge = m.RefusedRequest(reason="x" * (1 << 20))
    carry_out = ImmediateAnswers.carry_out

    def answer(self: ImmediateAnswers, request: Any, payload: Any) -> Any:
        return (huge, []) if isinstance(request, m.LocateJournal) else carry_out(self, request, payload)

    monkeypatch.setattr(ImmediateAnswers, "carry_out", answer)
    deaf = [open_raw_client(int(run.server.address.rpartition(":")[2])) for _ in range(6)]
    body = m.encoder.encode(m.LocateJournal())
    message = b"\x01\x01n\x00" + bytes([len(body)]) + body
    before, deadline, ended = psutil.Process().memory_info().rss, time.monotonic() + 60, set[int]()
    for _ in range(30):  # 30 MB each, far below what one of them may leave
        for number, one in enumerate(deaf):
            try:
                one.sendall(message)
            except OSError:
                ended.add(number)
        run.status()
    while run.status().refused_requests.get("unread answers", 0) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 3 <= run.status().refused_requests["unread answers"] <= 5, "the others stay"
    assert psutil.Process().memory_info().rss - before < 250 << 20
    for one in deaf:
        one.close()


# ---- the dead


def num_connections(run: BufferHarness) -> int:
    """Returns the number of clients' connections to the server, at its end."""
    port = int(run.server.address.rpartition(":")[2])
    return sum(bool(one.raddr) and one.laddr.port == port for one in psutil.Process().net_connections("tcp"))


def test_leases_do_not_go_to_a_generator_that_has_gone(harness: Callable[..., BufferHarness]) -> None:
    run = harness("staleness.max_versions=0", "buffer.lease_s=600")
    dead = BufferClient(run.server.address, timeout_s=5.0)
    dead.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
    dead.send_request(m.RequestLeases(generator="dead", count=100, wait_s=60.0))
    deadline = time.monotonic() + 60
    while not run.server._waiting_room.lease_requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    dead._socket.setsockopt(zmq.LINGER, 0)
    open_before = num_connections(run)
    dead.close()  # as a kill would: the question stays behind
    while num_connections(run) == open_before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.publish(0)
    run.client.call(m.WatchRun(after=0, wait_s=0.2), m.RunNews)
    groups = [lease.group for lease in run.ask()]
    assert groups == [0, 1], "what the dead had asked for is given to the living at once"
    assert run.status().num_quarantined == 0


@pytest.mark.parametrize(
    "farewell", [m.LeaveRun(generator="g"), m.JoinRun(generator="g")], ids=["leaves", "joins again"]
)
def test_what_a_generator_asked_in_an_earlier_life_is_forgotten(
    harness: Callable[..., BufferHarness], farewell: m.Request
) -> None:
    run = harness("staleness.max_versions=0", "buffer.lease_s=600")
    earlier = BufferClient(run.server.address, timeout_s=5.0)
    earlier.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
    earlier.send_request(m.RequestLeases(generator="g", count=100, wait_s=60.0))
    deadline = time.monotonic() + 60
    while not run.server._waiting_room.lease_requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.client.exchange(farewell)
    run.publish(0)
    run.client.call(m.WatchRun(after=0, wait_s=0.2), m.RunNews)
    assert [
        lease.group
        for lease in run.client.call(m.RequestLeases(generator="h", count=9, wait_s=0.0), m.LeaseGrant).leases
    ] == [
        0,
        1,
    ]
    earlier.close()


# ---- a server that dies in the handshake


def test_a_server_that_dies_in_the_handshake_does_not_look_like_refused_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first connections are accepted and closed; then the true buffer is there."""
    monkeypatch.setattr(buffer_client, "BROKEN_S", 60.0)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    client = BufferClient(f"tcp://127.0.0.1:{port}", timeout_s=20.0)
    number = client.send_request(m.LocateJournal())
    for _ in range(3):
        connection, _ = listener.accept()
        connection.recv(10)
        connection.close()
        assert not list(client.receive_answers(0.2))
    listener.close()
    assert not list(client.receive_answers(0.5)), "nobody listens: no reason to think of keys either"
    server = BufferServer(
        load_config([*SMALL_RUN, f"buffer.address=tcp://127.0.0.1:{port}"]), tmp_path / "journal"
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    answers: list[int] = []
    while not answers:
        answers = [answer.number for answer in client.receive_answers(5.0)]
    assert answers == [number]
    client.close()
    server.stop()
    thread.join(timeout=5)


def test_a_server_that_breaks_off_every_handshake_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    client = BufferClient(f"tcp://127.0.0.1:{listener.getsockname()[1]}", timeout_s=20.0)
    client.send_request(m.LocateJournal())
    stop = threading.Event()

    def break_off() -> None:
        listener.settimeout(0.2)
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.recv(10)
            connection.close()

    thread = threading.Thread(target=break_off)
    thread.start()
    began = time.monotonic()
    with pytest.raises(buffer_client.KeysRefused, match="it has broken off every handshake"):
        while time.monotonic() - began < 20:
            list(client.receive_answers(0.5))
    assert time.monotonic() - began > buffer_client.BROKEN_S
    stop.set()
    thread.join()
    listener.close()
    client.close()


def test_a_server_whose_journal_cannot_be_closed_lets_go_of_its_sockets_and_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = BufferServer(load_config(SMALL_RUN), tmp_path / "journal")
    closes = server.buffer.close

    def fail(*, in_good_order: bool) -> None:
        closes(in_good_order=in_good_order)
        raise OSError("the disk is full")

    monkeypatch.setattr(server.buffer, "close", fail)
    with pytest.raises(OSError, match="the disk is full"):
        server.close()
    assert server._context.closed and server._socket.closed


def test_a_lease_beside_its_predecessor_in_a_refused_message_is_given_out_again(
    harness: Callable[..., BufferHarness],
) -> None:
    """Two leases of one group in one submission: neither may hold the group for ever when the message is
    refused."""
    one = harness("buffer.lease_s=1", "buffer.max_attempts=100")
    one.publish(0)
    (old,) = one.ask(1)
    new, deadline = old, time.monotonic() + 30
    while new.group != old.group or new.id == old.id:
        (new,) = one.ask(1) or [old]
        assert time.monotonic() < deadline
    rows = make_group(old, tokens=[-1, 6, 7]) + make_group(new)
    request = m.SubmitGroups(generator="g", leases=[old.id, new.id], rows=[2, 2], schema=SCHEMA_VERSION)
    receipt, _ = one.client.exchange(request, payload=encode_batch(to_batch(rows)))
    assert isinstance(receipt, m.LeaseReceipt) and receipt.verdicts == ["failed", "failed"]
    while old.group not in [lease.group for lease in one.ask()]:
        assert time.monotonic() < deadline, one.server.buffer.book.list_groups()[old.group]


def test_nobody_speaks_for_the_leases_of_another(harness: Callable[..., BufferHarness]) -> None:
    run = harness()
    run.publish(0)
    (lease,) = run.ask(1)
    deadline = run.server.buffer.book.leases.attempts.under_way[lease.id].deadline
    beat = m.GeneratorHeartbeat(generator="stranger", progress={lease.id: 1}, report=GeneratorReport())
    assert run.client.call(beat, m.GeneratorStanding).revoked == []
    assert run.server.buffer.book.leases.attempts.under_way[lease.id].deadline == deadline, "not renewed"
    with pytest.raises(RefusedByBuffer, match="is g's, got a failure from stranger"):
        run.client.call(
            m.FailLease(generator="stranger", lease=lease.id, num_tokens=0, error=""), m.LeaseReceipt
        )
    with pytest.raises(RefusedByBuffer, match="is g's, got a group from stranger"):
        run.client.submit_groups("stranger", [lease.id], [lease.num_samples], to_batch(make_group(lease)))
    assert run.submit(lease) == "accepted"
    assert run.status().refused_requests == {"another's lease": 2}


def test_nobody_answers_the_evaluation_prompts_of_another(harness: Callable[..., BufferHarness]) -> None:
    run = harness("eval.prompts=1")
    run.publish(0)
    lease = next(lease for lease in run.ask(3) if lease.split == "eval")
    with pytest.raises(RefusedByBuffer, match="is g's, got a score from stranger"):
        run.answer(lease, 9.0, generator="stranger")
    assert run.answer(lease, 3.4e38) == "accepted"
    (score,) = run.evaluations()
    assert score.avg == pytest.approx(3.4e38), "as large as a score may be, and from whom it was asked"


def test_what_is_said_of_an_unknown_lease_is_not_worth_a_line_in_the_journal(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness()
    run.publish(0)
    (lease,) = run.ask(1)
    folder = run.server.buffer.journal.folder

    def size() -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    before = size()
    for _ in range(20):
        run.client.call(m.FailLease(generator="g", lease=7, num_tokens=3, error="x" * 1000), m.LeaseReceipt)
        run.client.submit_groups("g", [7], [2], to_batch(make_group(lease)))
    assert size() == before and run.status().tokens.total == 0


def test_a_lease_of_steps_that_were_undone_is_remembered_and_cannot_come_in(
    harness: Callable[..., BufferHarness],
) -> None:
    """A lost lease counts the last report of its generator once: 3 tokens by heartbeat, 5 in the end."""
    run = harness("staleness.max_versions=1", "generators.max_model_len=100")
    for version in range(3):
        run.publish(version)
        leases = run.ask()
        if version < 2:
            assert all(
                run.submit(lease, encode_batch(to_batch(make_group(lease)))) == "accepted" for lease in leases
            )
            run.train(version)
    late = leases[-1]
    beat = m.GeneratorHeartbeat(generator="g", progress={late.id: 3}, report=GeneratorReport())
    run.client.call(beat, m.GeneratorStanding)
    before = run.status().tokens.total
    run.client.call(m.RewindToStep(step=0), m.Acknowledged)
    assert run.client.call(beat, m.GeneratorStanding).revoked == [late.id]
    said = m.FailLease(generator="g", lease=late.id, num_tokens=5, error="revoked", revoked=True)
    run.client.call(said, m.LeaseReceipt)
    assert run.status().tokens.total == before + 2 and run.submit(late) == "duplicate"


def test_a_step_without_the_mean_reward_does_not_end_the_run(
    harness: Callable[..., BufferHarness], tmp_path: Path
) -> None:
    from slipstream.live_view import LiveView
    from slipstream.run_record import RunRecord

    run = harness()
    run.publish(0)
    for lease in run.ask():
        run.submit(lease)
    run.train(0)  # says nothing of it
    news = run.client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
    config = load_config(SMALL_RUN)
    record, view = RunRecord(config, tmp_path, None), LiveView(config, tmp_path, None)
    record.record_news(news)
    view.show_news(news)
    record.close("finished")
    view.print_conclusion("finished", news)
    assert '"first": null' in (tmp_path / "summary.json").read_text()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {
                "tokens": [1] * 200,
                "sampled": [False] + [True] * 199,
                "logprobs": [0.0] + [-1.0] * 199,
                "versions": [-1] + [0] * 199,
            },
            "a trajectory must hold at most 72 tokens",
        ),
        ({"rewards": {"greedy": float("nan")}}, "rewards must be finite"),
        ({"rewards": {"a": 1.0, "b": float("inf")}}, "rewards must be finite"),
    ],
)
def test_rows_that_no_engine_makes_are_refused(
    harness: Callable[..., BufferHarness],
    changes: dict[str, object],
    rule: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = harness("generators.max_model_len=64", "sampling.max_tokens=8")
    run.publish(0)
    (lease,) = run.ask(1)
    assert run.submit(lease, encode_batch(to_batch(make_group(lease, **changes)))) == "failed"
    assert rule in caplog.text
    (again,) = [lease for lease in run.ask(100) if lease.group == 0]
    assert run.submit(again) == "accepted"


def test_a_token_that_the_model_does_not_know_is_refused_at_the_door_also_after_a_restart(
    harness: Callable[..., BufferHarness], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 8}')
    for life in range(2):
        run = harness(f"model.path={tmp_path / 'model'}")
        run.publish(life)
        lease, another = run.ask(2)
        assert run.submit(lease, encode_batch(to_batch(make_group(lease, tokens=[5, 6, 8])))) == "failed"
        assert "tokens must be below 8, the size of the model's vocabulary" in caplog.text
        assert run.status().refused_requests == {"malformed group": 1}
        assert (
            run.submit(another, encode_batch(to_batch(make_group(another, tokens=[5, 6, 7])))) == "accepted"
        )
        if life == 0:
            run.close()
            caplog.clear()


def test_the_vocabulary_is_as_large_as_the_model_says(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path) == 2**31, "no model at all"
    for told, size in (
        ('{"vocab_size": 320}', 320),
        ('{"text_config": {"vocab_size": 7}}', 7),
        ("{}", 2**31),
    ):
        (tmp_path / "config.json").write_text(told)
        assert read_vocabulary(tmp_path) == size


def test_a_generator_that_asks_anew_waits_once(harness: Callable[..., BufferHarness]) -> None:
    run = harness()
    asked = [
        run.client.send_request(m.RequestLeases(generator="g", count=1, wait_s=20.0, version=version))
        for version in (-1, 0, 1)
    ]
    answers = list[Any]()
    while len(answers) < 2:
        answers += run.client.receive_answers(1.0)
    assert [(one.number, one.reply.leases) for one in answers] == [(asked[0], []), (asked[1], [])]
    (waiter,) = run.server._waiting_room.lease_requests.values()
    assert waiter.request.version == 1


def test_requests_bring_no_work_of_the_clock_forward(tmp_path: Path) -> None:
    """The clock stands still: after the first tick there is no other, however many requests come. One that
    may not wait is answered all the same."""
    server = BufferServer(load_config(SMALL_RUN), tmp_path, clock=lambda: 0.0)
    looks = list[bool]()
    check_connections = server._check_connections
    server._check_connections = lambda: (looks.append(True), check_connections())  # type: ignore[assignment]
    thread = threading.Thread(target=server.run)
    thread.start()
    client = BufferClient(server.address, timeout_s=20.0)
    try:
        for number in range(50):
            client.send_request(m.RequestLeases(generator=f"g{number}", count=1, wait_s=5.0))
            client.call(m.RequestLeases(generator="hasty", count=1, wait_s=0.0), m.LeaseGrant)
    finally:
        client.close()
        server.stop()
        thread.join()
    assert len(looks) == 1


@pytest.mark.parametrize("held_back_by", ["buffer.max_groups=2", "eval.generators=1"])
def test_those_who_wait_cost_nothing_while_there_is_nothing_for_them(
    held_back_by: str, harness: Callable[..., BufferHarness]
) -> None:
    """A budget is reached, or all that is to be had are prompts for others. There may be a thousand of them
    in each turn of the loop."""
    for_others = ["eval.prompts=64", "staleness.max_versions=0"] if held_back_by.startswith("eval") else []
    run = harness(held_back_by, "staleness.max_versions=3", *for_others)
    run.publish(0)
    mine = run.ask(2)
    assert len(mine) == 2
    tried = Counter[str]()
    lease_next = run.server.buffer.lease_next

    def count_tries(generator: str, room: LeaseRoom) -> m.Lease | None:
        tried[generator] += 1
        return lease_next(generator, room)

    run.server.buffer.lease_next = count_tries  # type: ignore[assignment, method-assign]
    for number in range(100):
        request = m.RequestLeases(generator=f"g{number}", count=1, wait_s=60.0, version=0)
        run.client.send_request(request)
    wait_for_requests(run, 100)
    run.status()
    assert not tried
    for lease in mine:
        run.submit(lease)
    run.train(0)
    run.publish(1)
    wait_for_requests(run, 98)
    assert sum(tried.values()) <= 4, "as many as get something, and the ends of their hands"


def wait_for_requests(run: BufferHarness, count: int) -> None:
    deadline = time.monotonic() + 30.0
    while len(run.server._waiting_room.lease_requests) != count:
        assert time.monotonic() < deadline, len(run.server._waiting_room.lease_requests)
        time.sleep(0.01)


def test_a_generator_that_connects_anew_is_served_once(harness: Callable[..., BufferHarness]) -> None:
    run = harness()
    old, new = (BufferClient(run.server.address) for _ in range(2))
    first = old.send_request(m.RequestLeases(generator="g", count=1, wait_s=20.0))
    while not run.server._waiting_room.lease_requests:
        time.sleep(0.01)
    second = new.send_request(m.RequestLeases(generator="g", count=1, wait_s=20.0))
    while not (answers := list(old.receive_answers(1.0))):
        pass
    assert [(one.number, one.reply.leases) for one in answers] == [(first, [])]  # type: ignore[union-attr]
    run.publish(0)
    while not (answers := list(new.receive_answers(1.0))):
        pass
    granted = [(one.number, len(one.reply.leases)) for one in answers]  # type: ignore[union-attr]
    assert granted == [(second, 1)]
    old.close()
    new.close()


def test_an_engine_that_samples_has_moved_although_no_sample_has_ended() -> None:
    registry = RoleRegistry()

    def has_moved(decoded: int) -> bool:
        report = GeneratorReport(decoded_tokens=decoded)
        return registry.note_generator(m.GeneratorHeartbeat(generator="g", progress={}, report=report), 0.0)

    assert [has_moved(decoded) for decoded in (0, 5, 9, 9, 4, 4)] == [False, True, True, False, True, False]


def test_totals_stay_right_when_there_are_more_generators_than_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("buffers.role_registry.MAX_GENERATORS", 4)
    registry = RoleRegistry()
    for beat in range(5):
        for number in range(7):
            report = GeneratorReport(updates=10 * (beat + 1))
            registry.note_generator(
                m.GeneratorHeartbeat(generator=f"g{number}", progress={}, report=report), float(beat)
            )
    assert registry.summarize(5.0)["weight_updates"] == 7 * 50
