"""Learner and engines have the same GPUs by turns (`placement.mode=colocated`): the locks, the models' memory,
and whole runs of both sides in one process."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from ranks import on_ranks
from torch.distributed.tensor import DTensor

from buffers.client import BufferClient
from buffers.role_registry import ASLEEP, RoleRegistry
from buffers.messages import RoleHeartbeat
from buffers.server import BufferServer
from buffers.trajectory import Trajectory, to_batch
from configs.load import load_config, to_yaml
from configs.parallel import LoraConfig
from configs.placement import PlacementConfig, PlacementMode
from generators.engine import Completion
from generators.episode import SimulatedEpisodes
from generators.episode_times import EpisodeTimes
from generators.engine_turns import EngineTurns
from generators.simulated_engine import SimulatedEngine
from generators.worker import Generator
from learners.device_memory import DeviceMemory
from learners.engine import ModelKind
from learners.fsdp import FsdpEngine
from learners.megatron.engine import MegatronEngine
from learners.packing import batch_from_arrow, pack_rows
from learners.startup import start_learner
from learners.world import World as RankWorld
from slipstream.role_placement import NodeRoom, RoleWishes
from slipstream.turn_placement import divide_turns
from sync.stream import collect_tensors
from sync.turns import TurnLocks, open_turn_locks

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


class World:
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
    world = World(tmp_path / "t", engines, num_ranks, max_versions)
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


def hold_all(engine: FsdpEngine | MegatronEngine) -> DeviceMemory:
    """Makes the engine's memory that of a GPU, as far as offloading goes."""
    memory = engine._memory
    memory._moves = lambda tensor: True
    return memory


def train_with_turns(world: RankWorld, model: Path, rows: list[Trajectory], kind: str) -> bool:
    """Trains two engines alike, one of which is offloaded before each step and after it; returns whether they
    end with the same bits, in weights and in optimizer state."""
    batch = batch_from_arrow(pa.Table.from_batches([to_batch(rows)]))
    packed = [pack_rows(batch, range(batch.num_sequences))]
    make = {
        "fsdp": lambda: FsdpEngine(model),
        "lora": lambda: FsdpEngine(model, lora=LoraConfig(rank=2)),
        "critic": lambda: FsdpEngine(model, kind=ModelKind.critic),
        "megatron": lambda: MegatronEngine(model),
    }[kind]
    engines = [make(), make()]
    memory = hold_all(engines[1])
    collect_tensors(engines[1].stream_weights())
    for _ in range(2):
        engines[1].offload()
        held = [*engines[1]._list_tensors()]
        local = [one.to_local() if isinstance(one, DTensor) else one for one in held]
        assert memory.num_bytes_away and not any(one.untyped_storage().nbytes() for one in local)
        engines[1].onload()
        assert not memory.num_bytes_away
        outs = [engine.infer(packed)[0] for engine in engines]
        assert torch.equal(*outs)
        norms = [
            engine.update(packed, lambda out, entropy, part: out.sum() / 100, 1e-2) for engine in engines
        ]
        assert norms[0] == norms[1] > 0
    held = [list(engine._list_tensors()) for engine in engines]
    local = [[one.to_local() if isinstance(one, DTensor) else one for one in each] for each in held]
    return all(torch.equal(a, b) for a, b in zip(*local, strict=True))


def train_all_with_turns(world: RankWorld, model: Path, rows: list[Trajectory]) -> dict[str, bool]:
    return {kind: train_with_turns(world, model, rows, kind) for kind in ("fsdp", "lora", "critic", "megatron")}


def test_models_that_are_offloaded_between_steps_train_to_the_same_bits(
    fixed_model: Path, trajectories: list[Trajectory], tmp_path: Path
) -> None:
    for same in on_ranks(2, train_all_with_turns, tmp_path, fixed_model, trajectories):
        assert same == dict.fromkeys(("fsdp", "lora", "critic", "megatron"), True)


def test_what_is_in_the_hosts_memory_already_is_left_there(fixed_model: Path, process_group: None) -> None:
    engine = FsdpEngine(fixed_model, kind=ModelKind.frozen)
    engine.offload()
    assert engine._memory.num_bytes_away == 0
    engine.onload()
