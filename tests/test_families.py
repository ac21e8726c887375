"""Packed sequences through the FSDP engine against Hugging Face's eager attention, one sequence at a time, by
family of models.

Each model is tiny and random, in float32; sequences are longer than its window, and scores and logits are
large enough that a cap, a scale or a window left out shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_batches import make_sampled_batch
from ranks import on_ranks
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from configs.learner import Attention
from configs.load import load_config
from configs.model import Dtype
from configs.parallel import FsdpConfig
from learners import attention, families
from learners.attention import choose_attention, packed_sdpa, padded_sdpa, varlen_attention
from learners.families import TESTED_FAMILIES
from learners.fsdp import FsdpEngine
from learners.heads import LogprobHead, measure_logit_curve
from learners.packing import Batch, pack_rows
from learners.world import World

TEMPERATURE, WINDOW, LENGTHS = 0.7, 4, [12, 5, 1, 9]
SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
SLIDING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
HEAD = dict(head_dim=8)
WITHOUT = dict(logits_scaling=1.0, logit_scale=1.0, attention_multiplier=8**-0.5)


@dataclass(frozen=True)
class Family:
    model_type: str
    sizes: dict[str, Any]
    """Besides `SIZES`"""
    matters: tuple[str, ...] = ()
    """Fields that change the numbers: without them the reference differs."""


FAMILIES = {
    "llama": Family("llama", {}),
    "mistral, window": Family("mistral", dict(sliding_window=WINDOW), ("sliding_window",)),
    "mixtral, window": Family(
        "mixtral", dict(sliding_window=WINDOW, num_local_experts=4), ("sliding_window",)
    ),
    "qwen2": Family("qwen2", {}),
    "qwen2, window": Family("qwen2", dict(use_sliding_window=True, **SLIDING), ("sliding_window",)),
    "qwen2_moe": Family("qwen2_moe", EXPERTS | dict(shared_expert_intermediate_size=24)),
    "qwen3": Family("qwen3", HEAD),
    "qwen3, window": Family("qwen3", HEAD | SLIDING | dict(use_sliding_window=True), ("sliding_window",)),
    "qwen3_moe": Family("qwen3_moe", HEAD | EXPERTS),
    "qwen3_moe, window": Family(
        "qwen3_moe",
        HEAD | EXPERTS | dict(use_sliding_window=True, sliding_window=WINDOW),
        ("sliding_window",),
    ),
    "gemma": Family("gemma", HEAD),
    "gemma2": Family(
        "gemma2",
        HEAD
        | SLIDING
        | dict(query_pre_attn_scalar=1, attn_logit_softcapping=2.0, final_logit_softcapping=1.5),
        ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3": Family("gemma3_text", HEAD | SLIDING | dict(query_pre_attn_scalar=1), ("sliding_window",)),
    "gemma3, final cap": Family(
        "gemma3_text", HEAD | SLIDING | dict(final_logit_softcapping=1.5), ("final_logit_softcapping",)
    ),
    "granite": Family(
        "granite",
        dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=0.5),
        ("logits_scaling", "attention_multiplier"),
    ),
    "cohere": Family("cohere", dict(logit_scale=2.5, use_qk_norm=True), ("logit_scale",)),
    "cohere2": Family("cohere2", SLIDING | dict(logit_scale=2.5), ("logit_scale", "sliding_window")),
    "phi3": Family("phi3", {}),
    "phi3, window": Family("phi3", dict(sliding_window=WINDOW), ("sliding_window",)),
    "olmo2": Family("olmo2", {}),
    "olmo3": Family("olmo3", SLIDING, ("sliding_window",)),
    "smollm3": Family("smollm3", dict(no_rope_layers=[1, 0])),
    "smollm3, window": Family("smollm3", SLIDING | dict(use_sliding_window=True), ("sliding_window",)),
    "glm4": Family("glm4", HEAD),
    "deepseek_v3": Family(
        "deepseek_v3",
        dict(
            moe_intermediate_size=24,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=12,
            v_head_dim=10,
        ),
    ),
    "exaone4": Family("exaone4", HEAD | SLIDING | dict(sliding_window_pattern=2), ("sliding_window",)),
}


def made(name: str, folder: Path) -> Path:
    return make_model_folder(FAMILIES[name], folder)


def make_model_folder(family: Family, folder: Path) -> Path:
    seed = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **SIZES | family.sizes))
    for (
        parameter
    ) in model.parameters():  # far from initial values, where norms are 1, biases 0 and logits small
        parameter.data += (0.2 if parameter.ndim > 1 else 0.1) * torch.randn(parameter.shape, generator=seed)
    for buffer in (
        buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    ):
        buffer += 0.3 * torch.randn(buffer.shape, generator=seed)
    model.save_pretrained(folder)
    return folder


def make_batch() -> Batch:
    tokens = np.random.default_rng(0).integers(3, 96, sum(LENGTHS))
    return make_sampled_batch(LENGTHS, torch.from_numpy(tokens))


def loss_of(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Another factor for each token, and a term of the entropy."""
    factors = torch.linspace(-1.0, 1.5, sum(LENGTHS))
    return (logprobs * factors).sum() + 0.3 * (entropy * factors.flip(0)).sum()


@dataclass
class FamilyResult:
    logprobs: Tensor
    gradients: dict[str, Tensor]


def reference(folder: Path, **changed: Any) -> FamilyResult:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **changed).eval()
    batch, logprobs, entropy = make_batch(), [], []
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        tokens = batch.tokens[start:end]
        scores = (model(tokens[None], use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        logprobs += [torch.zeros(1), scores.gather(-1, tokens[1:, None])[:, 0]]
        entropy += [torch.zeros(1), -(scores.exp() * scores).sum(-1)]
    loss_of(torch.cat(logprobs), torch.cat(entropy)).backward()
    return FamilyResult(torch.cat(logprobs).detach(), {name: p.grad for name, p in model.named_parameters()})


def trained(world: World | None, folder: Path, ranks: int = 1) -> FamilyResult:
    layout = FsdpConfig(sequence_parallel=ranks)
    engine = FsdpEngine(folder, temperature=TEMPERATURE, entropy_gradient=True, layout=layout)
    batch = make_batch()
    logprobs, entropy = engine._compute_outputs(pack_rows(batch, range(batch.num_sequences)))
    (loss_of(logprobs, entropy) * ranks).backward()
    gradients = {name: p.grad.full_tensor() for name, p in engine._named.items() if p.grad is not None}
    return FamilyResult(logprobs.detach(), gradients)


def compare(found: FamilyResult, expected: FamilyResult) -> None:
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=2e-5, rtol=0)
    assert set(found.gradients) == {name for name, grad in expected.gradients.items() if grad is not None}
    for name, grad in found.gradients.items():
        assert (grad - expected.gradients[name]).norm() <= 1e-4 * expected.gradients[name].norm() + 1e-6, name


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_on_the_log_probabilities_and_gradients_of_hugging_face(
    name: str, tmp_path: Path
) -> None:
    folder = made(name, tmp_path)
    expected = reference(folder)
    compare(trained(None, folder), expected)
    for field in FAMILIES[name].matters:
        without = reference(folder, **{field: 99 if field == "sliding_window" else WITHOUT.get(field)})
        assert (without.logprobs - expected.logprobs).abs().max() > 0.05, (
            f"the table would not notice {field}"
        )


def test_the_families_that_are_named_are_those_of_the_table() -> None:
    assert set(TESTED_FAMILIES) == {family.model_type for family in FAMILIES.values()}
    page = (Path(families.__file__).parents[1] / "docs" / "learner.md").read_text()
    assert all(f"`{family}`" in page for family in TESTED_FAMILIES)


def test_ranks_that_share_a_sequence_keep_to_its_window_and_its_caps(tmp_path: Path) -> None:
    folder = made("gemma2", tmp_path / "model")
    expected = reference(folder)
    for found in on_ranks(2, trained, tmp_path / "ranks", folder, 2):
        compare(found, expected)


# ---- the attention functions, one by one


def dense(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int, cap: float | None
) -> Tensor:
    """By one [T, T] mask of all that a token may not see."""
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    sequence, place = (
        torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        torch.arange(sum(lengths)),
    )
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < window) & (sequence[:, None] == sequence)
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)


def flash_on_a_cpu(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, *_: Any, window_size: tuple[int, int], **__: Any
) -> Tensor:
    """torch's variable-length kernel by FlashAttention's documentation: a query sees its own place, the
    `window_size[0]` places before it (-1: all) and the `window_size[1]` after it."""
    before, behind = window_size
    assert behind == 0
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return dense(q, k, v, cu.diff().tolist(), len(q[0, 0]) if before == -1 else before + 1, None)[0]


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("window", [3, 7, None])
@pytest.mark.parametrize("attend", [packed_sdpa, padded_sdpa, varlen_attention])
def test_attention_sees_a_window_of_its_own_sequence_and_caps_its_scores(
    attend: Callable[..., Any], window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash_on_a_cpu)
    monkeypatch.setattr(attention, "BLOCK", 5)  # below a window, and above another
    lengths, seed = [11, 1, 6, 16], torch.Generator().manual_seed(0)
    query, key, value = (2 * torch.randn(1, heads, sum(lengths), 8, generator=seed) for heads in (4, 2, 2))
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    call = partial(
        attend, None, query, key, value, None, cu_seq_lens_q=cu, max_length_q=16, sliding_window=window
    )
    if attend is varlen_attention and cap is not None:
        with pytest.raises(
            ValueError, match=r"learner.attention must be packed_sdpa or .* \(at 1.5\), got varlen"
        ):
            call(softcap=cap)
        return
    torch.testing.assert_close(call(softcap=cap)[0], dense(query, key, value, lengths, window or 99, cap))


def test_a_kernel_that_caps_no_scores_is_neither_taken_nor_chosen_for_a_model_that_has_caps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, dtype = torch.device("cuda"), Dtype.bfloat16
    with pytest.raises(
        ValueError, match=r"learner.attention must be .* caps its scores \(at 50.0\), got varlen"
    ):
        choose_attention(Attention.varlen, gpu, dtype, 50.0)
    for found, capped in ((None, Attention.packed_sdpa), (object(), Attention.flash_attention_2)):
        monkeypatch.setattr(attention, "find_spec", lambda name, found=found: found)
        assert choose_attention(Attention.auto, gpu, dtype, 50.0) is capped
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert choose_attention(Attention.auto, gpu, dtype, None) is Attention.varlen


# ---- what is refused, and what is said


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("model_type", "sizes", "message"),
    [
        (
            "qwen2_moe",
            EXPERTS | SLIDING | dict(use_sliding_window=True),
            r"window of their mask's size \(4\), got None",
        ),
        (
            "gpt_oss",
            HEAD | SLIDING | dict(num_local_experts=4),
            "GptOssForCausalLM does not support an attention implementation",
        ),
        (
            "llama4_text",
            HEAD | dict(attention_chunk_size=4, num_local_experts=2, intermediate_size_mlp=48),
            r"window of their mask's size \(4\), got None in Llama4",
        ),
    ],
)
def test_a_layer_that_asks_for_what_packed_attention_ignores_is_refused(
    model_type: str, sizes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type, **SIZES | sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        trained(None, tmp_path)


def test_attention_sinks_are_refused_and_not_left_out() -> None:
    query, key, value = torch.randn(3, 1, 4, 5, 8).unbind()
    more = {"cu_seq_lens_q": torch.tensor([0, 5]), "max_length_q": 5, "sliding_window": None}
    for name in ("packed_sdpa", "varlen", "ulysses"):
        with pytest.raises(
            ValueError, match="must not ask their attention for s_aux, .* got s_aux in Linear"
        ):
            ALL_ATTENTION_FUNCTIONS[name](
                torch.nn.Linear(1, 1), query, key, value, None, s_aux=torch.zeros(4), **more
            )


def test_a_model_that_changes_its_logits_in_a_way_of_its_own_is_refused_at_the_start() -> None:
    class Cubed(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits**3
            return out

    config = AutoConfig.for_model("llama", **SIZES)
    assert measure_logit_curve(LlamaForCausalLM(config)) == (1.0, None)
    with pytest.raises(
        ValueError,
        match="Cubed of model.path must scale or cap the logits of its head, "
        r".* got \[1.0, -27.0, 8000.0\] for \[1.0, -3.0, 20.0\]",
    ):
        LogprobHead(Cubed(config), 1.0)


def test_a_family_that_has_not_been_compared_starts_with_a_note(tmp_path: Path) -> None:
    found = []
    for family in ("llama", "phi"):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
        found.append(families.describe_untested_family(load_config([f"model.path={tmp_path}"])))
    assert found[0] is None and found[1] is not None
    assert (
        "phi (model_type of model.path) is not among the families held to Hugging Face's numbers: llama,"
        in found[1]
    )
