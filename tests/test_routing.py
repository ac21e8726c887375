"""Experts in the trajectory: what the buffer lets in, what a run may ask for, and what comes out at the
learner."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from buffers import segments
from buffers.group_checks import ExpectedGroup, ExpertsShape, GroupFacts, check_groups
from buffers.recovery import read_journal
from buffers.trajectory import SCHEMA, SCHEMA_VERSION, MalformedGroup, Trajectory, encode_batch, to_batch
from buffers.vocabulary import read_routing
from configs.load import load_config
from learners.packing import batch_from_arrow, pack_rows, pad_packed
from learners.routing import replay_choices

ROUTING = ExpertsShape(per_token=4, num_experts=8)


def group(*experts: list[int] | np.ndarray) -> list[Trajectory]:
    return [
        Trajectory(
            group=0,
            sample=sample,
            due=0,
            prompt_id=0,
            task="t",
            tokens=[5, 6, 7],
            sampled=[False, True, True],
            logprobs=[0.0, -0.5, -1.0],
            versions=[-1, 0, 0],
            reward=1.0,
            finish_reason="stop",
            generator="g",
            started_at=1.0,
            finished_at=2.0,
            experts=chosen,
        )
        for sample, chosen in enumerate(experts)
    ]


def verdict(routing: ExpertsShape, *experts: list[int] | np.ndarray) -> GroupFacts | MalformedGroup:
    data = encode_batch(to_batch(group(*experts)))
    return check_groups(
        data,
        [ExpectedGroup(0, 0, 0, len(experts))],
        num_samples=len(experts),
        newest_version=0,
        routing=routing,
    ).verdicts[0]


RECORD = np.array([0, 7, 1, 2, 3, 4, 5, 6, -1, -1, -1, -1], np.int16)


def test_recorded_experts_travel_from_the_generator_into_a_padded_microbatch_unchanged() -> None:
    assert isinstance(verdict(ROUTING, RECORD, RECORD[::-1]), GroupFacts)
    batch = batch_from_arrow(pa.Table.from_batches([to_batch(group(RECORD, RECORD[::-1].copy()))]))
    assert batch.experts is not None
    assert batch.experts.tolist() == [*RECORD.reshape(3, 4).tolist(), *RECORD[::-1].reshape(3, 4).tolist()]
    padded = pad_packed(pack_rows(batch, [1]), 4).experts
    assert padded is not None and padded.tolist() == [*RECORD[::-1].reshape(3, 4).tolist(), [-1] * 4]
    assert batch_from_arrow(pa.Table.from_batches([to_batch(group([], []))])).experts is None


@pytest.mark.parametrize(
    ("routing", "experts", "message"),
    [
        (ROUTING, [RECORD, []], "`experts` must hold 4 for each token"),
        (ROUTING, [RECORD, RECORD[:8]], "`experts` must hold 4 for each token"),
        (ROUTING, [[], []], "`experts` must hold 4 for each token"),
        (ROUTING, [RECORD, [*RECORD[:11], 8]], r"experts must be in -1..7"),
        (ROUTING, [RECORD, [*RECORD[:11], -2]], r"experts must be in -1..7"),
        (ExpertsShape(), [RECORD, RECORD], "`experts` must hold nothing"),
    ],
)
def test_the_buffer_refuses_experts_that_are_not_one_record_for_each_token(
    routing: ExpertsShape, experts: list[list[int]], message: str
) -> None:
    found = verdict(routing, *experts)
    assert isinstance(found, MalformedGroup) and message in str(found)


def test_a_replayed_choice_has_the_routers_own_weights_and_its_gradient() -> None:
    class Config:
        model_type, norm_topk_prob = "qwen3_moe", True

    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    own, recorded = logits.topk(2).indices, torch.tensor([[6, 0], [-1, -1], [3, 2]])
    weights, used = replay_choices(Config, logits, own, recorded)
    assert used.tolist() == [[6, 0], own[1].tolist(), [3, 2]]
    torch.testing.assert_close(weights, logits.gather(1, used).softmax(-1))
    weights[:, 0].sum().backward()
    assert (
        logits.grad is not None
        and (logits.grad[0, [0, 6]] != 0).all()
        and logits.grad[0, own[0]].count_nonzero() <= 2
    )


def test_a_model_without_experts_and_settings_that_lose_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    with pytest.raises(ValueError, match="router_replay must be false for a model without experts, got true"):
        read_routing(tmp_path, True)
    assert read_routing(tmp_path, False) == ExpertsShape()
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 3, "num_experts_per_tok": 2, "n_routed_experts": 8}'
    )
    assert read_routing(tmp_path, True) == ExpertsShape(6, 8)
    with pytest.raises(
        ValueError, match="generators.prefix_cache must be false with learner.moe.router_replay"
    ):
        load_config(["learner.moe.router_replay=true", "generators.prefix_cache=true"])
    with pytest.raises(
        ValueError, match="router_replay must be false with learner.activation_checkpointing and"
    ):
        load_config(
            [
                "learner.moe.router_replay=true",
                "learner.activation_checkpointing=true",
                "learner.engine=megatron",
                "learner.ranks=2",
                "learner.megatron.pipeline_parallel=2",
            ]
        )
    with pytest.raises(
        ValueError, match="learner.moe.aux_loss_coefficient must be a finite number of at least 0, got -1"
    ):
        load_config(["learner.moe.aux_loss_coefficient=-1"])


def test_a_journal_of_another_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    newer = SCHEMA.with_metadata({"slipstream.schema": str(SCHEMA_VERSION + 1)})
    path = segments.segment_path(tmp_path, 0)
    path.write_bytes(segments.MAGIC + bytes(2) + newer.serialize().to_pybytes())
    wanted = f"journal must have schema version 2 or {SCHEMA_VERSION}, got {{{SCHEMA_VERSION + 1}}}"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        read_journal(tmp_path)
