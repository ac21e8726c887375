"""Several ranks in the loop: what they tell each other, one fetch a host, a critic on ranks of its own."""

import os
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor
from training_steps import (
    STEP,
    StepOutcome,
    assert_same,
    configure_step,
    copy_state,
    draw_responses,
    make_step_batch,
)

from buffers import messages as m
from buffers.client import TakenBatch
from buffers.trajectory import Trajectory, to_batch
from configs.schema import Config
from learners.engine import AbsentEngine
from learners.feed import Feed
from learners.models import load_models
from learners.packing import Batch, batch_from_arrow
from learners.rendezvous import join_ranks
from learners.step import Trainer
from learners.world import World

pytestmark = pytest.mark.usefixtures("process_group")


# ---- what ranks tell each other


def tell_sums(world: World) -> tuple[list[bytes], dict[str, Tensor]]:
    mine = {"all": torch.ones(2, 2) * world.rank, f"of {world.rank % 2}": torch.ones(3)}
    return world.gather_messages(f"I am {world.rank}".encode() * world.rank), world.add_named_tensors(mine)


def test_ranks_gather_messages_and_add_up_what_any_of_them_has(tmp_path: Path) -> None:
    for messages, sums in on_ranks(3, tell_sums, tmp_path / "three"):
        assert messages == [b"", b"I am 1", b"I am 2" * 2]
        assert {name: value.tolist() for name, value in sums.items()} == {
            "all": [[3.0, 3.0], [3.0, 3.0]], "of 0": [2.0] * 3, "of 1": [1.0] * 3,
        }  # fmt: skip
    assert World().gather_messages(b"alone") == [b"alone"]


def hear_two_messages(world: World) -> tuple[list[bytes], int, bool]:
    """Two messages of one topic, each made after the others have begun to wait; then what the store still
    holds."""
    num_waits = 0

    def count_wait() -> None:
        nonlocal num_waits
        num_waits += 1

    def make_late(message: bytes) -> bytes:
        time.sleep(1.5)  # a FileStore waits for whole seconds
        return message

    heard = []
    for message in (b"first", b"second"):
        heard.append(
            world.broadcast_message("news", partial(make_late, message), look_s=0.1, while_waiting=count_wait)
        )
        world.barrier()
    return heard, num_waits, world._store.check(["news 0"])


def test_a_rank_waits_for_the_first_ones_message_outside_of_any_collective(tmp_path: Path) -> None:
    first, second = on_ranks(2, hear_two_messages, tmp_path / "two")
    assert first == ([b"first", b"second"], 0, False), "a message replaces the one before it"
    assert second[0] == [b"first", b"second"] and second[1] >= 1 and not second[2]
    assert World().broadcast_message("news", lambda: b"alone") == b"alone"


# ---- the batch


class LateSource:
    """Has its batch later than any collective waits."""

    def __init__(self, rows: list[Trajectory], wait_s: float) -> None:
        self._table, self._ready_at = pa.Table.from_batches([to_batch(rows)]), time.monotonic() + wait_s

    def take_batch(self, step: int, wait_s: float) -> TakenBatch | m.NotReadyYet | m.RunStopped:
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        return TakenBatch(step, [0, 1, 2, 3, 4, 5], [1.0] * 6, self._table)


def wait_for_batch(world: World, rows: list[Trajectory], store: Path) -> int:
    with patch("learners.world.TIMEOUT", timedelta(seconds=1)), patch("learners.feed.PATIENCE_S", 0.3):
        impatient = World(world.rank, world.size, dist.FileStore(str(store), world.size))
        batch = Feed(LateSource(rows, 3.0), impatient, lambda text: None).take_batch(0)
    assert isinstance(batch, Batch)
    return len(batch.tokens)


def test_a_batch_may_take_longer_than_any_collective(tmp_path: Path, trajectories: list[Trajectory]) -> None:
    first, second = on_ranks(2, wait_for_batch, tmp_path / "ranks", trajectories, tmp_path / "store")
    assert first == second > 0


class CountingSource:
    """Has a batch for steps below two, after a moment; counts who asks."""

    def __init__(self, rows: list[Trajectory]) -> None:
        self.asked: Counter[int] = Counter()
        self._rows = rows

    def take_batch(self, step: int, wait_s: float) -> TakenBatch | m.NotReadyYet | m.RunStopped:
        self.asked[step] += 1
        if step == 2:
            return m.RunStopped(reason="enough")
        if self.asked[step] == 1:
            return m.NotReadyYet(waiting_for="a moment")
        halves = [to_batch(self._rows[:5]), to_batch(self._rows[5:])]
        return TakenBatch(
            step, [0, 1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], pa.Table.from_batches(halves)
        )


def feed_batches(
    world: World, rows: list[Trajectory]
) -> tuple[list[Batch], str, dict[int, int], list[str], list[bool]]:
    buffer, log = CountingSource(rows), []
    feed = Feed(buffer, world, log.append, host="one" if world.rank < 2 else "two")
    batches = [feed.take_batch(0), feed.take_batch(1)]
    over = feed.take_batch(2)
    assert isinstance(over, m.RunStopped) and all(isinstance(batch, Batch) for batch in batches)
    shared = [_is_shared(batch.tokens) for batch in batches if isinstance(batch, Batch)]
    world.barrier()
    assert not [name for name in os.listdir("/dev/shm") if "batch" in name]
    return batches, over.reason, dict(buffer.asked), log, shared  # type: ignore[return-value]


def _is_shared(tensor: Tensor) -> bool:
    """Does it lie in the mapped file, whose pages all processes share?"""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span = line.split()[0]
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return "slipstream-batch" in line
    raise AssertionError("the tensor lies nowhere")


def test_each_host_fetches_a_batch_once_and_its_ranks_share_the_memory(
    trajectories: list[Trajectory], tmp_path: Path
) -> None:
    found = on_ranks(3, feed_batches, tmp_path / "three", trajectories)
    whole = Batch.__dataclass_fields__
    for batches, reason, _, _, shared in found:
        assert reason == "enough" and shared == [True, True]
        for batch, first in zip(batches, found[0][0], strict=True):
            for name in whole:
                held, expected = getattr(batch, name), getattr(first, name)
                if name in ("generators", "stops"):
                    word = "g" if name == "generators" else "completed"
                    assert held == expected == [word] * batch.num_sequences
                elif name == "component_means":
                    assert held == expected
                elif name in ("experts", "token_rewards"):
                    assert held is None and expected is None, "no mixture, and no rewards by turn"
                else:
                    torch.testing.assert_close(
                        torch.as_tensor(held), torch.as_tensor(expected), equal_nan=True
                    )
    assert found[0][0][0].group_weights.tolist() == [weight for weight in range(1, 7) for _ in range(2)]
    assert [asked for _, _, asked, _, _ in found] == [{0: 2, 1: 2, 2: 1}, {}, {0: 2, 1: 2}]
    assert found[0][3] == ["waiting: a moment"] * 2


def feed_in_parts(world: World, rows: list[Trajectory]) -> Batch:
    with patch("learners.feed.LARGEST_OFFSET", 50):
        batch = Feed(CountingSource(rows), world, print, host="one").take_batch(0)
    assert isinstance(batch, Batch)
    return batch


def test_a_batch_whose_lists_outgrow_arrows_offsets_comes_in_parts(
    trajectories: list[Trajectory], tmp_path: Path
) -> None:
    rows = [replace(row, experts=np.arange(2 * len(row.tokens)) % 7) for row in trajectories]
    expected = batch_from_arrow(pa.Table.from_batches([to_batch(rows)]))
    for found in on_ranks(2, feed_in_parts, tmp_path / "two", rows):
        for name in ("tokens", "sampled", "behavior_logprobs", "versions", "turns", "experts"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name))
        assert found.offsets.tolist() == expected.offsets.tolist()


def feed_different_groups(world: World, rows: list[Trajectory]) -> str:
    """Between the ranks of two hosts, a group was found damaged and replaced."""
    buffer = CountingSource(rows)
    if world.rank == 1:
        buffer.asked[0] = 1
        buffer.take_batch = lambda step, wait_s: TakenBatch(
            step, [0, 1, 9], [], pa.Table.from_batches([to_batch(rows)])
        )  # type: ignore
    try:
        Feed(buffer, world, print, host="one" if world.rank < 1 else "two").take_batch(0)
    except RuntimeError as error:
        return str(error)
    return "trained"


def test_hosts_that_were_given_different_groups_do_not_train_them(
    trajectories: list[Trajectory], tmp_path: Path
) -> None:
    told = on_ranks(2, feed_different_groups, tmp_path / "two", trajectories)
    assert set(told) == {
        "a damaged group of step 0 was replaced after one of the hosts had fetched it: the step begins anew"
    }


# ---- a critic of its own


@pytest.fixture(scope="module")
def batch(fixed_model: Path) -> Batch:
    return make_step_batch(draw_responses(fixed_model))


def train_pools(
    world: World, config: Config, batch: Batch, folder: Path, checkpoint: Path
) -> tuple[StepOutcome, list[str]]:
    """A step; then a checkpoint, which is loaded and gives what it was made of."""
    dist.destroy_process_group()
    joined = join_ranks(config, world.rank, f"file://{folder}/pools")
    models, both = load_models(config, joined.pool), joined.world
    trainer = Trainer(config, models, both)
    metrics, num_trained = trainer.train(batch, STEP)
    here = {
        name: engine
        for name, engine in models.trained_engines.items()
        if not isinstance(engine, AbsentEngine)
    }
    held = {name: copy_state(engine) for name, engine in here.items()}
    write = models.copy_state()
    both.barrier()
    write(checkpoint)
    both.barrier()
    trainer.train(batch, STEP)
    models.load_state(checkpoint)
    for name, engine in here.items():
        assert all(torch.equal(value, held[name][key]) for key, value in copy_state(engine).items())
    return (metrics, num_trained, held), sorted(path.name for path in checkpoint.iterdir())


@pytest.mark.parametrize("overrides", [["algo=ppo"], ["algo=vapo", "learner.minibatches=2"]])
def test_a_critic_of_its_own_trains_as_one_with_the_actor(
    overrides: list[str], fixed_model: Path, batch: Batch, tmp_path: Path
) -> None:
    common = [*overrides, "algo.critic.lr=1e-4"]
    together = configure_step(fixed_model, *common)
    trainer = Trainer(together, load_models(together))
    metrics, num_trained = trainer.train(batch, STEP)
    expected = {name: copy_state(engine) for name, engine in trainer.models.trained_engines.items()}

    apart = configure_step(
        fixed_model, *common, "placement.critic=own", "placement.critic_ranks=1", "learner.ranks=2"
    )
    assert apart.num_learner_ranks == 3
    (tmp_path / "ranks").mkdir()
    found = on_ranks(
        3, train_pools, tmp_path / "ranks", apart, batch, tmp_path / "ranks", tmp_path / "checkpoint"
    )
    assert [sorted(held) for (_, _, held), _ in found] == [["engine"], ["engine"], ["critic"]]
    assert found[0][1] == ["critic", "engine"]
    policy = {
        key: torch.cat([part, found[1][0][2]["engine"][key]])
        for key, part in found[0][0][2]["engine"].items()
    }
    for (told, count, _), _ in found:
        assert _without_times(told) == _without_times(found[0][0][0]) and count == num_trained
    states = {"engine": policy, "critic": found[2][0][2]["critic"]}
    assert_same(
        (_without_times(found[0][0][0]), num_trained, states),
        (_without_times(metrics), num_trained, expected),
    )


def _without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not k.startswith(("time/", "throughput/", "packing/"))}
