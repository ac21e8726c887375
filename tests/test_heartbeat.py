"""Heartbeats while a role waits: leases outlive long waits and not endless ones, and everybody's last word is
known."""

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
from sync.snapshot import Snapshot
from sync.stream import whole_parts
from sync.subscriber import Subscriber
from sync.transports.nccl import NcclBroadcast

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


class Rig:
    """A buffer in a thread, and one who publishes and looks. A lease that is lost is quarantined at once."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.config = load_config([*BASE, *overrides])
        self.server = BufferServer(self.config, folder / "journal", config_text=to_yaml(self.config))
        self.threads = [threading.Thread(target=self.server.run)]
        self.threads[0].start()
        self.client = BufferClient(self.server.address, timeout_s=60.0)
        self.publisher = Publisher(folder / "weights", "life")

    def generate(self, engine: SimulatedEngine, subscriber: Subscriber) -> None:
        client = BufferClient(self.server.address, timeout_s=60.0)
        generator = Generator("g", self.config, client, engine, SimulatedEpisodes(), subscriber)
        self.threads.append(threading.Thread(target=generator.run))
        self.threads[-1].start()

    def publish(self, version: int) -> None:
        manifest = self.publisher.publish_version(version, whole_parts({"w": torch.tensor([float(version)])}))
        self.client.call(
            m.PublishVersion(version=version, manifest_locator=self.publisher.announce_version(manifest)),
            m.Acknowledged,
        )

    def status(self) -> RunStatus:
        return self.client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status

    def wait_for(self, holds: Callable[[RunStatus], object], timeout_s: float = 60.0) -> RunStatus:
        deadline = time.monotonic() + timeout_s
        while not holds(status := self.status()):
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
def start(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def begin(*overrides: str) -> Rig:
        rigs.append(Rig(tmp_path, *overrides))
        return rigs[-1]

    yield begin
    for rig in rigs:
        rig.close()


def heard_lately(status: RunStatus, activity_s: float) -> bool:
    """The generator has said within a second that it does something for so long already."""
    return (
        "g" in status.roles
        and status.roles["g"].activity_s > activity_s
        and status.roles["g"].last_heard_s < 1
    )


def engine() -> SimulatedEngine:
    return SimulatedEngine(tokens_per_s=2000, slots=16, mean_tokens=6, cv=0.5)


class Pulling(Subscriber):
    """A pull lasts until `end` is set; bytes come in all the while, or never."""

    def __init__(self, bytes_come_in: bool) -> None:
        super().__init__()
        self.end, self.bytes_come_in, self.began_at = threading.Event(), bytes_come_in, 0.0

    @property
    def fetched_bytes(self) -> int:
        return int(1e9 * (time.monotonic() - self.began_at)) if self.began_at and self.bytes_come_in else 0

    def prepare_version(self, announced: str, *, again: bool = False) -> Snapshot | NcclBroadcast:
        self.began_at = time.monotonic()
        self.end.wait(timeout=90)
        return super().prepare_version(announced, again=again)


def test_a_pull_of_weights_that_takes_several_leases_and_stalls_loses_none_while_bytes_come_in(
    start: Callable[..., Rig],
) -> None:
    rig, pulling = start("buffer.stalled_s=3"), Pulling(bytes_come_in=True)
    rig.publish(0)
    rig.generate(engine(), pulling)
    rig.wait_for(lambda status: status.groups.in_flight)
    status = rig.wait_for(lambda status: heard_lately(status, 6))
    assert status.roles["g"].activity == "fetching version 0"
    assert re.search(r"g: fetching version 0 for \d+ s", status.waiting_for)
    pulling.end.set()
    taken = rig.client.take_batch(0, wait_s=50.0)
    assert taken.groups == [0, 1, 2, 3] and not rig.status().quarantined  # type: ignore[union-attr]


def test_a_pull_in_which_nothing_comes_keeps_its_leases_until_it_counts_as_stalled(
    start: Callable[..., Rig],
) -> None:
    rig, pulling = start("buffer.stalled_s=5"), Pulling(bytes_come_in=False)
    rig.publish(0)
    rig.generate(engine(), pulling)
    status = rig.wait_for(lambda status: "g" in status.roles and status.roles["g"].activity_s > 3)
    assert not status.quarantined and status.groups.in_flight, "longer than a lease lasts"
    status = rig.wait_for(lambda status: status.quarantined)
    assert any(
        re.match(r"stalled: fetching version 0 for \d+ s", error) for error in status.quarantined.values()
    )
    pulling.end.set()


class Hanging(SimulatedEngine):
    end = threading.Event()

    def load_version(self, source: Snapshot | NcclBroadcast) -> None:
        self.end.wait(timeout=90)
        super().load_version(source)


def test_a_loop_that_hangs_loses_its_leases_though_its_heart_beats_and_goes_on_when_it_comes_back(
    start: Callable[..., Rig],
) -> None:
    rig, hanging = start("buffer.stalled_s=4"), Hanging(tokens_per_s=2000, slots=16, mean_tokens=6, cv=0.5)
    rig.generate(hanging, Subscriber())
    rig.wait_for(lambda status: "g" in status.roles and status.roles["g"].activity == "waiting for leases")
    client = BufferClient(rig.server.address)
    rig.publish(0)
    rig.wait_for(lambda status: status.groups.in_flight)
    status = rig.wait_for(lambda status: status.quarantined or heard_lately(status, 3))
    if not status.quarantined:  # it may have begun to load before it had leases
        assert status.roles["g"].activity == "loading version 0"
        status = rig.wait_for(lambda status: status.quarantined)
    assert any(
        re.match(r"stalled: loading version 0 for \d+ s", error) for error in status.quarantined.values()
    )
    hanging.end.set()
    assert rig.client.take_batch(0, wait_s=50.0).groups, "others fill the places, or itself"  # type: ignore[union-attr]
    client.close()


def test_a_generator_beats_while_its_engine_starts(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, going = start(), threading.Event()

    def slowly(config: object, seed: int, shares_gpu: bool) -> SimulatedEngine:
        going.wait(timeout=90)
        return engine()

    monkeypatch.setattr(generators.joining, "make_engine", slowly)
    rig.threads.append(threading.Thread(target=lambda: join_run(rig.server.address, "g", 0, None).run()))
    rig.threads[-1].start()
    status = rig.wait_for(lambda status: heard_lately(status, 1.5))
    assert status.roles["g"].activity == "starting the engine"
    going.set()
    rig.wait_for(lambda status: status.roles["g"].activity == "waiting for leases")


def test_the_wait_for_a_batch_names_the_generators_states_until_all_are_ready(
    start: Callable[..., Rig],
) -> None:
    rig = start("generators.count=2")
    buffer = rig.server.buffer

    def beat(generator: str, activity: str, activity_s: float = 0.0) -> None:
        report = GeneratorReport()
        beat = m.GeneratorHeartbeat(
            generator=generator, progress={}, report=report, activity=activity, activity_s=activity_s
        )
        rig.client.call(beat, m.GeneratorStanding)

    assert buffer.describe_waiting().endswith("to publish version 0; 0 of 2 generators ready, 2 not here yet")
    rig.publish(0)
    nobody = "the learner waits: step 0 has 0 of 4 groups; "
    rig.client.call(m.JoinRun(generator="a"), m.JoinedRun)
    assert buffer.describe_waiting() == nobody + "0 of 2 generators ready, 1 joined, 1 not here yet"
    assert rig.status().roles["a"].activity == "joined"
    beat("a", "starting the engine", 7.2)
    rig.client.call(m.JoinRun(generator="b"), m.JoinedRun)
    beat("b", "starting the engine", 3.2)
    assert buffer.describe_waiting() == nobody + "0 of 2 generators ready, 2 starting the engine for 7 s"
    assert "engines" not in buffer.milestones
    beat("a", "waiting for leases")
    assert buffer.describe_waiting() == nobody + "1 of 2 generators ready, 1 starting the engine for 3 s"
    first = buffer.milestones["engines"]
    beat("b", "waiting for leases")
    assert buffer.describe_waiting() == nobody + "no generator holds a lease for it", "now that is the reason"
    assert buffer.milestones["learner"] < first < buffer.milestones["engines"]
    last = buffer.milestones["engines"]
    beat("c", "sampling")
    assert buffer.milestones["engines"] == last, "the run had started when its own generators had"


def test_an_engine_that_starts_while_others_work_is_named(start: Callable[..., Rig]) -> None:
    rig = start("generators.count=2")
    rig.publish(0)
    rig.generate(engine(), Subscriber())
    beat = m.GeneratorHeartbeat(
        generator="b", progress={}, report=GeneratorReport(), activity="starting the engine", activity_s=60.0
    )
    rig.client.call(m.JoinRun(generator="b"), m.JoinedRun)
    rig.client.call(beat, m.GeneratorStanding)
    status = rig.wait_for(
        lambda status: "b: starting the engine for 60 s" in status.waiting_for or status.groups.total
    )
    assert status.waiting_for.count("starting the engine") == 1, "it is named once"


def test_an_engine_that_cannot_start_ends_its_heartbeat_and_says_why(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(config: object, seed: int, shares_gpu: bool) -> SimulatedEngine:
        raise ValueError("no such model")

    rig = start()
    monkeypatch.setattr(generators.joining, "make_engine", broken)
    with pytest.raises(ValueError, match="no such model"):
        join_run(rig.server.address, "g", 0, None)
    rig.wait_for(lambda status: "g" in status.generators and "g" not in status.roles)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_role_that_is_not_heard_of_is_named_and_one_that_has_said_farewell_is_not(
    start: Callable[..., Rig],
) -> None:
    rig = start()
    hearts = [
        HeartbeatThread(
            rig.client.open_another(), partial(m.RoleHeartbeat, role=f"learner-{rank}"), "loading the model"
        )
        for rank in (0, 1)
    ]
    rig.wait_for(lambda status: len(status.roles) == 2)
    hearts[0].set_activity("training step 3")
    status = rig.wait_for(lambda status: "learner-0: training step 3 for" in status.waiting_for)
    hearts[0].close()
    hearts[1].close(m.RoleHeartbeat(role="learner-1", activity="leaving", ended=True))
    status = rig.wait_for(
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
    start: Callable[..., Rig],
) -> None:
    rig, beat = (
        start(),
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
        rig.client.exchange(request)  # type: ignore[arg-type]
        assert ("g" in rig.status().roles) == known, request


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
    start: Callable[..., Rig],
) -> None:
    rig = start()
    generator = Generator("g", rig.config, rig.client.open_another(), engine(), SimulatedEpisodes())
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


def test_publications_and_rewinds_are_numbered_upwards(start: Callable[..., Rig]) -> None:
    rig, changes = start(), []
    beat = m.GeneratorHeartbeat(generator="g", progress={}, report=GeneratorReport())
    for request in (
        m.PublishVersion(version=0, manifest_locator="a"),
        m.RewindToStep(step=0),
        m.PublishVersion(version=0, manifest_locator="b"),
    ):
        rig.client.call(request, m.Acknowledged)
        changes.append(rig.client.call(beat, m.GeneratorStanding).announcement_number)
    assert changes == sorted(set(changes)) and changes[0] > 0
