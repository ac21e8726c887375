"""The Megatron-core engine: the same step as Hugging Face's, whatever it is divided into, and what its parts
promise."""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_batches import SMALL, draw_batch, negate_logprobs
from ranks import gather_weights, on_ranks
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from configs.learner import ADAM_BETAS
from configs.model import Dtype
from learners import heads
from learners.engine import ModelKind
from learners.fsdp import FsdpEngine
from learners.layout_rules import ParallelSizes
from learners.megatron.engine import MegatronEngine
from learners.megatron.model import find_problems
from learners.megatron.names import ParameterNames
from learners.model_files import ModelFiles
from learners.packing import Packed, pack_share
from learners.world import World

pytestmark = pytest.mark.usefixtures("process_group")

LENGTHS = [5, 9, 2, 30, 7, 1, 12, 4]
LR = 1e-3
OPTIONS: dict[str, Any] = dict(temperature=0.7, weight_decay=0.1, max_grad_norm=1.0, bucket_bytes=1 << 11)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, rope_parameters=LLAMA3, tie_word_embeddings=False)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=False)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SMALL,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
        )
    ),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        for parameter in model.parameters():  # far from initial values, where norms are 1 and biases 0
            parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(folder / name)
    return folder


def parts_of(budget: int, share: int = 0, shares: int = 1) -> list[Packed]:
    return pack_share(draw_batch(LENGTHS), range(len(LENGTHS)), budget, shares, share)


def hugging_face(model: Any, part: Packed, temperature: float) -> tuple[Tensor, Tensor]:
    """[T] log-probabilities and [T] entropies by eager attention, one sequence at a time."""
    logprobs, entropies = [], []
    for start, end in zip(part.cu_seqlens.tolist(), part.cu_seqlens.tolist()[1:], strict=False):
        tokens = part.tokens[start:end]
        scores = (model(tokens[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        logprobs += [torch.zeros(1), scores.gather(-1, tokens[1:, None])[:, 0]]
        entropies += [torch.zeros(1), -(scores.exp() * scores).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies)


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor], steps: int = 1) -> None:
    """Adam's first steps are nearly the gradient's sign: where that is rounding, two weights are up to two
    steps apart, but few."""
    assert found.keys() == expected.keys()
    apart = torch.cat([(found[name] - expected[name]).abs().flatten() for name in found])
    assert apart.max() <= 2 * steps * LR * 1.01
    assert (apart > 0.01 * LR).float().mean() < 0.001


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_an_update_is_hugging_faces_own(
    name: str, num_microbatches: int, folder: Path, tmp_path: Path
) -> None:
    engine, parts = MegatronEngine(folder / name, **OPTIONS), parts_of({1: 70, 3: 30}[num_microbatches])
    assert len(parts) == num_microbatches
    model = AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager")
    expected = [hugging_face(model, part, 0.7) for part in parts]
    for found, (logprobs, _) in zip(engine.infer(parts), expected, strict=True):
        torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=0)
    seen = []

    def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
        seen.append(entropy.detach())
        return negate_logprobs(logprobs, entropy, packed)

    norm = engine.update(parts, loss_fn, LR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=ADAM_BETAS, weight_decay=0.1)
    (-sum(logprobs.sum() for logprobs, _ in expected) / sum(LENGTHS)).backward()
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)), rel=1e-5)
    for found, (_, entropies) in zip(seen, expected, strict=True):
        torch.testing.assert_close(found, entropies.detach(), atol=1e-5, rtol=0)
    optimizer.step()
    model.save_pretrained(tmp_path)
    assert_same_weights(gather_weights(engine.stream_weights()), load_file(tmp_path / "model.safetensors"))


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tensor": ("qwen3", 2, {"tensor_parallel": 2}),
    "tensor, tied": ("qwen2", 2, {"tensor_parallel": 2, "activation_checkpointing": True}),
    "pipeline, tied": ("qwen2", 2, {"pipeline_parallel": 2}),
    "data": ("qwen3", 2, {}),
    "experts": ("qwen3_moe", 2, {"expert_parallel": 2}),
    "context": ("qwen3", 2, {"context_parallel": 2}),
    "tensor x pipeline": ("qwen3", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
}


def other_start(part: Packed) -> Packed:
    tokens = part.tokens.clone()
    tokens[0] = (tokens[0] + 1) % SMALL["vocab_size"]
    return replace(part, tokens=tokens)


def life(world: World, model: Path, options: dict[str, Any], single: Path, folder: Path) -> dict[str, Any]:
    """Runs one layout from the first weights on; `single` is the checkpoint that one rank has written after
    an update."""
    engine = MegatronEngine(model, **OPTIONS, **options)
    share, found = engine.share, {}
    parts = parts_of(40, share.index, share.count)

    def spoken(outs: list[Tensor]) -> Tensor:
        """[T of the batch], from all shares."""
        whole = torch.zeros(sum(LENGTHS))
        for part, out in zip(parts, outs, strict=True):
            whole[part.index] = out * share.holds_results
        return world.add_tensor(whole)

    found["loaded"] = gather_weights(engine.stream_weights())
    found["logprobs"] = spoken(engine.infer(parts))
    found["others"] = spoken([(part.sequence > 0).float() for part in parts]) > 0
    found["with another start"] = spoken(engine.infer([other_start(part) for part in parts]))

    found["norms"] = [engine.update(parts, negate_logprobs, LR)]
    found["stepped"] = gather_weights(engine.stream_weights())
    write = engine.copy_state()
    found["norms"].append(engine.update(parts, negate_logprobs, LR))
    thread = threading.Thread(target=write, args=(folder,))
    thread.start()
    found["norms"] += [engine.update(parts, negate_logprobs, LR) for _ in range(2)]
    thread.join()
    found["after"] = gather_weights(engine.stream_weights())
    world.barrier()

    resumed = MegatronEngine(model, **OPTIONS, **options)
    resumed.load_state(folder)
    found["resumed"] = gather_weights(resumed.stream_weights())
    found["resumed norms"] = [resumed.update(parts, negate_logprobs, LR) for _ in range(3)]
    found["resumed after"] = gather_weights(resumed.stream_weights())
    resumed.load_state(single)
    found["from one rank"] = gather_weights(resumed.stream_weights())
    found["norm from one rank"] = resumed.update(parts, negate_logprobs, LR)
    with pytest.raises(FloatingPointError, match="nothing was updated"):
        engine.update(parts, lambda logprobs, entropy, packed: logprobs.sum() / 0, LR)
    found["not updated"] = gather_weights(engine.stream_weights())
    return found


@pytest.fixture(scope="module")
def alone(folder: Path, process_group: None) -> Callable[[str], dict[str, Any]]:
    """The same life of a model on one rank, whose checkpoint is `<model>/single`."""

    @cache
    def live(name: str) -> dict[str, Any]:
        engine, parts = MegatronEngine(folder / name, **OPTIONS), parts_of(70)
        found: dict[str, Any] = {"logprobs": torch.zeros(sum(LENGTHS))}
        found["logprobs"][parts[0].index] = engine.infer(parts)[0]
        found["norms"] = [engine.update(parts, negate_logprobs, LR)]
        found["stepped"] = gather_weights(engine.stream_weights())
        engine.copy_state()(folder / name / "single")
        found["norms"] += [engine.update(parts, negate_logprobs, LR) for _ in range(3)]
        return found | {"after": gather_weights(engine.stream_weights())}

    return live


@pytest.fixture(scope="module")
def lives(folder: Path, alone: Callable[[str], Any]) -> Callable[[str], list[dict[str, Any]]]:
    """By rank, what `life` has found in a layout; the checkpoint is `<layout>`."""

    @cache
    def live(name: str) -> list[dict[str, Any]]:
        model, ranks, options = LAYOUTS[name]
        alone(model)
        return on_ranks(
            ranks,
            life,
            folder / f"{name}, ranks",
            folder / model,
            options,
            folder / model / "single",
            folder / name,
        )

    return live


Lives = Callable[[str], list[dict[str, Any]]]
layouts = pytest.mark.parametrize("name", LAYOUTS)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_experts_are_published_in_one_order_whichever_way_megatron_holds_them(folder: Path) -> None:
    files = ModelFiles(folder / "qwen3_moe")
    names = ParameterNames(AutoConfig.from_pretrained(folder / "qwen3_moe"), files, 1, critic=False)
    experts = [name for name in names.parameters if ".0.mlp.experts." in name]
    ways = {
        "local": [f"local_experts.{i}.linear_fc{j}.weight" for i in range(2) for j in (1, 2)],
        "grouped by TransformerEngine": [f"linear_fc{j}.weight{i}" for j in (1, 2) for i in range(2)],
    }
    for way, held in ways.items():
        model = SimpleNamespace(
            decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=1)]),
            named_parameters=lambda held=held: [
                *((f"decoder.layers.0.mlp.experts.{name}", None) for name in held),
                ("output_layer.weight", None),
            ],
        )
        for first in (0, 2):  # two ranks, each with two experts
            found = list(names.name_parameters(model, first))  # type: ignore[arg-type]
            assert found == [*experts[2 * first : 2 * first + 4], "output_layer.weight"], way


@layouts
def test_weights_bear_the_names_and_values_of_the_model_file(name: str, lives: Lives, folder: Path) -> None:
    assert same(lives(name)[0]["loaded"], load_file(folder / LAYOUTS[name][0] / "model.safetensors"))
    assert not any(found["loaded"] for found in lives(name)[1:]), "nothing comes but on rank 0"


@layouts
def test_tensors_are_published_in_the_order_of_one_rank(
    name: str, lives: Lives, alone: Callable[[str], Any]
) -> None:
    # A version's digest covers it, and a checkpoint that is evaluated has the digest of its version.
    assert list(lives(name)[0]["stepped"]) == list(alone(LAYOUTS[name][0])["stepped"])


@layouts
def test_a_layout_trains_as_one_rank_does(name: str, lives: Lives, alone: Callable[[str], Any]) -> None:
    ranks, expected = lives(name), alone(LAYOUTS[name][0])
    torch.testing.assert_close(ranks[0]["logprobs"], expected["logprobs"], atol=5e-6, rtol=0)
    assert all(found["norms"] == ranks[0]["norms"] for found in ranks), "every rank knows the gradient norm"
    assert ranks[0]["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    assert ranks[0]["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-5)
    assert_same_weights(ranks[0]["stepped"], expected["stepped"])


@layouts
def test_packed_sequences_do_not_see_each_other(name: str, lives: Lives) -> None:
    found = lives(name)[0]
    apart = (found["with another start"] - found["logprobs"]).abs()
    assert apart[found["others"]].max() <= 1e-6 < 1e-3 < apart.max()


@layouts
def test_a_snapshot_holds_what_was_when_it_was_taken_whatever_is_trained_meanwhile(
    name: str, lives: Lives
) -> None:
    found = lives(name)[0]
    assert same(found["resumed"], found["stepped"]) and not same(found["after"], found["stepped"])


@layouts
def test_what_is_loaded_goes_on_to_the_bit(name: str, lives: Lives) -> None:
    found = lives(name)[0]
    assert found["resumed norms"] == found["norms"][1:]
    assert same(found["resumed after"], found["after"])


@layouts
def test_a_checkpoint_is_taken_up_in_another_layout(
    name: str, lives: Lives, alone: Callable[[str], Any], folder: Path
) -> None:
    model, found, expected = folder / LAYOUTS[name][0], lives(name)[0], alone(LAYOUTS[name][0])
    assert same(found["from one rank"], expected["stepped"])
    assert found["norm from one rank"] == pytest.approx(expected["norms"][1], rel=1e-5)
    engine = MegatronEngine(model, **OPTIONS)
    engine.load_state(folder / name)
    assert same(gather_weights(engine.stream_weights()), found["stepped"])
    assert engine.update(parts_of(70), negate_logprobs, LR) == pytest.approx(found["norms"][1], rel=1e-5)
    for _ in range(2):
        engine.update(parts_of(70), negate_logprobs, LR)
    assert_same_weights(gather_weights(engine.stream_weights()), found["after"], steps=3)


@layouts
def test_a_gradient_that_is_not_finite_updates_nothing(name: str, lives: Lives) -> None:
    found = lives(name)[0]
    assert same(found["not updated"], found["after"])


def heads_of(world: World, model: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Checks two-way tensor parallelism in a pipeline, or with context parallelism: chunks at the head,
    entropy, a critic, a frozen model, other sizes."""
    heads.CHUNK_ELEMENTS = 5 * 24
    parts, found = parts_of(40), {}
    engine = MegatronEngine(model, **OPTIONS, **options, entropy_gradient=True)
    found["norm"] = engine.update(parts, entropy_bonus, LR)
    found["weights"] = gather_weights(engine.stream_weights())
    frozen = MegatronEngine(model, kind=ModelKind.frozen, **OPTIONS, **options)
    found["frozen"] = frozen.infer(parts)
    found["buffers"] = [parameter.requires_grad for parameter in frozen._model.parameters()] + [
        hasattr(frozen, "_ddp")
    ]
    found["without"] = frozen_entropy(MegatronEngine(model, **OPTIONS, **options), parts)
    critic = MegatronEngine(model, kind=ModelKind.critic, **OPTIONS, **options)
    found["values"] = critic.infer(parts)
    found["critic's norm"] = critic.update(parts, squared_error, LR)
    found["values after"] = critic.infer(parts)
    found["speaks"] = engine.share.holds_results
    with pytest.raises(ValueError, match="tensor_parallel must be 2 as in the first engine, got 1"):
        MegatronEngine(model)
    return found


def entropy_bonus(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
    return -(logprobs.sum() + 0.5 * entropy.sum()) / sum(LENGTHS)


def frozen_entropy(engine: MegatronEngine, parts: list[Packed]) -> float:
    return engine.update(parts, lambda logprobs, entropy, packed: entropy.sum() + 0 * logprobs.sum(), LR)


def squared_error(values: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
    return ((values - packed.positions / 10) ** 2).sum() / sum(LENGTHS)


@pytest.fixture(scope="module", params=["pipeline_parallel", "context_parallel"])
def divided_heads(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    ranks = on_ranks(
        4,
        heads_of,
        folder / f"heads, {request.param}",
        folder / "qwen3",
        {"tensor_parallel": 2, request.param: 2},
    )
    last = 2 if request.param == "pipeline_parallel" else 0
    assert [found["speaks"] for found in ranks] == [rank == last for rank in range(4)]
    return ranks[last] | {"weights": ranks[0]["weights"]}


def test_entropy_carries_gradient_where_a_loss_leads_through_it_and_only_there(
    divided_heads: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=ADAM_BETAS, weight_decay=0.1)
    torch.stack(
        [entropy_bonus(*hugging_face(model, part, 0.7), part) for part in parts_of(40)]
    ).sum().backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    model.save_pretrained(tmp_path)
    assert divided_heads["norm"] == pytest.approx(norm, rel=1e-5)
    assert_same_weights(divided_heads["weights"], load_file(tmp_path / "model.safetensors"))
    assert divided_heads["without"] == 0


def test_a_critic_is_the_one_that_fsdp_makes(divided_heads: dict[str, Any], folder: Path) -> None:
    critic, parts = FsdpEngine(folder / "qwen3", kind=ModelKind.critic, **OPTIONS), parts_of(40)
    for key in ("values", "values after"):
        for found, expected in zip(divided_heads[key], critic.infer(parts), strict=True):
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
            assert found.abs().max() > 0.01
        if key == "values":
            assert critic.update(parts, squared_error, LR) == pytest.approx(
                divided_heads["critic's norm"], rel=1e-5
            )


def test_a_frozen_model_says_what_it_says_without_gradients_or_optimizer(
    divided_heads: dict[str, Any], alone: Callable[[str], Any]
) -> None:
    expected = alone("qwen3")["logprobs"]
    for found, part in zip(divided_heads["frozen"], parts_of(40), strict=True):
        torch.testing.assert_close(found, expected[part.index], atol=5e-6, rtol=0)
    assert not any(divided_heads["buffers"])


def test_a_checkpoint_holds_nothing_but_safetensors_and_a_lost_file_is_missed(
    folder: Path, lives: Lives, tmp_path: Path
) -> None:
    lives("data")
    files = sorted(path.name for path in (folder / "data").iterdir())
    assert files == ["rank_0.safetensors", "rank_1.safetensors"]
    shutil.copy(folder / "data" / "rank_0.safetensors", tmp_path)
    with pytest.raises(FileNotFoundError):
        MegatronEngine(folder / "qwen3").load_state(tmp_path)
    with pytest.raises(ValueError, match="the checkpoint must hold all of .* got"):
        MegatronEngine(folder / "qwen3_moe").load_state(folder / "data")


def test_bfloat16_is_published_and_not_computed_with_on_a_cpu(folder: Path) -> None:
    exact, rounded = (MegatronEngine(folder / "qwen3", dtype=dtype, **OPTIONS) for dtype in Dtype)
    assert all(map(torch.equal, exact.infer(parts_of(40)), rounded.infer(parts_of(40))))
    expected = {
        name: tensor.to(torch.bfloat16) for name, tensor in gather_weights(exact.stream_weights()).items()
    }
    assert same(gather_weights(rounded.stream_weights()), expected)
    assert max(part.cast_elements().nbytes for part in rounded.stream_weights()) <= 1 << 11


@pytest.mark.parametrize("kind", ModelKind)
def test_an_engine_is_made_without_drawing_from_the_random_state(kind: ModelKind, folder: Path) -> None:
    before = torch.get_rng_state()
    MegatronEngine(folder / "qwen2", kind=kind)
    assert torch.equal(torch.get_rng_state(), before)


def test_activation_checkpointing_computes_each_layer_again_in_the_backward_pass(folder: Path) -> None:
    calls: list[int] = []
    for checkpointing, times in ((False, 1), (True, 2)):
        engine = MegatronEngine(folder / "qwen3", activation_checkpointing=checkpointing)
        engine._model.decoder.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        engine.update(parts_of(40), negate_logprobs, LR)
        assert len(calls) == times * len(parts_of(40))
        calls.clear()


def test_what_megatron_cannot_have_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="model_type .* must be one of llama, qwen2, qwen3, qwen3_moe .* got phi"
    ):
        MegatronEngine(folder / "phi")
    with pytest.raises(ValueError, match="expert_parallel must be 1 for a model without experts, got 2"):
        MegatronEngine(folder / "qwen3", expert_parallel=2)
    config = AutoConfig.from_pretrained(folder / "qwen3_moe")
    found = "\n".join(find_problems(config, ParallelSizes(3, 4, 3, 5), 12))
    for what in (
        "attention heads, got 3 for 4",
        "key-value heads, got 3 for 2",
        "layers, got 4 for 2",
        "experts, got 3 for 4",
    ):
        assert what in found
    assert "3 · 4 · 3 for 12" in found and "3 · 4 · 5 for 12" in found
    found = "\n".join(find_problems(config, ParallelSizes(2, context_parallel=4), 8))
    assert "context_parallel must divide the attention heads of a tensor-parallel rank, got 4 for 2" in found
    # Of all layers: this family has no list of their kinds.
    config.use_sliding_window, config.sliding_window = True, 8
    assert find_problems(config, ParallelSizes(), 1) == ["sliding_window of model.path must be none, got 8"]
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attention_bias of model.path must be false, got true"):
        MegatronEngine(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_bias": False}))
    with pytest.raises(ValueError, match="no parameters but .* got model.layers.0.self_attn.o_proj.bias"):
        MegatronEngine(tmp_path)
