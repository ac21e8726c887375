"""Whole steps are trained from a journal of schema 2 as from one of the present schema, to the last bit."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from buffer_harness import SMALL_RUN, BufferHarness, make_group
from test_older_journal import writing_schema_2
from test_step import ModelStock
from training_steps import configure_step, copy_states

from buffers import messages as m
from buffers.client import TakenBatch
from buffers.segments import read_head, segment_path
from buffers.trajectory import encode_batch, to_batch
from configs.schema import Config
from learners.packing import batch_from_arrow
from learners.step import Trainer

NUM_STEPS = 2


def write_journal(folder: Path, config: Config) -> None:
    """Makes the groups of the first steps. One reply in each was cut off."""
    harness = BufferHarness(config, folder)
    harness.publish(0)
    leases = harness.ask()
    assert len(leases) == NUM_STEPS * config.learner.groups_per_step
    for lease in leases:
        rows = [
            replace(
                row,
                tokens=[5 + lease.group, 6, 7 + row.sample],
                reward=float(row.sample),
                finish_reason="stop" if row.sample else "length",
            )
            for row in make_group(lease)
        ]
        assert harness.submit(lease, encode_batch(to_batch(rows))) == "accepted"
    harness.close()


def train_journal(folder: Path, config: Config, stock: ModelStock) -> tuple[list[Any], dict[Any, Any]]:
    """Trains on the groups of a journal; returns figures and numbers of tokens by step, and the models' last
    state."""
    run, outcomes, models = BufferHarness(config, folder, 0), [], stock.reset_models(config)
    trainer = Trainer(config, models)
    try:
        for step in range(NUM_STEPS):
            run.publish(step)
            taken = run.client.take_batch(step, wait_s=5.0)
            assert isinstance(taken, TakenBatch), taken
            metrics, trained = trainer.train(batch_from_arrow(taken.table, taken.group_weights), step)
            kept = {
                name: value for name, value in metrics.items() if not name.startswith(("time/", "through"))
            }
            outcomes.append((kept, trained))
            done = m.ReportTrainedStep(step=step, num_trained=trained, idle_s=0, alive_s=1, metrics={})
            run.client.call(done, m.Acknowledged)
    finally:
        run.close()
    return outcomes, copy_states(models)


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_a_learner_trains_steps_of_an_older_journal_to_the_bits_of_the_present_one(
    algo: str, tmp_path: Path, fixed_model: Path, process_group: None
) -> None:
    sizes = [
        *SMALL_RUN,
        "staleness.max_versions=1",
        "sampling.max_tokens=8",
        "algo.reward.overlong_filter=true",
    ]
    config = configure_step(fixed_model, f"algo={algo}", *sizes)
    stock, found = ModelStock(fixed_model), []
    writers: dict[int, Callable[[], AbstractContextManager[None]]] = {2: writing_schema_2, 3: nullcontext}
    for schema, writing in writers.items():
        folder = tmp_path / str(schema)
        with writing():
            write_journal(folder, config)
        assert read_head(segment_path(folder, 0)).schema_version == schema
        found.append(train_journal(folder, config, stock))
    (old, old_state), (present, present_state) = found
    assert old == present and old[0][1] == 8 and old[0][0]["length/truncated_fraction"] == 0.5
    assert old_state.keys() == present_state.keys()
    assert all(torch.equal(old_state[name], value) for name, value in present_state.items())
