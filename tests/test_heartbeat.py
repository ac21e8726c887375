"""Heartbeats while a role waits: leases outlive long waits but not endless ones, and the status has each
role's last report."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import generators.joining
from buffers import heartbeat as beats
from buffers import messages as m
from buffers.attempts import BEGIN_S
from buffers.client import BufferClient
from buffers.heartbeat import HeartbeatThread
from buffers.metrics import make_families
from buffers.run_status import GeneratorReport, RunStatus
from buffers.server import BufferServer
from configs.load import load_config, to_yaml
from generators.episode import SimulatedEpisodes
from generators.joining import join_run
from generators.simulated_engine import SimulatedEngine
from generators.worker import Generator
from sync.publisher import Publisher
from sync.stream import whole_parts
from sync.subscriber import Subscriber
from sync.weight_source import WeightSource

BASE = [
    "generators.engine=simulated",
    "learner.engine=simulated",
    "learner.groups_per_step=4",
    "run.steps=3",
    "eval.prompts=0",
    "learner.samples_per_prompt=2",
    "generators.max_sequences=16",
    "buffer.max_attempts=1",
    "buffer.lease_s=2",
]


class HeartbeatRun:
    """A buffer in a thread, and a client that publishes and watches. A lost lease is quarantined at once."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.config = load_config([*BASE, *overrides])
        self.server = BufferServer(self.config, folder / "journal", config_text=to_yaml(self.config))
        self.threads = [threading.Thread(target=self.server.run)]
        self.threads[0].start()
        self.client = BufferClient(self.server.address, timeout_s=60.0)
        self.publisher = Publisher(folder / "weights", "life")

    def start_generator(self, engine: SimulatedEngine, subscriber: Subscriber) -> None:
        client = BufferClient(self.server.address, timeout_s=60.0)
        generator = Generator("g", self.config, client, engine, SimulatedEpisodes(), subscriber)
        self.threads.append(threading.Thread(target=generator.run))
        self.threads[-1].start()

    def publish_version(self, version: int) -> None:
        manifest = self.publisher.publish_version(version, whole_parts({"w": torch.tensor([float(version)])}))
        self.client.call(
            m.PublishVersion(version=version, manifest_locator=self.publisher.announce_version(manifest)),
            m.Acknowledged,
        )

    def read_status(self) -> RunStatus:
        return self.client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status

    def wait_for(self, holds: Callable[[RunStatus], object], timeout_s: float = 60.0) -> RunStatus:
        deadline = time.monotonic() + timeout_s
        while not holds(status := self.read_status()):
            assert time.monotonic() < deadline, status
            time.sleep(0.05)
        return status

    def close(self) -> None:
        self.client.call(m.StopRun(reason="over"), m.Acknowledged)
        for thread in self.threads[1:]:
            thread.join(timeout=60)
            assert not thread.is_alive()
        self.server.stop()
        self.threads[0].join(timeout=60)
        self.client.close()
        self.publisher.close()


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., HeartbeatRun]]:
    runs: list[HeartbeatRun] = []

    def begin(*overrides: str) -> HeartbeatRun:
        runs.append(HeartbeatRun(tmp_path, *overrides))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def is_heard_of(status: RunStatus, activity_s: float) -> bool:
    """True when the generator has reported within a second that it is at something for so long already."""
    return (
        "g" in status.roles
        and status.roles["g"].activity_s > activity_s
        and status.roles["g"].last_heard_s < 1
    )


def make_engine() -> SimulatedEngine:
    return SimulatedEngine(tokens_per_s=2000, slots=16, mean_tokens=6, cv=0.5)


class Pulling(Subscriber):
    """A subscriber whose pull lasts until `may_end` is set. Bytes come in all the while, or never."""

    def __init__(self, bytes_come_in: bool) -> None:
        super().__init__()
        self.may_end, self.bytes_come_in, self.began_at = threading.Event(), bytes_come_in, 0.0

    @property
    def fetched_bytes(self) -> int:
        return int(1e9 * (time.monotonic() - self.began_at)) if self.began_at and self.bytes_come_in else 0

    def prepare_version(self, announced: str, *, again: bool = False) -> WeightSource:
        self.began_at = time.monotonic()
        self.may_end.wait(timeout=90)
        return super().prepare_version(announced, again=again)


def test_a_pull_of_weights_that_takes_longer_than_others_would_wait_costs_no_group_an_attempt(
    start_run: Callable[..., HeartbeatRun],
) -> None:
    run, pulling = start_run("buffer.stalled_s=3"), Pulling(bytes_come_in=True)
    run.publish_version(0)
    run.start_generator(make_engine(), pulling)
    run.wait_for(lambda status: status.groups.rejected.get("returned"))
    status = run.wait_for(lambda status: is_heard_of(status, BEGIN_S + 1))
    assert status.groups.rejected["returned"] == status.groups.total
    assert status.roles["g"].activity == "fetching version 0"
    assert re.search(r"g: fetching version 0 for \d+ s", status.waiting_for)
    pulling.may_end.set()
    taken = run.client.take_batch(0, wait_s=50.0)
    assert taken.groups == [0, 1, 2, 3] and not run.read_status().quarantined  # type: ignore[union-attr]


def test_a_pull_in_which_nothing_comes_counts_as_stalled(
    start_run: Callable[..., HeartbeatRun],
) -> None:
    run, pulling = start_run("buffer.stalled_s=3"), Pulling(bytes_come_in=False)
    run.publish_version(0)
    run.start_generator(make_engine(), pulling)
    status = run.wait_for(lambda status: status.quarantined)
    assert any(
        re.match(r"stalled: fetching version 0 for \d+ s", error) for error in status.quarantined.values()
    )
    pulling.may_end.set()


class HangingEngine(SimulatedEngine):
    end = threading.Event()

    def load_version(self, source: WeightSource) -> None:
        self.end.wait(timeout=90)
        super().load_version(source)


def test_a_loop_that_hangs_loses_its_leases_though_its_heart_beats_and_goes_on_when_it_comes_back(
    start_run: Callable[..., HeartbeatRun],
) -> None:
    run, hanging = (
        start_run("buffer.stalled_s=4"),
        HangingEngine(tokens_per_s=2000, slots=16, mean_tokens=6, cv=0.5),
    )
    run.start_generator(hanging, Subscriber())
    run.wait_for(lambda status: "g" in status.roles and status.roles["g"].activity == "waiting for leases")
    client = BufferClient(run.server.address)
    run.publish_version(0)
    run.wait_for(lambda status: status.groups.in_flight)
    status = run.wait_for(lambda status: status.quarantined or is_heard_of(status, 3))
    if not status.quarantined:  # it may have begun to load before it had leases
        assert status.roles["g"].activity == "loading version 0"
        status = run.wait_for(lambda status: status.quarantined)
    assert any(
        re.match(r"stalled: loading version 0 for \d+ s", error) for error in status.quarantined.values()
    )
    hanging.end.set()
    taken = run.client.take_batch(0, wait_s=50.0)
    assert taken.groups, "others fill the places, or itself"  # type: ignore[union-attr]
    client.close()


def test_a_generator_beats_while_its_engine_starts(
    start_run: Callable[..., HeartbeatRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, going = start_run(), threading.Event()

    def slowly(config: object, seed: int, shares_gpu: bool) -> SimulatedEngine:
        going.wait(timeout=90)
        return make_engine()

    monkeypatch.setattr(generators.joining, "make_engine", slowly)
    run.threads.append(threading.Thread(target=lambda: join_run(run.server.address, "g", 0, None).run()))
    run.threads[-1].start()
    status = run.wait_for(lambda status: is_heard_of(status, 1.5))
    assert status.roles["g"].activity == "starting the engine"
    going.set()
    run.wait_for(lambda status: status.roles["g"].activity == "waiting for leases")


def test_the_wait_for_a_batch_names_the_generators_states_until_all_are_ready(
    start_run: Callable[..., HeartbeatRun],
) -> None:
    run = start_run("generators.count=2")
    buffer = run.server.buffer

    def beat(generator: str, activity: str, activity_s: float = 0.0) -> None:
        report = GeneratorReport()
        beat = m.GeneratorHeartbeat(
            generator=generator, progress={}, report=report, activity=activity, activity_s=activity_s
        )
        run.client.call(beat, m.GeneratorStanding)

    assert buffer.describe_waiting().endswith("to publish version 0; 0 of 2 generators ready, 2 not here yet")
    run.publish_version(0)
    nobody = "the learner waits: step 0 has 0 of 4 groups; "
    run.client.call(m.JoinRun(generator="a"), m.JoinedRun)
    assert buffer.describe_waiting() == nobody + "0 of 2 generators ready, 1 joined, 1 not here yet"
    assert run.read_status().roles["a"].activity == "joined"
    beat("a", "starting the engine", 7.2)
    run.client.call(m.JoinRun(generator="b"), m.JoinedRun)
    beat("b", "starting the engine", 3.2)
    assert buffer.describe_waiting() == nobody + "0 of 2 generators ready, 2 starting the engine for 7 s"
    assert "engines" not in buffer.milestones
    beat("a", "waiting for leases")
    assert buffer.describe_waiting() == nobody + "1 of 2 generators ready, 1 starting the engine for 3 s"
    first = buffer.milestones["engines"]
    beat("b", "waiting for leases")
    lag = "no generator has taken up version 0: a holds none, b holds none"
    assert buffer.describe_waiting() == nobody + lag, "now that is the reason"
    assert buffer.milestones["learner"] < first < buffer.milestones["engines"]
    last = buffer.milestones["engines"]
    beat("c", "sampling")
    assert buffer.milestones["engines"] == last, "the run had started when its own generators had"


def test_an_engine_that_starts_while_others_work_is_named(start_run: Callable[..., HeartbeatRun]) -> None:
    run = start_run("generators.count=2")
    run.publish_version(0)
    run.start_generator(make_engine(), Subscriber())
    beat = m.GeneratorHeartbeat(
        generator="b", progress={}, report=GeneratorReport(), activity="starting the engine", activity_s=60.0
    )
    run.client.call(m.JoinRun(generator="b"), m.JoinedRun)
    run.client.call(beat, m.GeneratorStanding)
    status = run.wait_for(
        lambda status: "b: starting the engine for 60 s" in status.waiting_for or status.groups.total
    )
    assert status.waiting_for.count("starting the engine") == 1, "it is named once"


def test_an_engine_that_cannot_start_ends_its_heartbeat_and_says_why(
    start_run: Callable[..., HeartbeatRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(config: object, seed: int, shares_gpu: bool) -> SimulatedEngine:
        raise ValueError("no such model")

    run = start_run()
    monkeypatch.setattr(generators.joining, "make_engine", broken)
    with pytest.raises(ValueError, match="no such model"):
        join_run(run.server.address, "g", 0, None)
    run.wait_for(lambda status: "g" in status.generators and "g" not in status.roles)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_role_that_is_not_heard_of_is_named_and_one_that_has_said_farewell_is_not(
    start_run: Callable[..., HeartbeatRun],
) -> None:
    run = start_run()
    hearts = [
        HeartbeatThread(
            run.client.open_another(), partial(m.RoleHeartbeat, role=f"learner-{rank}"), "loading the model"
        )
        for rank in (0, 1)
    ]
    run.wait_for(lambda status: len(status.roles) == 2)
    hearts[0].set_activity("training step 3")
    status = run.wait_for(lambda status: "learner-0: training step 3 for" in status.waiting_for)
    hearts[0].close()
    hearts[1].close(m.RoleHeartbeat(role="learner-1", activity="leaving", ended=True))
    status = run.wait_for(
        lambda status: re.search(
            r"learner-0: not heard of for \d+ s \(then: training step 3\)", status.waiting_for
        )
    )
    assert list(status.roles) == ["learner-0"]
    (told,) = [
        family for family in make_families(status) if family.name == "slipstream_role_last_heard_seconds"
    ]
    (sample,) = told.samples
    assert sample.labels == {"role": "learner-0"} and sample.value > beats.HEARTBEAT_S


def test_a_heartbeat_that_comes_after_its_generator_has_left_does_not_bring_it_back(
    start_run: Callable[..., HeartbeatRun],
) -> None:
    run, beat = (
        start_run(),
        m.GeneratorHeartbeat(generator="g", progress={}, report=GeneratorReport(), activity="sampling"),
    )
    for request, known in (
        (m.JoinRun(generator="g"), True),
        (beat, True),
        (m.LeaveRun(generator="g"), False),
        (beat, False),
        (m.JoinRun(generator="g"), True),
        (beat, True),
    ):
        run.client.exchange(request)  # type: ignore[arg-type]
        assert ("g" in run.read_status().roles) == known, request


def test_a_buffer_that_is_away_is_not_sent_more_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "HEARTBEAT_S", 0.02)
    composed: list[str] = []

    def compose(*, activity: str, activity_s: float, standstill_s: float) -> m.RoleHeartbeat:
        composed.append(activity)
        return m.RoleHeartbeat(role="learner-0", activity=activity)

    heart = HeartbeatThread(BufferClient("ipc:///tmp/slipstream-nobody"), compose, "waiting")
    deadline = time.monotonic() + 60
    while heart.silent_s < 0.5:  # many beats later
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(composed) == beats.MAX_UNANSWERED
    heart.close()


def test_of_answers_over_two_connections_the_older_does_not_take_a_generator_back(
    start_run: Callable[..., HeartbeatRun],
) -> None:
    run = start_run()
    generator = Generator("g", run.config, run.client.open_another(), make_engine(), SimulatedEpisodes())
    newer = m.LeaseGrant(leases=[], version=6, manifest_locator="v6", announcement_number=12)
    older = m.GeneratorStanding(revoked=[], version=5, manifest_locator="v5", announcement_number=11)
    rewound = m.GeneratorStanding(revoked=[], version=4, manifest_locator="v4", announcement_number=13)
    newest = []
    for reply in (newer, older, rewound):
        generator._handle_reply(reply)
        newest.append((generator._updates._newest_version, generator._updates._newest_locator))
    assert newest == [(6, "v6"), (6, "v6"), (4, "v4")]
    generator._has_ended = True
    generator.run()


def test_publications_and_rewinds_are_numbered_upwards(start_run: Callable[..., HeartbeatRun]) -> None:
    run, changes = start_run(), []
    beat = m.GeneratorHeartbeat(generator="g", progress={}, report=GeneratorReport())
    for request in (
        m.PublishVersion(version=0, manifest_locator="a"),
        m.RewindToStep(step=0),
        m.PublishVersion(version=0, manifest_locator="b"),
    ):
        run.client.call(request, m.Acknowledged)
        changes.append(run.client.call(beat, m.GeneratorStanding).announcement_number)
    assert changes == sorted(set(changes)) and changes[0] > 0
