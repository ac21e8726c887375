"""Sequences of many thousand tokens: the numbers of one rank on every layout, no [T, T] in memory, and a way
through the buffer."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from buffer_harness import SMALL_RUN, BufferHarness, make_group
from engine_batches import negate_logprobs
from ranks import on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_steps import configure_step
from transformers import AutoModelForCausalLM, Phi3Config

from buffers.client import TakenBatch
from buffers.group_checks import ExpertsShape
from buffers.limits import check_group_size
from buffers.trajectory import encode_batch, to_batch
from configs.load import load_config
from configs.positions import ALLOWED_BY, check_positions, count_positions
from learners.attention import _attend_causally, check_ulysses
from learners.engine import ModelKind
from learners.memory import plan_memory
from learners.models import make_engine
from learners.packing import batch_from_arrow, divide_rows, pack_rows
from learners.world import World
from slipstream_bench.long_sequences import (
    LAYOUTS,
    LR,
    LongOutcome,
    configure_layout,
    draw_long_batch,
    join_weights,
    save_long_model,
    train_long,
)
from slipstream_bench.measured_cost import measure_cost

LONG = 8191
"""Odd, so that ranks must pad."""
PLANNED = 2048
WHOLE = 131_072


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_long_model(tmp_path_factory.mktemp("long") / "model", LONG + 1)


@pytest.fixture(scope="module")
def reference(model: Path) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Log-probabilities [T], gradient norm and gradients by Hugging Face's own attention."""
    whole, batch = (
        AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa"),
        draw_long_batch([LONG]),
    )
    tokens = batch.tokens.long()
    scores = whole(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    found = torch.cat([torch.zeros(1), scores.gather(-1, tokens[1:, None])[:, 0]]).where(batch.sampled, 0.0)
    (-found.sum() / batch.sampled.sum()).backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    return found.detach(), float(torch.nn.utils.get_total_norm(gradients.values())), gradients


def run_layout(world: World, name: str, model: Path) -> LongOutcome:
    return train_long(configure_layout(name, model, LONG + 1), draw_long_batch([LONG]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_long_sequence_has_hugging_faces_numbers_on_every_layout(
    name: str, model: Path, reference: tuple[Tensor, float, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Log-probabilities within 1e-5, gradient norm within 1e-5 of its size; of the weights with a gradient
    above a thousandth of their tensor's largest, all move as AdamW's first step says, within 2 % of it."""
    logprobs, norm, gradients = reference
    ranks = on_ranks(2 if "2 ranks" in name else 1, run_layout, tmp_path / "ranks", name, model)
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert logprobs.std() > 0.1, "the tokens must differ"
    for found in ranks:
        torch.testing.assert_close(found.logprobs, logprobs, atol=1e-5, rtol=0)
        assert found.grad_norm == pytest.approx(norm, rel=1e-5)
    for key, weights in join_weights(ranks).items():
        large = gradients[key].abs() > 1e-3 * gradients[key].abs().max()
        expected = -LR * gradients[key].sign()
        assert large.float().mean() > 0.5
        assert ((weights - before[key]) - expected)[large].abs().max() <= 0.02 * LR, key


def test_a_sequence_beyond_the_budget_is_a_microbatch_of_its_own_and_the_rest_fill_others() -> None:
    batch = draw_long_batch([WHOLE, 700, 300, 900])
    packed, plan = divide_rows(batch, range(4), 1024, 1, 0)
    assert sorted(len(one.tokens) for one in packed) == [900, 1000, WHOLE]
    (long,) = (one for one in packed if len(one.tokens) == WHOLE)
    assert long.cu_seqlens.tolist() == [0, WHOLE] and int(long.positions[-1]) == WHOLE - 1
    assert plan.fill > 30


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation returns, below autograd: a kernel counts as one."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.most = max(self.most, *sizes, 0)
        return out


def measure_attention(length: int, **kinds: Any) -> tuple[int, int]:
    """Returns (elements of the largest tensor, elements that are kept for the backward pass)."""
    query = torch.randn(1, 4, length, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in "kv")
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = _attend_causally(query, key, value, None, kinds.get("window"), kinds.get("softcap"))
    with largest:
        out.sum().backward()
    return largest.most, sum(kept.values())


@pytest.mark.parametrize(
    "kinds", [{}, {"window": 512}, {"softcap": 5.0}, {"window": 512, "softcap": 5.0}], ids=str
)
def test_attention_never_holds_all_scores_forward_or_backward(kinds: dict[str, Any]) -> None:
    """Four heads: a block of 1,024 queries against all keys is the most, where scores are capped."""
    length = 2048
    largest, kept = measure_attention(length, **kinds)
    assert largest <= 4 * length * 1024 < 4 * length**2
    assert measure_attention(length // 2, **kinds)[1] >= 0.4 * kept, "what is kept grows with the length"


# ---- memory


def measure_updates(world: World, name: str, model: Path) -> list[float]:
    """Returns the most bytes that an update allocates, with all activations kept and with checkpointing."""
    packed, found = pack_rows(draw_long_batch([PLANNED]), [0]), []
    for checkpointing in ("false", "true"):
        config = configure_layout(name, model, PLANNED, f"learner.activation_checkpointing={checkpointing}")
        engine = make_engine(config, ModelKind.policy)
        found.append(measure_cost(partial(engine.update, [packed], negate_logprobs, LR), 1).peak_mib * 2**20)
    return found


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "2 ranks" in name])
def test_the_memory_of_ranks_that_share_a_sequence_is_as_planned(
    name: str, model: Path, tmp_path: Path
) -> None:
    """Beside weights and optimizer, which are there before: within a quarter with all activations kept. With
    checkpointing the plan adds up the head and a layer's activations, which are not there together."""
    for kept, recomputed in on_ranks(2, measure_updates, tmp_path / "ranks", name, model):
        for peak, checkpointing, least in ((kept, "false", 0.75), (recomputed, "true", 0.4)):
            plan = plan_memory(
                configure_layout(name, model, PLANNED, f"learner.activation_checkpointing={checkpointing}"),
                cuda=False,
            )
            assert plan is not None
            planned = plan.total_bytes - plan.parts["weights"] - plan.parts["optimizer"]
            assert least * planned <= peak <= 1.25 * planned, checkpointing
    assert recomputed < 0.8 * kept


def test_key_heads_that_ranks_repeat_are_in_the_plan(fixed_model: Path) -> None:
    """The fixed model has two heads and one key head of 32 elements, in two layers."""
    one, two = (
        plan_memory(configure_step(fixed_model, "algo=grpo", *settings), cuda=False)
        for settings in ((), ("learner.ranks=2", "learner.fsdp.sequence_parallel=2"))
    )
    assert one is not None and two is not None
    keys_and_values, num_layers, own_tokens = 2 * 32, 2, 16384 / 2
    repeated = 4 * keys_and_values * num_layers * own_tokens
    assert two.parts["activations"] == one.parts["activations"] / 2 + repeated


# ---- positions


@pytest.mark.parametrize(
    ("hf", "positions"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, WHOLE),
        ({"max_position_embeddings": 40960, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 40960),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        (
            {
                "max_position_embeddings": 100,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            800,
        ),
        ({"n_positions": 100}, None),
        # Command R
        ({"max_position_embeddings": 8192, "model_max_length": WHOLE, "rope_scaling": None}, WHOLE),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": WHOLE,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            WHOLE,
        ),
    ],
)
def test_positions_are_counted_as_an_engine_counts_them(hf: dict[str, Any], positions: int | None) -> None:
    assert count_positions(hf) == positions


def test_a_context_beyond_the_models_positions_is_refused_unless_vllm_is_told_to_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_positions({"max_position_embeddings": WHOLE}, WHOLE)
    check_positions({}, WHOLE)
    with pytest.raises(
        ValueError, match="max_model_len must be at most 40,960, the positions .* got 131,072"
    ):
        check_positions({"max_position_embeddings": 40960}, WHOLE)
    for told in ("1", "True"):
        monkeypatch.setenv(ALLOWED_BY, told)
        check_positions({"max_position_embeddings": 40960}, WHOLE)


def test_ranks_do_not_share_sequences_whose_angles_depend_on_the_batch() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    config = Phi3Config(
        hidden_size=32, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=64,
        original_max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    check_ulysses(config, 1)
    with pytest.raises(ValueError, match=r"sequence_parallel must be 1 .* \(rope_type longrope\), got 2"):
        check_ulysses(config, 2)


# ---- through the buffer


@pytest.fixture
def harness(tmp_path: Path) -> Any:
    opened: list[BufferHarness] = []

    def open_buffer(*settings: str) -> BufferHarness:
        opened.append(BufferHarness(load_config([*SMALL_RUN, *settings]), tmp_path / "journal"))
        return opened[-1]

    yield open_buffer
    for one in opened:
        one.close()


def test_trajectories_of_131072_tokens_pass_the_buffer_whole(harness: Callable[..., BufferHarness]) -> None:
    run = harness(f"generators.max_model_len={WHOLE}", f"sampling.max_tokens={WHOLE - 1}")
    run.publish(0)
    rng = np.random.default_rng(0)
    sampled = np.arange(WHOLE) >= 100
    columns: dict[str, Any] = {
        "tokens": rng.integers(0, 300, WHOLE, dtype=np.int32),
        "sampled": sampled,
        "logprobs": np.where(sampled, -rng.random(WHOLE, dtype=np.float32), 0),
        "versions": np.where(sampled, 0, -1).astype(np.int32),
    }
    for lease in run.ask(count=2):
        data: pa.Buffer = encode_batch(to_batch(make_group(lease, **columns)))
        assert data.size < 13 * 2 * WHOLE
        assert run.submit(lease, data) == "accepted"
    taken = run.client.take_batch(0, wait_s=20.0)
    assert isinstance(taken, TakenBatch)
    batch = batch_from_arrow(taken.table)
    assert np.diff(batch.offsets).tolist() == [WHOLE] * 4
    for name, column in (("tokens", batch.tokens), ("logprobs", batch.behavior_logprobs)):
        expected = torch.from_numpy(columns[name]).float()
        assert all(torch.equal(part.float(), expected) for part in column.split(WHOLE))


def test_a_group_that_no_message_holds_is_refused_before_anything_starts() -> None:
    """Qwen3-30B-A3B routes each token to 8 experts in 48 layers."""
    config = load_config(
        [f"generators.max_model_len={WHOLE}", "sampling.max_tokens=1000", "learner.samples_per_prompt=16"]
    )
    check_group_size(config, ExpertsShape())
    with pytest.raises(ValueError, match=r"at most 344,092 tokens \(a group .* 768 bytes .* got 2,097,152"):
        check_group_size(config, ExpertsShape(48 * 8, 128))


def test_rows_whose_prompts_are_limited_need_room_for_those_and_a_reply() -> None:
    rows = ["task=dataset", "data.train=x.jsonl", f"generators.max_model_len={WHOLE}"]
    for limit, reply, refused in (
        (1000, 20_000, None),
        (2000, 20_000, "352,000"),
        (None, 20_000, "2,097,152"),
    ):
        more = [
            f"data.max_prompt_tokens={'null' if limit is None else limit}",
            f"sampling.max_tokens={reply}",
        ]
        config = load_config([*rows, *more, "learner.samples_per_prompt=16"])
        if refused is None:
            check_group_size(config, ExpertsShape(48 * 8, 128))
            continue
        with pytest.raises(ValueError, match=f"data.max_prompt_tokens .* at most 344,092 .* got {refused}"):
            check_group_size(config, ExpertsShape(48 * 8, 128))
    # Prompts of a task are measured by nobody.
    rows[1] = "data.train=[{path: x.jsonl, name: x},{task: sorting, name: sums}]"
    limits = ["data.max_prompt_tokens=1000", "sampling.max_tokens=20000", "learner.samples_per_prompt=16"]
    with pytest.raises(ValueError, match="generators.max_model_len must be at most 344,092 .* got 2,097,152"):
        check_group_size(load_config([*rows, *limits]), ExpertsShape(48 * 8, 128))
