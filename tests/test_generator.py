"""The generator between a real buffer and a simulated engine: failures are reported, leases kept, versions
loaded."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_run import OVERRIDES, GeneratorRun, make_fast_engine
from scripted_engine import ScriptedBuffer, ScriptedEngine

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, TakenBatch
from buffers.journal import read_groups
from buffers.run_status import GeneratorReport
from buffers.server import BufferServer, Stuck
from buffers.timeline import Timeline
from buffers.trajectory import GREEDY
from configs.load import load_config
from configs.schema import Config
from generators.engine import Sample
from generators.episode import SimulatedEpisodes, SimulatedPrompt
from generators.simulated_engine import SimulatedEngine
from generators.task import Score
from generators.weight_updates import WeightUpdates
from generators.worker import Generator
from sync.manifest import DigestMismatch, EngineMismatch
from sync.publisher import Publisher
from sync.stream import whole_parts
from sync.subscriber import Subscriber
from sync.weight_source import WeightSource


class PickyEpisodes(SimulatedEpisodes):
    """Raises, or scores NaN, for some prompts."""

    async def begin_group(self, lease: m.Lease) -> SimulatedPrompt:
        if lease.index == 1:
            raise KeyError("no such prompt")
        return await super().begin_group(lease)

    async def score_tokens(self, prompt: SimulatedPrompt, tokens: list[int]) -> Score:
        if prompt.index == 2:
            return Score(float("nan"))
        if prompt.index == 5:
            raise TimeoutError("the judge is away")
        return await super().score_tokens(prompt, tokens)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., GeneratorRun]]:
    yield lambda *overrides, episodes=None, count=1, far=False, engine=None: GeneratorRun(
        load_config([*OVERRIDES, *overrides]), tmp_path, episodes or SimulatedEpisodes(), count, far, engine
    )


def test_a_task_that_raises_and_a_reward_that_is_nan_are_quarantined_and_the_run_goes_on(
    start: Callable[..., GeneratorRun],
) -> None:
    run = start("staleness.max_versions=1", episodes=PickyEpisodes())
    run.publish_version(0)
    trained = []
    for step in range(3):
        trained += run.train_step(step)
        run.publish_version(step + 1)
    status = run.close()
    assert len(trained) == len(set(trained)) == 12 and not {1, 2, 5} & set(trained)
    assert status.quarantined == {
        1: "KeyError: 'no such prompt'",
        2: "ValueError: reward must be finite, got nan",
        5: "TimeoutError: the judge is away",
    }
    assert status.groups.rejected["failed"] == 6, "each was tried twice"
    assert (
        status.tokens.total
        == status.tokens.trained + sum(status.tokens.rejected.values()) + status.tokens.in_flight
    )


@pytest.mark.parametrize("in_flight", [True, False])
def test_staleness_stays_within_the_bound_with_two_generators(
    start: Callable[..., GeneratorRun], in_flight: bool
) -> None:
    run = start("staleness.max_versions=2", f"sync.in_flight={in_flight}", "run.steps=8", count=2)
    for step in range(8):
        run.publish_version(step)
        run.train_step(step)
    status = run.close()
    assert max(status.staleness_histogram) <= 2 and status.tokens.rejected["late"] == 0
    assert status.tokens.trained == status.tokens.total and status.tokens.in_flight == 0
    assert {name for name, report in status.generators.items() if report.updates} == {"g0", "g1"}


class BrokenEpisodes(SimulatedEpisodes):
    async def score_tokens(self, prompt: SimulatedPrompt, tokens: list[int]) -> Score:
        raise TimeoutError("the judge is away")


def test_a_task_that_always_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    config = load_config([*OVERRIDES, "buffer.max_quarantined=5", "buffer.reconnect_s=2"])
    server = BufferServer(config, tmp_path / "journal")
    client = BufferClient(server.address, timeout_s=10.0)
    engine = SimulatedEngine(tokens_per_s=5000, slots=16, mean_tokens=2, cv=0.5)
    generator = Generator("g", config, BufferClient(server.address, timeout_s=10.0), engine, BrokenEpisodes())
    left: list[BaseException] = []

    def generate() -> None:
        try:
            generator.run()
        except BufferGone as gone:
            left.append(gone)

    thread = threading.Thread(target=generate)
    thread.start()
    publisher = Publisher(tmp_path / "weights", "life")
    manifest = publisher.publish_version(0, whole_parts({"w": torch.tensor([0.0])}))
    client.send_request(m.PublishVersion(version=0, manifest_locator=publisher.announce_version(manifest)))
    with pytest.raises(
        Stuck, match=r"\d+ groups in a row have failed 2 times each, .* TimeoutError: the judge is away"
    ):
        server.run()
    thread.join(timeout=10)
    assert left, "the generator leaves too"
    client.close()
    publisher.close()


def test_a_generator_leaves_when_its_buffer_has_been_silent_for_too_long(tmp_path: Path) -> None:
    config = load_config([*OVERRIDES, "buffer.lease_s=0.2", "buffer.reconnect_s=0.4"])
    server = BufferServer(config, tmp_path)
    client = BufferClient(server.address, timeout_s=10.0)
    with pytest.raises(BufferGone, match=f"{server.address} has been silent for"):
        Generator(
            "g",
            config,
            client,
            make_fast_engine(),
            SimulatedEpisodes(),
        ).run()
    server.close()


def test_an_engine_that_takes_longer_to_build_than_a_lease_lasts_is_no_silence_of_the_buffers(
    tmp_path: Path,
) -> None:
    config = load_config([*OVERRIDES, "buffer.lease_s=2"])
    server, stop = serve_buffer(config, tmp_path)
    client, own = (BufferClient(server.address, timeout_s=10.0) for _ in range(2))
    own.call(m.JoinRun(generator="g"), m.JoinedRun)
    time.sleep(2.5)  # the engine is built
    generator = Generator("g", config, own, make_refusing_engine(0), SimulatedEpisodes())
    thread = threading.Thread(target=generator.run)
    thread.start()
    publisher = Publisher(tmp_path / "weights", "life")
    manifest = publisher.publish_version(0, whole_parts({"w": torch.tensor([0.0])}))
    client.call(
        m.PublishVersion(version=0, manifest_locator=publisher.announce_version(manifest)), m.Acknowledged
    )
    assert isinstance(client.take_batch(0, wait_s=8.0), TakenBatch)
    client.call(m.StopRun(reason="over"), m.Acknowledged)
    thread.join(timeout=10)
    stop()
    client.close()
    publisher.close()


def test_generators_on_another_host_fetch_each_version_once_for_all_of_them(
    start: Callable[..., GeneratorRun], tmp_path: Path
) -> None:
    run = start("run.steps=5", count=2, far=True)
    for step in range(5):
        run.publish_version(step)
        run.train_step(step)
    size = next((tmp_path / "weights").glob("*.safetensors")).stat().st_size
    status = run.close()
    taken = sum(fetcher.bytes_received for fetcher in run.fetchers)
    assert size <= taken <= 5 * size, "a version that was not needed is passed over, and none comes twice"
    assert status.tokens.trained > 0 and status.digest_mismatches == 0
    assert not (tmp_path / "fetched").exists(), "nothing stays behind"


def serve_buffer(config: Config, folder: Path) -> tuple[BufferServer, Callable[[], None]]:
    """Starts a buffer in a thread; returns it and a function that ends it."""
    server = BufferServer(config, folder / "journal")
    thread = threading.Thread(target=server.run)
    thread.start()

    def stop() -> None:
        server.stop()
        thread.join(timeout=10)

    return server, stop


class RefusingEngine(SimulatedEngine):
    """An engine whose first `times` loads do not end up with what they are given."""

    times = 1

    def load_version(self, source: WeightSource) -> None:
        if self.times:
            self.times -= 1
            raise EngineMismatch(
                "version 0: 1 of 1 tensors in the engine do not have the published digest: w"
            )
        super().load_version(source)


def make_refusing_engine(times: int) -> RefusingEngine:
    engine = RefusingEngine(tokens_per_s=2000, slots=16, mean_tokens=6, cv=0.5)
    engine.times = times
    return engine


@pytest.mark.parametrize("times", [1, 2])
def test_a_mismatch_is_repaired_once_and_a_second_one_takes_the_generator_out_of_service(
    tmp_path: Path, times: int
) -> None:
    server, stop = serve_buffer(load_config([*OVERRIDES, "buffer.lease_s=2"]), tmp_path)
    client, own = (BufferClient(server.address, timeout_s=10.0) for _ in range(2))
    generator = Generator("g", load_config(OVERRIDES), own, make_refusing_engine(times), SimulatedEpisodes())
    ended: list[BaseException | None] = []

    def generate() -> None:
        try:
            generator.run()
            ended.append(None)
        except EngineMismatch as error:
            ended.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    publisher = Publisher(tmp_path / "weights", "life")
    manifest = publisher.publish_version(0, whole_parts({"w": torch.tensor([0.0])}))
    client.call(
        m.PublishVersion(version=0, manifest_locator=publisher.announce_version(manifest)), m.Acknowledged
    )
    if times == 1:
        assert isinstance(client.take_batch(0, wait_s=8.0), TakenBatch), "it serves"
        client.call(m.StopRun(reason="over"), m.Acknowledged)
    thread.join(timeout=10)
    status = client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status
    stop()
    client.close()
    publisher.close()
    if times == 1:
        assert ended == [None] and status.digest_mismatches == 1 and status.weight_updates == 1
    else:
        assert "1 of 1 tensors in the engine" in str(ended[0])
        assert status.tokens.total == 0 and status.weight_updates == 0, "it has sampled nothing"


class DamagedWeights(Subscriber):
    """Brings the first version. What it brings of the second is damaged `times` times; the copy that is
    fetched again takes until `came` is set."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.asked_again, self.came = times, threading.Event(), threading.Event()

    def prepare_version(self, announced: str, *, again: bool = False) -> WeightSource:
        source = super().prepare_version(announced, again=again)
        if again:
            self.asked_again.set()
            assert self.came.wait(30)
        if source.manifest.version == 1 and self.times:
            self.times -= 1
            raise DigestMismatch("version 1: 1 of 1 tensors in the file do not have the published digest: w")
        return source


class StillHeart:
    timeline = Timeline()

    def set_activity(self, activity: str, moves: bool = True) -> None: ...


@pytest.mark.parametrize("times", [1, 2])
def test_a_version_that_came_damaged_is_fetched_again_while_the_one_before_serves(
    tmp_path: Path, times: int
) -> None:
    weights, engine, publisher = (
        DamagedWeights(times),
        make_refusing_engine(0),
        Publisher(tmp_path / "w", "life"),
    )
    heart: Any = StillHeart()
    updates = WeightUpdates(load_config(OVERRIDES), engine, weights, heart, GeneratorReport(), time.monotonic)

    def announce(version: int) -> None:
        manifest = publisher.publish_version(version, whole_parts({"w": torch.tensor([float(version)])}))
        updates.note_announcement(version, publisher.announce_version(manifest), version)

    def follow(until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not until():
            updates.update_engine()
            assert time.monotonic() < deadline

    try:
        announce(0)
        follow(lambda: updates.held_version == 0)
        announce(1)
        with ThreadPoolExecutor(1) as pool:
            followed = pool.submit(follow, weights.asked_again.is_set)
            assert weights.asked_again.wait(20)
            late = threading.Timer(10.0, weights.came.set)
            late.start()
            followed.result(timeout=20)
            late.cancel()
        assert not weights.came.is_set(), "the loop has gone on before the other copy was there"
        assert updates.update_engine() is None and updates.held_version == engine.version == 0
        weights.came.set()
        if times == 1:
            follow(lambda: updates.held_version == 1)
        else:
            with pytest.raises(DigestMismatch):
                follow(lambda: False)
            assert engine.version == 0, "nobody has touched the engine"
    finally:
        weights.came.set()
        updates.close()
        publisher.close()


class SlowWeights(Subscriber):
    """Brings the second version only when `came` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.came = threading.Event(), threading.Event()

    def prepare_version(self, announced: str, *, again: bool = False) -> WeightSource:
        source = super().prepare_version(announced, again=again)
        if source.manifest.version == 1:
            self.asked.set()
            assert self.came.wait(30)
        return source


def test_an_engine_that_is_to_finish_its_samples_first_takes_on_more_while_a_version_is_on_its_way(
    tmp_path: Path,
) -> None:
    weights, publisher = SlowWeights(), Publisher(tmp_path / "w", "life")
    engine = SimulatedEngine(tokens_per_s=1, slots=1, mean_tokens=1000, cv=0.1)  # its sample lasts
    heart: Any = StillHeart()
    config = load_config([*OVERRIDES, "sync.in_flight=false"])
    updates = WeightUpdates(config, engine, weights, heart, GeneratorReport(), time.monotonic)
    try:
        for version in (0, 1):
            manifest = publisher.publish_version(version, whole_parts({"w": torch.tensor([0.0])}))
            updates.note_announcement(version, publisher.announce_version(manifest), version)
            deadline = time.monotonic() + 20
            while version > updates.held_version and not weights.asked.is_set():
                updates.update_engine()
                assert time.monotonic() < deadline
            if version == 0:
                engine.add_sample(Sample(id="1.0", prompt=[1], max_tokens=1000, seed=0))
        assert engine.num_unfinished and updates.update_engine() is None
        assert not updates.waits_for_idle_engine, "the link may be as slow as it likes"
        weights.came.set()
        while not updates.waits_for_idle_engine:
            assert updates.update_engine() is None and time.monotonic() < deadline
        assert updates.update_engine() is None and engine.version == 0, "it is busy"
        engine.abort_samples(["1.0"])
        assert updates.update_engine() == engine.version == 1 and not updates.waits_for_idle_engine
    finally:
        weights.came.set()
        updates.close()
        publisher.close()


def test_tokens_carry_the_versions_of_an_update_in_flight(
    start: Callable[..., GeneratorRun], tmp_path: Path
) -> None:
    run = start("staleness.max_versions=2", "staleness.on_late=mask", "run.steps=6")
    for step in range(6):
        run.publish_version(step)
        run.train_step(step)
    run.close()
    versions = [v for b in read_groups(tmp_path / "journal") for v in b.column("versions").to_pylist()]
    sampled = [[v for v in row if v >= 0] for row in versions]
    assert all(row == sorted(row) for row in sampled), "versions never fall within a trajectory"
    assert len({v for row in sampled for v in row}) > 1


def test_remax_makes_whole_groups_and_their_baselines_in_an_engine_that_has_just_room_for_one(
    start: Callable[..., GeneratorRun], tmp_path: Path
) -> None:
    run = start("algo=remax", "generators.max_sequences=3")
    for step in range(3):
        run.publish_version(step)
        run.train_step(step)
    status = run.close()
    rows = [row for batch in read_groups(tmp_path / "journal") for row in batch.to_pylist()]
    assert [(row["group"], row["sample"]) for row in rows] == [
        (group, sample) for group in range(12) for sample in (0, 1)
    ]
    baselines = [dict(row["rewards"])[GREEDY] for row in rows]
    assert baselines[::2] == baselines[1::2] and set(baselines) == {0.0, 1.0}
    assert status.tokens.total == status.tokens.trained == sum(sum(row["sampled"]) for row in rows)
    assert status.generators["g0"].sampled_tokens > status.tokens.total, (
        "greedy ones stand outside the ledger"
    )


def test_a_generator_tells_of_the_tokens_of_samples_that_have_not_ended(
    start: Callable[..., GeneratorRun],
) -> None:
    slow = SimulatedEngine(tokens_per_s=50, slots=16, mean_tokens=5000, cv=0)
    run = start("generators.max_model_len=9000", "sampling.max_tokens=8000", engine=slow)
    run.publish_version(0)
    status = run.wait_for(lambda status: status.generators["g0"].decoded_tokens > 0)
    assert status.generators["g0"].sampled_tokens == 0
    run.close()


class LengthEpisodes(SimulatedEpisodes):
    """Rewards a response with its length. Prompt 9 cannot be scored."""

    async def score_tokens(self, prompt: SimulatedPrompt, tokens: list[int]) -> Score:
        if prompt.index == 9:
            raise TimeoutError("the judge is away")
        return Score(float(len(tokens)))


def test_the_greedy_sample_of_remax_is_scored_and_counted_nowhere_and_evaluation_has_none() -> None:
    def lease(number: int, split: str = "train") -> m.Lease:
        samples = 2 if split == "train" else 1
        return m.Lease(
            id=number,
            split=split,
            task="t",
            index=number,
            seed=0,
            group=number,
            due=0,
            min_version=0,
            num_samples=samples,
            evaluation="" if split == "train" else "held_out",
        )

    work = m.LeaseGrant(
        leases=[lease(6, "eval"), lease(7), lease(8), lease(9)], version=0, manifest_locator=""
    )
    standing = m.GeneratorStanding(revoked=[], version=0, manifest_locator="")
    revoked, over = (
        m.GeneratorStanding(revoked=r, version=0, manifest_locator="", ended=e)
        for r, e in (([7], False), ([], True))
    )
    engine = ScriptedEngine(
        [[], ["6/0/0", "7/2/0", "7/0/0", "8/2/0"], ["8/0/0", "8/1/0", "9/0/0", "9/1/0", "9/2/0"]],
        num_samples=10,
    )
    client = ScriptedBuffer([work, standing, standing, revoked, over], engine)
    ticks = itertools.count()
    config = load_config([*OVERRIDES, "algo=remax"])
    Generator(
        "g", config, client, engine, LengthEpisodes(), heart=client, clock=lambda: float(next(ticks))
    ).run()  # type: ignore[arg-type]

    assert [sample.id for sample in engine.added if sample.greedy] == ["7/2/0", "8/2/0", "9/2/0"]
    assert [sample.id for sample in engine.added if not sample.greedy] == [
        "6/0/0",
        "7/0/0",
        "7/1/0",
        "8/0/0",
        "8/1/0",
        "9/0/0",
        "9/1/0",
    ]
    assert [request.count for request in client.requests if isinstance(request, m.RequestLeases)] == [2], (
        "three groups of three and a prompt of one leave room for two groups of 16 samples"
    )
    assert client.progress[0] == {6: 0, 7: 0, 8: 0, 9: 0}
    assert {6: 1, 7: 3, 8: 3, 9: 3} in client.progress
    assert all(
        {6: 1, 7: 3, 8: 3, 9: 3} | told == {6: 1, 7: 3, 8: 3, 9: 3} for told in client.progress[-2:]
    ), "6 may have been scored by now"
    failed = {
        request.lease: (request.num_tokens, request.revoked)
        for request in client.requests
        if isinstance(request, m.FailLease)
    }
    assert failed == {7: (3, True), 9: (3, False)}
    ((first, second),) = client.groups
    assert [row["sample"] for row in (first, second)] == [0, 1] and [first["reward"], second["reward"]] == [
        1.0,
        2.0,
    ]
    assert first["rewards"] == second["rewards"] == [(GREEDY, 100.0)]
    assert [one.rewards for one in client.requests if isinstance(one, m.SubmitEvaluation)] == [[1.0]]


def test_versions_that_come_faster_than_they_can_be_brought_are_taken_up_all_the_same(
    start: Callable[..., GeneratorRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each version is announced while the one before is still being prepared."""
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    prepare = Subscriber.prepare_version

    def slow(self: Subscriber, announced: str, *, again: bool = False) -> WeightSource:
        begun.release()
        go_on.acquire(timeout=30)
        return prepare(self, announced, again=again)

    monkeypatch.setattr(Subscriber, "prepare_version", slow)
    run = start("staleness.max_versions=3", "run.steps=40", "buffer.watchdog_s=100")
    run.publish_version(0)
    for version in range(1, 5):
        assert begun.acquire(timeout=20)
        run.publish_version(version)
        deadline = time.monotonic() + 20
        while run.generators[0]._updates._newest_version < version:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        go_on.release()
        while run.generators[0]._totals.updates < version:
            assert time.monotonic() < deadline, f"version {version - 1} was brought and not taken up"
            time.sleep(0.01)
    go_on.release(100)
    run.close()


def test_a_generator_that_cannot_open_its_episodes_leaves_no_heart_beating(tmp_path: Path) -> None:
    class ClosedEpisodes(SimulatedEpisodes):
        async def open(self) -> None:
            raise ValueError("no such task")

    config = load_config(OVERRIDES)
    server, before = BufferServer(config, tmp_path), set(threading.enumerate())
    client = BufferClient(server.address, timeout_s=10.0)
    with pytest.raises(ValueError, match="no such task"):
        Generator("g", config, client, make_fast_engine(), ClosedEpisodes())
    assert not [one for one in set(threading.enumerate()) - before if one.name == "heartbeat"]
    client.close()
    server.close()
