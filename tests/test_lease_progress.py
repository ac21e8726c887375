"""Progress keeps a lease: it goes to generators that can begin it, and stays with those that have begun
it."""

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from buffer_harness import SMALL_RUN, BufferHarness
from generator_run import OVERRIDES, make_fast_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers import messages as m
from buffers.attempts import BEGIN_S
from buffers.buffer import Buffer, LeaseRoom
from buffers.client import BufferClient, TakenBatch
from buffers.leases import LEAST_BEGIN_S, MAX_PUBLISHED
from buffers.run_status import GeneratorReport
from buffers.server import BufferServer
from configs.load import load_config
from generators.episode import SimulatedEpisodes
from generators.simulated_engine import SimulatedEngine
from generators.worker import Generator, RunReplaced
from slipstream.supervisor import find_free_port
from sync.announcement import TransferFailed
from sync.publisher import Publisher
from sync.stream import whole_parts
from sync.subscriber import Subscriber
from sync.weight_source import WeightSource


class ClockedBuffer:
    """A buffer whose clock stands still until it is moved."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.now = 100.0
        config = load_config([*SMALL_RUN, "run.steps=1000", "eval.prompts=0", *overrides])
        self.buffer = Buffer(config, folder / "journal", clock=lambda: self.now)

    def ask(self, held: int | None, generator: str = "g") -> m.Lease | None:
        room = LeaseRoom(num_samples=100, num_evaluated=0, takes_groups=True, held=held)
        return self.buffer.lease_next(generator, room)

    def beat(self, lease: m.Lease, generator: str = "g", *, is_overdue: bool) -> list[int]:
        """Returns the leases that a heartbeat's answer takes back."""
        beat = m.GeneratorHeartbeat(
            generator=generator, progress={lease.id: 0}, overdue=[lease.id] if is_overdue else [],
            report=GeneratorReport(version=0),
        )  # fmt: skip
        return self.buffer.take_heartbeat(beat)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.buffer.check_time()


@pytest.fixture
def clocked(tmp_path: Path) -> Iterator[Any]:
    made = list[ClockedBuffer]()

    def make(*overrides: str) -> ClockedBuffer:
        made.append(ClockedBuffer(tmp_path / str(len(made)), *overrides))
        return made[-1]

    yield make
    for one in made:
        one.buffer.close()


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 3)),
        st.tuples(st.just("pass"), st.sampled_from([0.5, 4.0, BEGIN_S, 60.0])),
        st.tuples(st.just("ask"), st.integers(-1, 20)),
    ),
    max_size=30,
)


@settings(max_examples=40)
@given(MOVES)
def test_a_lease_goes_to_who_holds_its_floor_or_follows_the_learner(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, float]]
) -> None:
    run = ClockedBuffer(tmp_path_factory.mktemp("leases"), "staleness.max_versions=1")
    published = dict[int, float]()
    for kind, number in [("publish", 1), *moves]:
        if kind == "publish":
            version = max(published, default=-1) + int(number)
            published[version] = run.now
            run.buffer.progress.publish_version(version, f"w{version}")
        elif kind == "pass":
            run.now += number  # no lease expires here, so the next one is always at hand
        else:
            held, newest = int(number), max(published)
            floor = run.buffer.book.leases.next_floor
            unseen = [at for version, at in published.items() if version > held]
            intervals = list(map(float.__sub__, [*published.values()][1:], [*published.values()][:-1]))
            half = sum(intervals) / len(intervals) / 2 if intervals else BEGIN_S
            grace_s = min(BEGIN_S, max(LEAST_BEGIN_S, half))
            can_begin = held >= floor or not unseen or run.now - min(unseen) <= grace_s
            is_admitted = floor <= newest
            oldest = run.buffer.find_oldest_useful()
            lease = run.ask(held)
            assert lease is None or held >= oldest, "or it would not be asked at all"
            assert (lease is not None) == (can_begin and is_admitted), (held, floor, published, run.now)
    run.buffer.close()


def test_who_does_not_say_what_it_holds_gets_any_lease_and_memory_is_bounded(clocked: Any) -> None:
    run = clocked("staleness.max_versions=0")
    for version in range(3 * MAX_PUBLISHED):
        run.buffer.progress.publish_version(version, f"w{version}")
    assert len(run.buffer.book.leases._published_at) == MAX_PUBLISHED
    run.now += 60.0
    run.buffer.book.leases.next_group = 0
    assert run.ask(-1) is None or run.buffer.book.leases.next_floor == 0
    assert run.ask(None) is not None


def test_a_lease_that_is_not_begun_goes_to_another_generator_and_is_no_failure(
    clocked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = clocked("staleness.max_versions=0", "buffer.max_attempts=1", "buffer.lease_s=30")
    run.buffer.progress.publish_version(0, "w0")
    stuck = run.ask(-1, "stuck")
    assert stuck is not None, "version 0 has only just been published"
    run.pass_time(BEGIN_S + 0.5)
    assert run.beat(stuck, "stuck", is_overdue=False) == [], "it says itself for how long it has waited"
    assert run.beat(stuck, "stuck", is_overdue=True) == [stuck.id], "its heartbeats do not keep it"
    assert run.ask(-1, "stuck") is None, "and it gets no other before it has weights"
    other = run.ask(0, "other")
    assert other is not None and other.group == stuck.group and not run.buffer.book.leases.quarantine.total
    groups = run.buffer.make_status("").groups
    assert groups.rejected["failed"] == 0 and groups.rejected["returned"] == 1
    assert "failed" not in caplog.text and f"group {stuck.group} is given out again" in caplog.text


def test_a_lease_that_is_begun_is_kept_by_heartbeats_however_long_it_takes(clocked: Any) -> None:
    run = clocked("staleness.max_versions=0", "buffer.lease_s=3")
    run.buffer.progress.publish_version(0, "w0")
    lease = run.ask(0)
    for _ in range(20):
        assert run.beat(lease, is_overdue=False) == []
        run.pass_time(2.0)
    assert run.beat(lease, "a stranger", is_overdue=True) == [], "nobody speaks for another"
    assert run.beat(lease, is_overdue=False) == []


def test_a_learner_that_goes_back_makes_no_generator_late(clocked: Any) -> None:
    run = clocked("staleness.max_versions=0")
    for version in range(3):
        run.buffer.progress.publish_version(version, f"w{version}")
    assert run.ask(2) and run.ask(2), "the groups of step 0"
    run.now += 60.0
    run.buffer.book.history.version = -1
    run.buffer.progress.publish_version(1, "w1-again")
    assert run.ask(0) is not None, "version 1 has only just been published"
    run.now += 60.0
    assert run.ask(0) is None and run.ask(2) is not None, "one of the life before may begin all the same"


def test_the_status_says_that_no_generator_has_the_version_that_is_needed(clocked: Any) -> None:
    run = clocked("staleness.max_versions=0")
    for name in ("a", "b"):
        run.buffer.join_generator(name)
        run.buffer.take_heartbeat(
            m.GeneratorHeartbeat(generator=name, progress={}, report=GeneratorReport(), activity="sampling")
        )
    run.buffer.progress.publish_version(0, "w0")
    assert "no generator has taken up version 0: a holds none, b holds none" in run.buffer.describe_waiting()


# ---- the generator


@contextmanager
def serve(server: BufferServer) -> Iterator[None]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join(timeout=10)


class PlayedGenerator:
    """A generator in a thread."""

    def __init__(self, address: str, *overrides: str, run: str = "", **parts: Any) -> None:
        config = load_config([*OVERRIDES, *overrides])
        client = BufferClient(address, timeout_s=10.0)
        engine: SimulatedEngine = parts.pop("engine", None) or make_fast_engine()
        self.generator = Generator("g", config, client, engine, SimulatedEpisodes(), run=run, **parts)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.generator.run()
        except BaseException as error:
            self.error = error


def publish(client: BufferClient, folder: Path, version: int = 0) -> Publisher:
    publisher = Publisher(folder, "life")
    manifest = publisher.publish_version(version, whole_parts({"w": torch.tensor([0.0])}))
    locator = publisher.announce_version(manifest)
    client.call(m.PublishVersion(version=version, manifest_locator=locator), m.PublishedVersion)
    return publisher


def test_a_buffer_that_was_away_for_longer_than_a_lease_lasts_finds_its_generators_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["buffer.lease_s=0.4", "buffer.reconnect_s=60"]
    server = BufferServer(load_config([*OVERRIDES, *words]), tmp_path / "journal")
    played = PlayedGenerator(server.address, *words)
    client = BufferClient(server.address, timeout_s=30.0)
    deadline = time.monotonic() + 30
    while "has been silent for" not in caplog.text:
        assert time.monotonic() < deadline and played.error is None
        time.sleep(0.05)
    with serve(server):
        publisher = publish(client, tmp_path / "weights")
        assert isinstance(client.take_batch(0, wait_s=20.0), TakenBatch)
        client.call(m.StopRun(reason="over"), m.Acknowledged)
        played.thread.join(timeout=10)
    client.close()
    publisher.close()
    assert played.error is None and "answers again" in caplog.text


def test_a_buffer_that_stood_still_itself_takes_back_no_lease_whose_heartbeat_is_not_read_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn is too short for all that has come, as with a thousand generators: here it reads one message."""
    monkeypatch.setattr("buffers.server.AWAY_S", 1.0)
    monkeypatch.setattr("buffers.inbox.MAX_MESSAGES_PER_TURN", 1)
    words = [
        "buffer.lease_s=3",
        "learner.groups_per_step=8",
        "learner.samples_per_prompt=2",
        "eval.prompts=0",
    ]
    run = BufferHarness(load_config(words), tmp_path / "journal")
    try:
        run.publish(0)
        leases = {f"g{number}": run.ask(1, f"g{number}")[0].id for number in range(6)}
        end_turn, is_away = run.server._outbox.end_turn, threading.Event()

        def wait_for_disk() -> None:
            end_turn()
            if not is_away.is_set():
                is_away.set()
                time.sleep(5.0)

        monkeypatch.setattr(run.server._outbox, "end_turn", wait_for_disk)
        assert is_away.wait(30)
        for name, lease in leases.items():
            beat = m.GeneratorHeartbeat(generator=name, progress={lease: 1}, report=GeneratorReport())
            run.client.send_request(beat)
        answers: list[m.Reply] = []
        while len(answers) < len(leases):
            answers += [answer.reply for answer in run.client.receive_answers(1.0)]
        assert [reply.revoked for reply in answers if isinstance(reply, m.GeneratorStanding)] == 6 * [[]]
        assert run.status().groups.rejected.get("failed", 0) == 0
    finally:
        run.close()


def test_a_generator_leaves_a_run_in_whose_place_another_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*OVERRIDES, f"buffer.address=tcp://127.0.0.1:{find_free_port()}"]
    first = BufferHarness(load_config(words), tmp_path / "first")
    joined = first.client.call(m.JoinRun(generator="g"), m.JoinedRun)
    first.publish_at = publish(first.client, tmp_path / "weights")  # type: ignore[attr-defined]
    played = PlayedGenerator(first.server.address, run=joined.run)
    assert isinstance(first.client.take_batch(0, wait_s=20.0), TakenBatch)
    address = first.server.address
    first.close()
    again = BufferHarness(load_config([*words, "run.steps=9", "tracking.tags=[a]"]), tmp_path / "first")
    assert again.client.call(m.JoinRun(generator="h"), m.JoinedRun).run == joined.run
    again.close()
    assert played.thread.is_alive(), "the same run in another life of its buffer"
    errors = list[str | None]()
    monkeypatch.setattr(Buffer, "remove_generator", lambda buffer, name, error: errors.append(error))
    other = BufferHarness(load_config(words), tmp_path / "other")
    played.thread.join(timeout=20)
    deadline = time.monotonic() + 20
    while not errors:
        assert time.monotonic() < deadline
    other.close()
    first.publish_at.close()  # type: ignore[attr-defined]
    assert isinstance(played.error, RunReplaced) and address in str(played.error)
    assert errors == [None], "it has done the other run no harm"


class GoneWeights(Subscriber):
    """Cannot bring any version before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.is_gone = 0, True

    def prepare_version(self, announced: str, *, again: bool = False) -> WeightSource:
        self.times += 1
        if self.is_gone:
            raise TransferFailed("v0-life.json is gone")
        return super().prepare_version(announced, again=again)


def test_a_version_that_is_gone_is_asked_for_seldom_and_logged_more_seldom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("generators.weight_updates.RETRY_S", 0.2)
    server, weights = BufferServer(load_config(OVERRIDES), tmp_path / "journal"), GoneWeights()
    with serve(server):
        client = BufferClient(server.address, timeout_s=30.0)
        publisher = publish(client, tmp_path / "weights")
        played = PlayedGenerator(server.address, subscriber=weights)
        time.sleep(3.0)
        # After 0.2, 0.4, 0.8 and 1.6 s, and with the first heartbeat's or grant's answer after that.
        assert 2 <= weights.times <= 5
        assert 1 <= caplog.text.count("cannot be taken up") <= 3
        weights.is_gone = False
        assert isinstance(client.take_batch(0, wait_s=20.0), TakenBatch)
        client.call(m.StopRun(reason="over"), m.Acknowledged)
        played.thread.join(timeout=10)
        client.close()
        publisher.close()
    assert played.error is None


def test_a_request_in_anothers_place_gets_nothing_where_that_one_has_its_answer(tmp_path: Path) -> None:
    run = BufferHarness(load_config([*SMALL_RUN, "staleness.max_versions=1"]), tmp_path)
    run.publish(0)
    again = m.RequestLeases(generator="g", count=1, wait_s=5.0, version=0, replaces=True)
    assert run.client.call(again, m.LeaseGrant).leases == [], "none is waiting, so one was answered"
    assert len(run.ask(4)) == 4
    asking = BufferClient(run.server.address)
    first = asking.send_request(m.RequestLeases(generator="g", count=1, wait_s=20.0, version=0))
    second = asking.send_request(again)

    def count_granted() -> list[tuple[int, int]]:
        while not (answers := list(asking.receive_answers(5.0))):
            pass
        return [(one.number, len(one.reply.leases)) for one in answers]  # type: ignore[union-attr]

    assert count_granted() == [(first, 0)]
    run.publish(1)
    assert count_granted() == [(second, 1)]
    asking.close()
    run.close()


def test_leases_whose_grant_was_lost_with_its_connection_are_free_when_the_request_comes_again(
    tmp_path: Path,
) -> None:
    run = BufferHarness(load_config([*SMALL_RUN, "staleness.max_versions=0"]), tmp_path / "journal")
    run.publish(0)

    def ask_again(number: int, life: str) -> list[int]:
        """Sends a request for leases over a new connection; returns the groups that it gets."""
        client = BufferClient(run.server.address, timeout_s=30.0)
        client._numbers = itertools.count(number)
        request = m.RequestLeases(generator="g", count=2, wait_s=0.2, life=life)
        groups = [lease.group for lease in client.call(request, m.LeaseGrant).leases]
        client.close()
        return groups

    assert ask_again(7, "first") == [0, 1]
    assert ask_again(8, "first") == ask_again(7, "second") == ask_again(7, "") == [], "these are others"
    assert ask_again(7, "first") == [0, 1], "it has come again, so its answer has not come"
    groups = run.status().groups
    assert (groups.in_flight, groups.rejected["returned"], groups.rejected["failed"]) == (2, 2, 0)
    run.close()


def test_a_request_that_comes_twice_over_one_connection_loses_nothing(tmp_path: Path) -> None:
    """ZeroMQ has kept a request while nobody listened, and the client sends it again."""
    run = BufferHarness(load_config([*SMALL_RUN, "staleness.max_versions=0"]), tmp_path / "journal")
    run.publish(0)
    request = m.RequestLeases(generator="g", count=2, wait_s=0.2, life="first")
    number = run.client.send_request(request)
    (first,) = (answer for answer in run.client.receive_answers(30.0) if answer.number == number)
    assert isinstance(first.reply, m.LeaseGrant) and len(first.reply.leases) == 2
    run.client._numbers = itertools.count(number)
    assert run.client.call(request, m.LeaseGrant).leases == []
    assert run.status().groups.in_flight == 2
    run.close()


def test_nobody_reports_tokens_of_a_lease_that_another_has_had(clocked: Any) -> None:
    run = clocked()
    run.buffer.progress.publish_version(0, "w0")
    lease = run.ask(0, "one")
    run.buffer.remove_generator("one", None)
    beat = m.GeneratorHeartbeat(generator="other", progress={lease.id: 7}, report=GeneratorReport())
    assert run.buffer.take_heartbeat(beat) == [lease.id], "it hears that it holds no such lease"
    assert run.buffer.make_status("").tokens.total == 0


def test_nobody_takes_back_an_evaluation_prompt_of_another(tmp_path: Path) -> None:
    config = load_config([*SMALL_RUN, "eval.prompts=4", "eval.generators=1"])
    buffer = Buffer(config, tmp_path)
    buffer.join_generator("own", evaluates=True)
    buffer.progress.publish_version(0, "w0")
    lease = buffer.lease_next("own")
    assert lease is not None and lease.evaluation
    for name, is_held in (("stranger", True), ("own", False)):
        buffer.take_heartbeat(
            m.GeneratorHeartbeat(
                generator=name, progress={lease.id: 0}, overdue=[lease.id], report=GeneratorReport()
            )
        )
        assert buffer.evaluations.has_lease(lease.id) == is_held
    buffer.close()


def test_evaluation_prompts_go_to_who_holds_the_version_or_follows_the_learner(clocked: Any) -> None:
    run = clocked("eval.prompts=64", "eval.every=1", "run.steps=4")
    for version in range(3):
        run.buffer.progress.publish_version(version, f"w{version}")
    run.pass_time(60.0)
    stuck = LeaseRoom(num_samples=64, num_evaluated=64, takes_groups=True, held=-1)
    good = LeaseRoom(num_samples=64, num_evaluated=64, takes_groups=True, held=2)
    taken = list(iter(lambda: run.buffer.lease_next("stuck", stuck), None))
    assert not [lease for lease in taken if lease.evaluation], "it can begin none of them"
    while (lease := run.buffer.lease_next("good", good)) is not None and not lease.evaluation:
        pass
    assert lease is not None and lease.due == 0, "it holds a newer version, which samples as well"
    run.buffer.progress.publish_version(3, "w3")
    assert run.buffer.lease_next("good", good) is not None, "it will have version 3 in a moment"


def test_a_generator_for_evaluation_gets_prompts_of_the_version_that_it_holds(clocked: Any) -> None:
    run = clocked("eval.prompts=2", "eval.every=1", "eval.generators=1")
    run.buffer.join_generator("own", evaluates=True)
    for version in range(2):
        run.buffer.progress.publish_version(version, f"w{version}")
    room = LeaseRoom(num_samples=8, num_evaluated=8, takes_groups=False, held=1)
    assert run.buffer.lease_next("own", room) is None, "version 0 is evaluated first"
    assert run.buffer.find_oldest_useful() <= 0
    held = LeaseRoom(num_samples=8, num_evaluated=8, takes_groups=False, held=0)
    leases = [run.buffer.lease_next("own", held) for _ in range(3)]
    assert [lease and lease.due for lease in leases] == [0, 0, None]


def test_leases_that_came_back_without_a_failure_are_returned_after_a_restart_too(
    tmp_path: Path, clocked: Any
) -> None:
    config = load_config([*SMALL_RUN, "eval.prompts=0"])
    buffer = Buffer(config, tmp_path / "journal")
    buffer.progress.publish_version(0, "w0")
    for generator, error in (("leaves", None), ("fails", "CUDA error")):
        assert buffer.lease_next(generator) is not None
        buffer.remove_generator(generator, error)
    buffer.commit()
    before = buffer.make_status("").groups
    assert (before.rejected["returned"], before.rejected["failed"]) == (1, 1)
    buffer.close(in_good_order=False)  # the next one reads the log, and no state
    again = Buffer(config, tmp_path / "journal")
    assert again.make_status("").groups == before and again.book.ledger.closes()
    again.close()


def test_a_generator_says_which_leases_it_could_not_begin_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat that comes late, or again after a cut, takes no lease back that was begun meanwhile."""
    monkeypatch.setattr("generators.worker.BEGIN_S", 1.0)
    server, weights = BufferServer(load_config(OVERRIDES), tmp_path / "journal"), GoneWeights()
    beats = list[tuple[float, m.GeneratorHeartbeat]]()
    take_heartbeat = server.buffer.take_heartbeat

    def take(beat: m.GeneratorHeartbeat) -> list[int]:
        beats.append((time.monotonic(), beat))
        return take_heartbeat(beat)

    monkeypatch.setattr(server.buffer, "take_heartbeat", take)
    with serve(server):
        client = BufferClient(server.address, timeout_s=30.0)
        published_at = time.monotonic()
        publisher = publish(client, tmp_path / "weights")
        played = PlayedGenerator(server.address, subscriber=weights)
        while not any(beat.overdue for _, beat in beats):
            assert time.monotonic() < published_at + 60 and played.error is None
            time.sleep(0.05)
        client.call(m.StopRun(reason="over"), m.Acknowledged)
        played.thread.join(timeout=10)
        client.close()
        publisher.close()
    first_overdue_at = next(at for at, beat in beats if beat.overdue)
    assert first_overdue_at - published_at > 1.0, "no lease came before that version"


def test_a_generator_that_somebody_says_has_left_joins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("generators.worker.STAY_S", 0.3)
    server = BufferServer(load_config(OVERRIDES), tmp_path / "journal")
    with serve(server):
        client = BufferClient(server.address, timeout_s=30.0)
        played = PlayedGenerator(server.address)
        while "g" not in client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status.roles:
            assert played.error is None
        client.call(m.LeaveRun(generator="g"), m.Acknowledged)  # as another fleet might, or its key's owner
        publisher = publish(client, tmp_path / "weights")
        assert isinstance(client.take_batch(0, wait_s=60.0), TakenBatch)
        deadline = time.monotonic() + 60
        while "g" not in (status := client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status).roles:
            assert time.monotonic() < deadline and played.error is None
        assert status.groups.rejected["failed"] == 0
        client.call(m.StopRun(reason="over"), m.Acknowledged)
        played.thread.join(timeout=10)
        client.close()
        publisher.close()
    assert played.error is None and "it joins again" in caplog.text


def test_joining_again_changes_nothing_for_who_has_not_left(clocked: Any, tmp_path: Path) -> None:
    run = BufferHarness(load_config([*SMALL_RUN]), tmp_path)
    run.client.call(m.JoinRun(generator="g"), m.JoinedRun)
    run.publish(0)
    assert run.ask(2)
    before = run.status()
    run.client.call(m.JoinRun(generator="g", again=True), m.JoinedRun)
    assert run.status().groups == before.groups and before.groups.in_flight == 2
    run.close()


def test_a_generator_for_evaluation_goes_on_with_a_buffer_that_has_not_heard_it_join(
    tmp_path: Path,
) -> None:
    words = ["eval.prompts=4", "eval.generators=1"]
    server = BufferServer(load_config([*OVERRIDES, *words]), tmp_path / "journal")
    with serve(server):
        client = BufferClient(server.address, timeout_s=30.0)
        publisher = publish(client, tmp_path / "weights")
        played = PlayedGenerator(server.address, *words, evaluates=True)  # sends no `JoinRun`
        deadline = time.monotonic() + 60
        while not (news := client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)).evaluations:
            assert time.monotonic() < deadline and played.error is None
            time.sleep(0.05)
        assert news.status.evaluators == ["g"]
        client.call(m.StopRun(reason="over"), m.Acknowledged)
        played.thread.join(timeout=10)
        client.close()
        publisher.close()
    assert played.error is None
