"""Learner and engines have the same GPUs by turns (`placement.mode=colocated`): the locks, the models'
memory, and runs of both sides."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from generator_run import OVERRIDES
from ranks import on_ranks
from runs import SIMULATED, StartedRun, assert_accounts_close
from torch.distributed.tensor import DTensor

from buffers.client import BufferClient
from buffers.driver_messages import RunNews, StopRun, WatchRun
from buffers.heartbeat import HeartbeatThread
from buffers.messages import Acknowledged, GeneratorHeartbeat, RoleHeartbeat
from buffers.role_registry import ASLEEP, STARTING, RoleRegistry
from buffers.run_status import GeneratorReport, RunStatus
from buffers.server import BufferServer
from buffers.trajectory import Trajectory, to_batch
from configs.load import load_config
from configs.parallel import LoraConfig
from generators.engine import Completion, Sample
from generators.engine_turns import EngineTurns
from generators.episode import SimulatedEpisodes
from generators.episode_times import EpisodeTimes
from generators.simulated_engine import SimulatedEngine
from generators.worker import Generator
from learners.device_memory import DeviceMemory
from learners.engine import ModelKind
from learners.fsdp import FsdpEngine
from learners.megatron.engine import MegatronEngine
from learners.packing import batch_from_arrow, pack_rows
from learners.startup import start_learner
from learners.turns import LearnerTurns
from learners.world import World
from sync.turns import TurnHolder, TurnLocks, open_turn_locks
from sync.weight_source import WeightSource

PATIENCE_S = 60.0


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- locks


def test_an_engine_takes_no_turn_that_a_rank_calls_for_and_the_rank_gets_it(tmp_path: Path) -> None:
    engine, other = TurnLocks(tmp_path / "t", ["0"], "engine"), TurnLocks(tmp_path / "t", ["0"], "other")
    rank = TurnLocks(tmp_path / "t", ["0"], "rank")
    assert engine.take_together("sampling") and other.take_together("sampling"), "engines share a GPU"
    assert not engine.is_called() and not rank.call_and_take("training"), "they have it"
    assert engine.is_called()
    engine.give_up()
    assert not engine.take_together("sampling") and not rank.call_and_take("training"), "one more has it"
    other.give_up()
    assert rank.call_and_take("training") and not engine.take_together("sampling")
    rank.give_up()
    assert engine.take_together("sampling") and not engine.is_called()


def test_an_engine_of_several_gpus_takes_all_of_them_or_none(tmp_path: Path) -> None:
    engine = TurnLocks(tmp_path / "t", ["1", "0"], "engine")
    ranks = [TurnLocks(tmp_path / "t", [str(gpu)], f"rank{gpu}") for gpu in range(2)]
    assert ranks[1].call_and_take("training") and not engine.take_together("sampling")
    assert ranks[0].call_and_take("training"), "the engine that waits holds nothing"
    ranks[0].give_up()
    assert not engine.take_together("sampling")
    ranks[1].give_up()
    assert engine.take_together("sampling")
    assert not ranks[0].call_and_take("training") and engine.is_called(), "one call is enough"


HOLDER = """
import sys, time
from pathlib import Path
from sync.turns import TurnLocks
locks = TurnLocks(Path(sys.argv[1]), ["0"], "learner-0")
assert locks.call_and_take("training step 7")
print("has it", flush=True)
time.sleep(600)
"""


def test_a_turn_names_who_has_it_and_the_kernel_takes_it_from_a_role_that_is_killed(tmp_path: Path) -> None:
    engine = TurnLocks(tmp_path / "t", ["0"], "generator-0")
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "t")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "has it\n"
            holder.send_signal(signal.SIGSTOP)
            assert not engine.take_together("sampling"), "one that is stopped keeps its turn, and is named"
            (named,) = engine.find_holders()
            assert (named.role, named.pid, named.doing) == ("learner-0", holder.pid, "training step 7")
        finally:
            holder.kill()
            holder.wait()
        assert engine.take_together("sampling") and not engine.find_holders()


def test_the_last_role_takes_the_folder_along(tmp_path: Path) -> None:
    one, two = TurnLocks(tmp_path / "t", ["0"], "one"), TurnLocks(tmp_path / "t", ["0"], "two")
    one.close()
    assert two.take_together("sampling")
    two.close()
    assert not (tmp_path / "t").exists()


def test_a_rank_that_waits_for_its_turn_says_who_has_it_and_its_models_come_back_once_it_has(
    tmp_path: Path,
) -> None:
    engine = TurnLocks(tmp_path / "t", ["0"], "generator-0")
    said: list[tuple[Any, ...]] = []
    turns = LearnerTurns(TurnLocks(tmp_path / "t", ["0"], "learner-0"), lambda *words: said.append(words))
    moved: list[str] = []
    turns.hand_over(
        SimpleNamespace(offload=lambda: moved.append("offload"), onload=lambda: moved.append("onload"))
    )
    turns.begin("loading the model")
    assert not engine.take_together("sampling")
    turns.end()
    assert moved == ["offload"], "they were loaded in this turn"
    assert engine.take_together("sampling")
    waiting = threading.Thread(target=turns.begin, args=("training step 3",))
    waiting.start()
    asks = f"training step 3: asks for the GPU, which generator-0 (process {os.getpid()}) has"
    wait_until(lambda: (asks, False) in said)
    assert moved == ["offload"] and engine.is_called()
    engine.give_up()
    waiting.join(PATIENCE_S)
    assert moved == ["offload", "onload"] and turns.waited_s > 0 and said[-1] == ("training step 3",)
    with turns.hold("a checkpoint"):
        assert moved == ["offload", "onload"], "within a turn nothing moves"
    assert moved == ["offload", "onload", "offload"] and engine.take_together("sampling")


class TurnWorld:
    """Ranks and engines as the proof in `sync.turns` has them, driven in any order. A rank's turn has a
    collective in it: it ends when all ranks have theirs. Batches are what engines have made while awake."""

    def __init__(self, folder: Path, engines: list[list[str]], num_ranks: int, max_versions: int) -> None:
        self.folder, self.max_versions, self.num_ranks = folder, max_versions, num_ranks
        self.ranks = [self.make_rank(rank) for rank in range(num_ranks)]
        self.engines = [TurnLocks(folder, gpus, f"e{number}") for number, gpus in enumerate(engines)]
        self.working, self.version, self.made = [False] * num_ranks, 0, 0
        self.in_a_row = 0

    def make_rank(self, rank: int) -> TurnLocks:
        return TurnLocks(self.folder, [str(rank)], f"r{rank}")

    def run_engine(self, number: int, rng: random.Random) -> None:
        """One round of an engine's loop."""
        engine = self.engines[number]
        if not engine.is_holding:
            engine.take_together("sampling")
        elif engine.is_called():
            engine.give_up()
        else:
            busy = [rank for rank in engine.turns if self.ranks[int(rank)].is_holding]
            assert not busy, "an engine is awake in a rank's turn"
            if self.made <= self.version + self.max_versions and rng.random() < 0.3:
                self.made, self.in_a_row = self.made + 1, 0

    def run_rank(self, rank: int) -> None:
        if self.ranks[rank].is_holding:
            if all(one.is_holding for one in self.ranks) and not all(self.working):
                self.working = [True] * self.num_ranks
            if self.working[rank]:
                self.ranks[rank].give_up()
                if not any(one.is_holding for one in self.ranks):
                    self.working, self.version = [False] * self.num_ranks, self.version + 1
                    self.in_a_row += 1
                    assert self.in_a_row <= self.max_versions + 1, "engines get their turn"
        elif self.made > self.version and not self.working[rank]:
            self.ranks[rank].call_and_take("training")

    def lose_learner(self) -> None:
        """All ranks die, as the driver has it when one does."""
        for rank, locks in enumerate(self.ranks):
            locks.close()
            self.ranks[rank] = self.make_rank(rank)
        self.working = [False] * self.num_ranks

    def lose_engine(self, number: int) -> None:
        before = self.engines[number]
        before.close()
        self.engines[number] = TurnLocks(self.folder, before.turns, f"e{number}")


@pytest.mark.parametrize("max_versions", [0, 2])
@pytest.mark.parametrize(
    ("engines", "num_ranks"),
    [([["0"]], 1), ([["0"], ["0"]], 1), ([["0"], ["1"]], 2), ([["0", "1"], ["1", "2"], ["2", "0"]], 3)],
)
def test_nobody_waits_for_ever_and_nobody_starves_in_whatever_order_they_run(
    tmp_path: Path, engines: list[list[str]], num_ranks: int, max_versions: int
) -> None:
    rng = random.Random(f"{engines} {max_versions}")
    world = TurnWorld(tmp_path / "t", engines, num_ranks, max_versions)
    for number in range(6000):
        if number % 700 == 699:
            rng.choice([world.lose_learner, lambda: world.lose_engine(rng.randrange(len(engines)))])()
        if rng.random() < 0.5:
            world.run_engine(rng.randrange(len(engines)), rng)
        else:
            world.run_rank(rng.randrange(num_ranks))
        if world.version == 40:
            return
    raise AssertionError(f"version {world.version} after {number} moves")


# ---- the models' memory


MODELS: dict[str, Callable[[Path], FsdpEngine | MegatronEngine]] = {
    "fsdp": FsdpEngine,
    "fsdp, critic": partial(FsdpEngine, kind=ModelKind.critic),
    "fsdp, reference": partial(FsdpEngine, kind=ModelKind.frozen),
    "lora": partial(FsdpEngine, lora=LoraConfig(rank=2)),
    "megatron": MegatronEngine,
    "megatron, critic": partial(MegatronEngine, kind=ModelKind.critic),
    "megatron, reference": partial(MegatronEngine, kind=ModelKind.frozen),
}
"""All that a learner may hold. A reward model is one more policy."""


def hold_all(engine: FsdpEngine | MegatronEngine) -> DeviceMemory:
    """Makes the engine's memory that of a GPU, as far as offloading goes."""
    memory = engine._memory
    memory._moves = lambda tensor: True
    return memory


def train_with_turns(model: Path, rows: list[Trajectory], name: str) -> bool:
    """Trains two engines alike, one of which is offloaded before each step and after it; returns whether they
    end with the same bits, in weights and in optimizer state."""
    batch = batch_from_arrow(pa.Table.from_batches([to_batch(rows)]))
    packed = [pack_rows(batch, range(batch.num_sequences))]
    engines = [MODELS[name](model), MODELS[name](model)]
    memory, is_trained = hold_all(engines[1]), "reference" not in name
    for _ in engines[1].stream_weights() if "critic" not in name else ():
        pass
    for _ in range(2):
        engines[1].offload()
        assert memory.num_bytes_away
        assert not any(one.untyped_storage().nbytes() for one in list_local_tensors(engines[1]))
        engines[1].onload()
        assert not memory.num_bytes_away
        outs = [engine.infer(packed)[0] for engine in engines]
        assert torch.equal(*outs) and outs[0].any()
        for engine in engines if is_trained else ():
            assert engine.update(packed, lambda out, entropy, part: out.sum() / 100, 1e-2) > 0
    local = map(list_local_tensors, engines)
    return all(torch.equal(a, b) for a, b in zip(*local, strict=True))


def list_local_tensors(engine: FsdpEngine | MegatronEngine) -> list[torch.Tensor]:
    held = engine._list_tensors()
    return [one.to_local() if isinstance(one, DTensor) else one for one in held]


def train_all_with_turns(world: World, model: Path, rows: list[Trajectory]) -> dict[str, bool]:
    return {name: train_with_turns(model, rows, name) for name in MODELS}


def test_models_that_are_offloaded_between_steps_train_to_the_same_bits(
    fixed_model: Path, trajectories: list[Trajectory], tmp_path: Path
) -> None:
    for same in on_ranks(2, train_all_with_turns, tmp_path, fixed_model, trajectories):
        assert same == dict.fromkeys(MODELS, True)


def test_what_is_in_the_hosts_memory_already_is_left_there(fixed_model: Path, process_group: None) -> None:
    engine = FsdpEngine(fixed_model, kind=ModelKind.frozen)
    engine.offload()
    assert engine._memory.num_bytes_away == 0
    engine.onload()


# ---- both sides


class NotedEngine(SimulatedEngine):
    """Notes all that needs the GPU."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(tokens_per_s=1000, slots=8, mean_tokens=8, cv=1.0)
        self.events = events

    def add_sample(self, sample: Sample) -> None:
        self.events.append("add")
        super().add_sample(sample)

    def step(self) -> list[Completion]:
        self.events.append("step")
        return super().step()

    def load_version(self, source: WeightSource) -> None:
        self.events.append("load")
        super().load_version(source)

    def sleep(self, *, keep_weights: bool) -> None:
        self.events.append("sleep")
        super().sleep(keep_weights=keep_weights)
        # As an engine on a GPU does.
        if not keep_weights:
            self.version = None

    def wake(self) -> None:
        self.events.append("wake")
        super().wake()


class NotedModels:
    """Notes when a rank has its models on the GPU, and which version the buffer knows when they leave it."""

    def __init__(self, events: list[str], client: BufferClient) -> None:
        self.events, self.client = events, client

    def offload(self) -> None:
        status = self.client.call(WatchRun(after=0, wait_s=0.0), RunNews).status
        self.events.append(f"offload at version {status.version}")

    def onload(self) -> None:
        self.events.append("onload")


class NotedHeart(HeartbeatThread):
    """Notes what a generator says that it does."""

    def __init__(self, client: BufferClient, name: str, said: set[str]) -> None:
        self.said = said
        compose = partial(GeneratorHeartbeat, generator=name, progress={}, report=GeneratorReport())
        super().__init__(client, compose, STARTING)

    def set_activity(self, activity: str, moved: bool = True) -> None:
        self.said.add(activity)
        super().set_activity(activity, moved)


COLOCATED = [*OVERRIDES, "placement.mode=colocated", "run.steps=6", "learner.checkpoint_every=4"]
"""A simulated run whose sides take turns."""


def run_both_sides(folder: Path, *overrides: str, count: int = 1) -> tuple[list[str], RunStatus, set[str]]:
    """Runs a learner here, and a buffer and generators in threads. Returns what happened, the last status,
    and what the generators said that they do."""
    config = load_config([*COLOCATED, *overrides])
    events: list[str] = []
    said: set[str] = set()
    server = BufferServer(config, folder / "journal")
    threads = [threading.Thread(target=server.run)]
    threads[0].start()
    watcher = BufferClient(server.address, timeout_s=PATIENCE_S)
    client = BufferClient(server.address, timeout_s=PATIENCE_S)
    learner = start_learner(config, folder, client, 0, f"file://{folder}/meet", None)
    learner._turns.hand_over(NotedModels(events, watcher))
    for number in range(count):
        locks = open_turn_locks(folder, f"g{number}", None, 1, on_gpus=False)
        turns = EngineTurns(locks, keeps_weights=not config.sync.in_flight)
        own, name = BufferClient(server.address, timeout_s=PATIENCE_S), f"g{number}"

        def generate(turns: EngineTurns = turns, own: BufferClient = own, name: str = name) -> None:
            heart = NotedHeart(own.open_another(), name, said)
            turns.wait_for_start(heart)
            engine = NotedEngine(events)
            Generator(name, config, own, engine, SimulatedEpisodes(), heart=heart, turns=turns).run()

        threads.append(threading.Thread(target=generate))
        threads[-1].start()
    learner.run()
    status = watcher.call(WatchRun(after=0, wait_s=0.0), RunNews).status
    watcher.call(StopRun(reason="over"), Acknowledged)
    for thread in threads[1:]:
        thread.join(timeout=PATIENCE_S)
        assert not thread.is_alive()
    watcher.close()
    server.stop()
    threads[0].join(timeout=PATIENCE_S)
    return events, status, said


@pytest.mark.parametrize(
    ("max_versions", "overrides", "count"),
    [(0, (), 1), (0, ("sync.in_flight=false",), 2), (2, (), 2), (2, ("sync.in_flight=false",), 1)],
)
def test_no_engine_works_in_the_learners_turn_which_ends_when_its_version_is_announced(
    tmp_path: Path, max_versions: int, overrides: tuple[str, ...], count: int
) -> None:
    events, status, said = run_both_sides(
        tmp_path, f"staleness.max_versions={max_versions}", *overrides, count=count
    )
    assert status.num_trained_steps == 6 and not status.trained_twice
    assert max(status.staleness_histogram) <= max_versions
    for account in (status.tokens, status.groups):
        rejected = sum(account.rejected.values())
        assert account.total == account.trained + account.masked + rejected + account.in_flight
    is_learners, ended = True, []
    for event in events:
        if event.startswith("offload"):
            ended.append(int(event.rpartition(" ")[2]))
        is_learners = event == "onload" or (is_learners and not event.startswith("offload"))
        assert not is_learners or event == "onload", f"{event} in the learner's turn: {events}"
    # The first turn publishes version 0. That of step 4 also copies a checkpoint, and so does a last one.
    assert ended == [0, 1, 2, 3, 4, 5, 6, 6]
    assert events.count("sleep") - events.count("wake") in (0, 1) and ASLEEP in said
    assert not list(Path("/dev/shm").glob(f"slipstream-turns-{tmp_path.name}-*"))


@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_a_run_goes_on_when_whoever_has_the_turn_is_killed_and_with_or_without_turns_when_it_is_resumed(
    start: Callable[..., StartedRun],
) -> None:
    run = start(
        *SIMULATED, "placement.mode=colocated", "staleness.max_versions=2", "run.steps=16",
        "learner.checkpoint_every=2", "generators.count=2", "generators.simulated.train_tokens_per_s=600",
    )  # fmt: skip
    turns = open_turn_locks(run.folder.resolve(), "watcher", None, 1, on_gpus=False)

    def find_holder(run: StartedRun, role: str) -> TurnHolder:
        found: list[TurnHolder] = []

        def look() -> bool:
            found[:] = [one for one in turns.find_holders() if one.role.startswith(role)]
            return bool(found)

        run.wait_for(look, f"a {role} that has the turn")
        return found[0]

    try:
        run.wait_for(lambda: run.steps() >= 2, "step 2")
        os.kill(find_holder(run, "generator").pid, signal.SIGKILL)
        run.wait_for(lambda: run.steps() >= 4, "step 4")
        os.kill(find_holder(run, "learner").pid, signal.SIGKILL)
        run.wait_for(lambda: (run.folder / "logs/buffer.log").exists() and bool(run.rewinds()), "rewind")
        run.wait_for(lambda: run.steps() >= 6, "step 6")
        run.lose_buffer()
        run.wait_for(lambda: run.steps() >= 8, "step 8")
        find_holder(run, "learner")
        run.process.kill()
        apart = start(f"run.resume={run.folder}", "placement.mode=apart")
        apart.wait_for(lambda: apart.steps() >= 11, "step 11")
        assert not turns.find_holders(), "all work at the same time"
        apart.process.kill()
        again = start(f"run.resume={run.folder}", "placement.mode=colocated")
        find_holder(again, "learner")
        find_holder(again, "generator")
        status, said = again.finish()
    finally:
        turns.close()
    assert status == 0, said
    summary = again.summary()
    assert summary["steps"] == 16 and summary["staleness"]["max"] <= 2
    assert_accounts_close(summary)
    for one in (run, apart, again):
        one.assert_nothing_left()


# ---- time


def test_a_sleeping_engine_is_no_work_that_keeps_the_watchdog_quiet_and_the_learner_in_its_turn_is() -> None:
    roles = RoleRegistry()
    for at in (0.0, 1.0):
        roles.note_role("generator-0", RoleHeartbeat(role="generator-0", activity=ASLEEP), at)
    assert not roles.is_at_work(1.0, stalled_s=60.0)
    training = RoleHeartbeat(role="learner-0", activity="training step 3")
    roles.note_role("learner-0", training, 1.0)
    assert roles.is_at_work(1.0, stalled_s=60.0)
    asks = "training step 3: asks for the GPU, which generator-0 (process 7) has"
    waiting = RoleHeartbeat(role="learner-0", activity=asks, activity_s=70.0, standstill_s=70.0)
    roles.note_role("learner-0", waiting, 2.0)
    assert not roles.is_at_work(2.0, stalled_s=60.0)
    assert f"learner-0: {asks} for 70 s" in roles.describe_long_waits(2.0)


def test_an_engine_that_waits_for_its_first_turn_keeps_no_watchdog_quiet_and_the_status_says_so(
    tmp_path: Path,
) -> None:
    rank = TurnLocks(tmp_path / "t", ["0"], "learner-0")
    assert rank.call_and_take("loading the model")
    turns = EngineTurns(TurnLocks(tmp_path / "t", ["0"], "generator-0"), keeps_weights=False)
    roles, at = RoleRegistry(1), 0.0
    roles.begin_life("generator-0", at)
    described: list[str] = []

    def note(activity: str) -> None:
        beat = GeneratorHeartbeat(
            generator="generator-0", progress={}, report=GeneratorReport(), activity=activity
        )
        roles.note_generator(beat, at)
        described.append(roles.describe_starts(at))

    def look_again(seconds: float) -> None:
        assert not roles.is_at_work(at, stalled_s=60.0), "nobody waits for it"
        rank.give_up()

    turns.wait_for_start(SimpleNamespace(set_activity=note), look_again)  # type: ignore[arg-type]
    assert described[0] == "0 of 1 generators ready, 1 asleep: the learner has the GPU"
    assert described[1].startswith("0 of 1 generators ready, 1 starting the engine")
    assert roles.is_at_work(at, stalled_s=60.0)


def test_an_episodes_time_stands_still_while_the_engine_sleeps() -> None:
    async def play(times: EpisodeTimes, seconds: float, *, limited: bool = True) -> str:
        try:
            async with times.limit_episode(0.2) as limit:
                if not limited:
                    limit.limit_time(False)
                await asyncio.sleep(seconds)
        except TimeoutError:
            return "late"
        return "in time"

    async def main() -> list[str]:
        times = EpisodeTimes()
        before = asyncio.create_task(play(times, 0.6))
        endless = asyncio.create_task(play(times, 60.0))
        untimed = asyncio.create_task(play(times, 1.2, limited=False))
        await asyncio.sleep(0)
        await times.pause()
        begun_in_sleep = asyncio.create_task(play(times, 0.6))
        await asyncio.gather(before, begun_in_sleep)
        assert not endless.done()
        await times.resume()
        return [before.result(), begun_in_sleep.result(), await endless, await untimed]

    assert asyncio.run(main()) == ["in time", "in time", "late", "in time"]
