"""Packing, the FSDP2 engine and checkpoints, against plain PyTorch on the same sequences."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import gather_weights, on_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM

from buffers.trajectory import GREEDY, Trajectory, to_batch
from configs.learner import ADAM_BETAS
from learners.attention import packed_sdpa, padded_sdpa
from learners.engine import LossFn
from learners.fsdp import FsdpEngine
from learners.packing import (
    Batch,
    Packed,
    batch_from_arrow,
    pack_rows,
    pack_share,
    plan_packing,
    split_minibatches,
)
from learners.world import World
from sync.stream import collect_tensors


@pytest.fixture(scope="module")
def batch(trajectories: list[Trajectory]) -> Batch:
    return batch_from_arrow(pa.Table.from_batches([to_batch(trajectories[:4]), to_batch(trajectories[4:])]))


@pytest.fixture
def engine(fixed_model: Path, process_group: None) -> FsdpEngine:
    return FsdpEngine(fixed_model, max_grad_norm=0.5, weight_decay=0.1)


def plain_logprobs(model: torch.nn.Module, batch: Batch) -> Tensor:
    """[T] of sampled tokens, 0 elsewhere, by one forward a sequence, with Hugging Face's own attention."""
    parts = []
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        tokens = batch.tokens[start:end]
        logits = model(tokens[None], use_cache=False).logits[0]
        parts += [torch.zeros(1), logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]]
    return torch.cat(parts).where(batch.sampled, 0.0)


def sum_loss(batch: Batch, weights: Tensor) -> LossFn:
    return lambda logprobs, entropy, packed: -(logprobs * weights[packed.index]).sum() / len(batch.tokens)


def scatter_values(batch: Batch, packed: list[Packed], values: list[Tensor]) -> Tensor:
    out = torch.full((len(batch.tokens),), float("nan"))
    for part, value in zip(packed, values, strict=True):
        out[part.index] = value
    return out


def test_arrow_columns_become_flat_tensors(batch: Batch, trajectories: list[Trajectory]) -> None:
    assert batch.tokens.tolist() == [token for row in trajectories for token in row.tokens]
    assert batch.sampled.tolist() == [flag for row in trajectories for flag in row.sampled]
    assert np.diff(batch.offsets).tolist() == [len(row.tokens) for row in trajectories]
    assert batch.rewards.tolist() == pytest.approx([row.reward for row in trajectories])
    assert batch.groups.tolist() == [row.group for row in trajectories]


def test_a_batch_knows_what_was_cut_off_and_what_the_greedy_response_earned(
    trajectories: list[Trajectory],
) -> None:
    nan, found = (
        float("nan"),
        [{GREEDY: 0.5, "format": 1.0}, {"format": 1.0}, {}, {"format": 0.0, GREEDY: -2.0}],
    )
    reasons = ["length", "stop", "length", "abort"]
    rows = [
        replace(row, rewards=rewards, finish_reason=reason)
        for row, rewards, reason in zip(trajectories, found, reasons, strict=False)
    ]
    batch = batch_from_arrow(pa.Table.from_batches([to_batch(rows[:1]), to_batch(rows[1:])]))
    assert batch.truncated.tolist() == [True, False, True, False]
    torch.testing.assert_close(batch.greedy_rewards, torch.tensor([0.5, nan, nan, -2.0]), equal_nan=True)


@given(st.lists(st.integers(1, 50), min_size=4, max_size=40), st.integers(1, 80), st.integers(1, 4))
def test_a_plan_holds_every_row_once_within_budget_and_equally_many_for_each_rank(
    lengths: list[int], budget: int, num_ranks: int
) -> None:
    shares = plan_packing(np.array(lengths), budget, num_ranks).shares
    assert sorted(row for share in shares for rows in share for row in rows) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1 and all(rows for share in shares for rows in share)
    crowded = [
        rows for share in shares for rows in share if len(rows) > 1 and sum(lengths[r] for r in rows) > budget
    ]
    assert not crowded or len(shares[0]) == len(lengths) // num_ranks, "over budget only where rows run out"


def test_a_long_episode_makes_no_more_microbatches_than_it_fills() -> None:
    plan = plan_packing(np.array([100_000] + [10] * 30), 100, 2)
    assert [len(share) for share in plan.shares] == [2, 2]


def test_minibatches_keep_groups_whole_and_cover_the_batch(batch: Batch) -> None:
    parts = split_minibatches(batch, 3)
    assert [sorted(set(batch.groups[part].tolist())) for part in parts] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("attention", [packed_sdpa, padded_sdpa])
def test_packed_sequences_cannot_see_each_other(attention) -> None:  # type: ignore[no-untyped-def]
    lengths = [5, 1, 7]
    cu_seqlens = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    query, key, value = torch.randn(1, 4, 13, 8), torch.randn(1, 2, 13, 8), torch.randn(1, 2, 13, 8)
    out, _ = attention(None, query, key, value, None, cu_seq_lens_q=cu_seqlens, max_length_q=7)
    for i, (q, k, v) in enumerate(zip(*(t.split(lengths, 2) for t in (query, key, value)), strict=True)):
        alone = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out.split(lengths, 1)[i], alone.transpose(1, 2))


@pytest.mark.parametrize("budget", [10_000, 40])
def test_logprobs_equal_one_forward_a_sequence(
    engine: FsdpEngine, fixed_model: Path, batch: Batch, budget: int
) -> None:
    packed = pack_share(batch, range(batch.num_sequences), budget, 1, 0)
    assert (len(packed) > 1) == (budget == 40)
    found = scatter_values(batch, packed, engine.infer(packed))
    with torch.no_grad():
        expected = plain_logprobs(AutoModelForCausalLM.from_pretrained(fixed_model), batch)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("budget", [10_000, 40])
def test_an_update_equals_plain_pytorch(
    engine: FsdpEngine, fixed_model: Path, batch: Batch, budget: int
) -> None:
    weights = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(fixed_model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=ADAM_BETAS, weight_decay=0.1)
    for lr in (1e-3, 5e-4):
        packed = pack_share(batch, range(batch.num_sequences), budget, 1, 0)
        norm = engine.update(packed, sum_loss(batch, weights), lr)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        (-(plain_logprobs(model, batch) * weights).sum() / len(batch.tokens)).backward()
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)), rel=1e-4)
        optimizer.step()
    published = collect_tensors(engine.stream_weights())
    assert set(published) == set(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(published[name], parameter.detach(), atol=5e-5, rtol=0)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(engine: FsdpEngine, batch: Batch) -> None:
    before = collect_tensors(engine.stream_weights())
    poison = torch.full((len(batch.tokens),), float("nan"))
    with pytest.raises(FloatingPointError, match="gradient norm must be finite, got nan"):
        engine.update([pack_rows(batch, range(3))], sum_loss(batch, poison), 1e-3)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in collect_tensors(engine.stream_weights()).items()
    )


def test_a_resumed_engine_goes_on_to_the_same_bits(
    engine: FsdpEngine, fixed_model: Path, batch: Batch, tmp_path: Path
) -> None:
    packed, weights = [pack_rows(batch, range(batch.num_sequences))], torch.ones(len(batch.tokens))
    engine.update(packed, sum_loss(batch, weights), 1e-3)
    engine.copy_state()(tmp_path / "engine")
    engine.update(packed, sum_loss(batch, weights), 1e-3)
    resumed = FsdpEngine(fixed_model, max_grad_norm=0.5, weight_decay=0.1)
    resumed.load_state(tmp_path / "engine")
    resumed.update(packed, sum_loss(batch, weights), 1e-3)
    expected = collect_tensors(engine.stream_weights())
    assert all(
        torch.equal(tensor, expected[name])
        for name, tensor in collect_tensors(resumed.stream_weights()).items()
    )


def train_twice(world: World, model: Path, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    engine = FsdpEngine(model, max_grad_norm=0.5, bucket_bytes=1 << 12)
    for _ in range(2):
        parts = pack_share(batch, range(batch.num_sequences), 60, world.size, world.rank)
        norm = engine.update(parts, sum_loss(batch, torch.ones(len(batch.tokens))), 1e-3)
    return norm, gather_weights(engine.stream_weights())


def test_two_ranks_train_to_the_same_weights_as_one(
    engine: FsdpEngine, fixed_model: Path, batch: Batch, tmp_path: Path
) -> None:
    (norm, weights), _ = on_ranks(2, train_twice, tmp_path / "two", fixed_model, batch)
    own, alone = train_twice(World(), fixed_model, batch)
    assert norm == pytest.approx(own, rel=1e-4)
    for name, tensor in alone.items():
        torch.testing.assert_close(weights[name], tensor, atol=5e-5, rtol=0)
