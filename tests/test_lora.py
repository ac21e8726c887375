"""Adapters: the numbers are those of peft and torch on one unsharded model, the names those of peft's
files."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import SIZES, draw_batch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from ranks import gather_weights, on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from configs.parallel import FsdpConfig, LoraConfig, LoraPublish
from learners import lora as adapters
from learners.engine import ModelKind
from learners.fsdp import FsdpEngine
from learners.lora import BaseModelEngine
from learners.packing import Batch, Packed, pack_rows
from learners.world import World

pytestmark = pytest.mark.usefixtures("process_group")

LR, MAX_GRAD_NORM, WEIGHT_DECAY, BETAS, UPDATES = 1e-3, 0.5, 0.1, (0.9, 0.95), 3
RANK, ALPHA = 8, 32.0
LENGTHS = [5, 19, 2, 33, 8, 11, 3, 14]
ATTENTION = "q_proj,k_proj,v_proj,o_proj"
MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            decoder_sparse_step=1,
        )
    ),
}


@dataclass(frozen=True)
class AdapterRow:
    ranks: int
    model: str = "qwen3"
    targets: str = "all-linear"
    options: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "1": AdapterRow(1),
    "1, tied, two names": AdapterRow(1, "qwen2", "q_proj, down_proj"),
    "2": AdapterRow(2),
    "2, tied": AdapterRow(2, "qwen2"),
    "2, experts": AdapterRow(2, "qwen3_moe"),
    "2, offload": AdapterRow(2, options={"cpu_offload": True}),
    "2 x 2 replicas": AdapterRow(4, options={"replicas": 2}),
    "2, ulysses": AdapterRow(2, options={"sequence_parallel": 2}),
}


@dataclass
class AdapterOutcome:
    losses: list[float]
    norms: list[float]
    logprobs: Tensor
    adapters: dict[str, Tensor]
    merged: dict[str, Tensor]


@dataclass
class AdaptersFound(AdapterOutcome):
    drawn: dict[str, Tensor]
    """The adapters before the first update."""
    frozen: dict[str, Tensor]
    """The base's parameters after the last."""
    base: list[Tensor]
    """Log-probabilities without adapters: before, after, and those of `BaseModelEngine`."""


@cache
def save_model(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():  # far from initial values, where norms are 1 and biases 0
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / name)
    return folder / name


def make_batch() -> Batch:
    return draw_batch(LENGTHS, SIZES["vocab_size"])


def draw_advantages() -> Tensor:
    return torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(1))


def loss_of(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -(logprobs * advantages).sum() / (sum(LENGTHS) - len(LENGTHS))


def peft_config(targets: str) -> PeftConfig:
    names = targets if targets == "all-linear" else [name.strip() for name in targets.split(",")]
    return PeftConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, task_type="CAUSAL_LM")


def logprobs_of(model: Any) -> list[Tensor]:
    """Computes log-probabilities of each sequence by itself, 0 for its first token."""
    batch, found = make_batch(), []
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        tokens = batch.tokens[start:end]
        scores = model(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(torch.cat([torch.zeros(1), scores.gather(-1, tokens[1:, None])[:, 0]]))
    return found


def update_by_peft(folder: Path, targets: str) -> AdapterOutcome:
    """peft and torch, on one whole model."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model = get_peft_model(base, peft_config(targets)).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    losses, norms = [], []
    for _ in range(UPDATES):
        loss = loss_of(torch.cat(logprobs_of(model)), draw_advantages())
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    logprobs = torch.cat(logprobs_of(model)).detach()
    model.save_pretrained(folder / targets)
    model.merge_and_unload().save_pretrained(folder / targets / "merged")
    return AdapterOutcome(
        losses,
        norms,
        logprobs,
        load_file(folder / targets / "adapter_model.safetensors"),
        load_file(folder / targets / "merged" / "model.safetensors"),
    )


def make_engine(folder: Path, lora: LoraConfig | None, **options: Any) -> FsdpEngine:
    return FsdpEngine(
        folder,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        bucket_bytes=1 << 11,
        lora=lora,
        **options,
    )


def collect_published(engine: FsdpEngine, lora: LoraConfig, publish: LoraPublish) -> dict[str, Tensor]:
    lora.publish = publish
    return gather_weights(engine.stream_weights())


def pack_share(engine: FsdpEngine) -> list[Packed]:
    mine = list(range(len(LENGTHS)))[engine.share.index :: engine.share.count]
    return [pack_rows(make_batch(), mine[number::2]) for number in range(2)]


def infer_all(engine: Any, world: World, parts: list[Packed]) -> Tensor:
    logprobs = torch.zeros(sum(LENGTHS))
    for part, found in zip(parts, engine.infer(parts), strict=True):
        logprobs[part.index] = found * engine.share.holds_results
    return world.add_tensor(logprobs)


def update_once(engine: FsdpEngine, world: World, parts: list[Packed]) -> tuple[float, float]:
    losses = torch.zeros(1)

    def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
        loss = loss_of(logprobs, draw_advantages()[packed.index])
        losses.add_(loss.detach() * engine.share.holds_results)
        return loss

    norm = engine.update(parts, loss_fn, LR)
    return float(world.add_tensor(losses)), norm


def collect_base(engine: FsdpEngine) -> dict[str, Tensor]:
    named = {name: p for name, p in engine._named.items() if not adapters.is_adapter(name)}
    whole: dict[str, Any] = {adapters.base_name(name): p.detach() for name, p in named.items()}
    return {name: tensor.full_tensor().cpu() for name, tensor in whole.items()}


def train_row(world: World, row: AdapterRow, folder: Path) -> AdaptersFound:
    torch.manual_seed(world.rank)
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=row.targets)
    engine = make_engine(folder, lora, layout=FsdpConfig(**row.options))
    reference, parts = BaseModelEngine(engine), pack_share(engine)
    before, drawn = infer_all(reference, world, parts), collect_published(engine, lora, LoraPublish.adapter)
    losses, norms = zip(*[update_once(engine, world, parts) for _ in range(UPDATES)], strict=True)
    with engine.without_adapters():
        after = infer_all(engine, world, parts)
    return AdaptersFound(
        list(losses),
        list(norms),
        infer_all(engine, world, parts),
        collect_published(engine, lora, LoraPublish.adapter),
        collect_published(engine, lora, LoraPublish.merged),
        drawn,
        collect_base(engine),
        [before, after, infer_all(reference, world, parts)],
    )


def infer_untrained(world: World, row: AdapterRow, folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    engine = make_engine(folder, None, kind=ModelKind.frozen, layout=FsdpConfig(**row.options))
    return infer_all(engine, world, pack_share(engine)), collect_base(engine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def references(folder: Path) -> Callable[[AdapterRow], AdapterOutcome]:
    targets = {"qwen3_moe": ATTENTION}  # what `all-linear` is where experts are one tensor
    of = cache(lambda model, targets: update_by_peft(save_model(model, folder), targets))
    return lambda row: of(row.model, targets.get(row.model, row.targets))


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[AdaptersFound]]:
    """Returns a function that trains a row and returns the results of its ranks."""

    def run(name: str) -> list[AdaptersFound]:
        row = ROWS[name]
        return on_ranks(
            row.ranks, train_row, tmp_path_factory.mktemp("ranks"), row, save_model(row.model, folder)
        )

    return cache(run)


@pytest.mark.parametrize("name", ROWS)
def test_updates_are_those_of_peft(
    name: str, references: Callable[[AdapterRow], AdapterOutcome], runs: Callable[[str], list[AdaptersFound]]
) -> None:
    """Loss and gradient norm within 1e-5 of their size at each of three updates, matrices within 2 % of a
    step of AdamW (two whole steps each where the gradient is rounding)."""
    expected, ranks = references(ROWS[name]), runs(name)
    found = ranks[0]
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert all(rank.norms == found.norms for rank in ranks), "every rank knows the gradient norm"
    assert found.adapters.keys() == found.drawn.keys() == expected.adapters.keys()
    for key, matrix in found.adapters.items():
        apart = (matrix - expected.adapters[key]).abs()
        assert matrix.dtype == torch.float32 and apart.max() <= 2 * UPDATES * LR, key
        assert (apart <= 0.02 * LR).float().mean() > 0.99, key
        assert not torch.equal(matrix, found.drawn[key]), f"{key} is not trained"
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ROWS)
def test_without_adapters_the_base_answers_to_the_bit_also_after_training(
    name: str, folder: Path, runs: Callable[[str], list[AdaptersFound]], tmp_path: Path
) -> None:
    row, found = ROWS[name], runs(name)[0]
    base, frozen = on_ranks(
        row.ranks, infer_untrained, tmp_path / "ranks", row, save_model(row.model, folder)
    )[0]
    assert found.frozen.keys() == frozen.keys() and all(
        torch.equal(found.frozen[key], frozen[key]) for key in frozen
    )
    assert all(torch.equal(logprobs, base) for logprobs in found.base)
    assert (found.logprobs - base).abs().max() > 0.01


@pytest.mark.parametrize("name", ROWS)
def test_what_is_published_is_a_file_of_stock_peft_or_the_model_that_peft_makes_of_it(
    name: str,
    folder: Path,
    references: Callable[[AdapterRow], AdapterOutcome],
    runs: Callable[[str], list[AdaptersFound]],
    tmp_path: Path,
) -> None:
    row, found = ROWS[name], runs(name)[0]
    save_file(found.adapters, tmp_path / "adapter_model.safetensors")
    peft_config(ATTENTION if row.model == "qwen3_moe" else row.targets).save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(save_model(row.model, folder), attn_implementation="eager")
    model = PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(logprobs_of(model)), found.logprobs, atol=3e-6, rtol=0)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.merged.keys() == expected.keys() == references(row).merged.keys()
    for key, matrix in found.merged.items():
        torch.testing.assert_close(matrix, expected[key], atol=1e-6, rtol=0)


def test_adapters_are_drawn_the_same_on_any_number_of_ranks(
    runs: Callable[[str], list[AdaptersFound]],
) -> None:
    one, two = (runs(name)[0].drawn for name in ("1", "2"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("targets", "wrong"),
    [("q_prj", "q_prj"), ("q_proj,", ""), ("v_proj, lm_head", "lm_head"), ("norm", "norm")],
)
def test_targets_that_name_no_linear_layer_are_refused(folder: Path, targets: str, wrong: str) -> None:
    rule = r"learner.lora.targets must be all-linear or names .*\(down_proj, .*, v_proj\), "
    with pytest.raises(ValueError, match=rf"{rule}got '{wrong}' in '{targets}'"):
        make_engine(save_model("qwen3", folder), LoraConfig(rank=RANK, targets=targets))


def test_recomputed_activations_change_nothing(folder: Path) -> None:
    engines = [
        make_engine(save_model("qwen3", folder), LoraConfig(rank=RANK), activation_checkpointing=on)
        for on in (False, True)
    ]
    first, second = (
        [update_once(engine, World(), pack_share(engine))[1] for _ in range(2)] for engine in engines
    )
    assert first == pytest.approx(second, rel=1e-6)


def train_on(
    world: World, folder: Path, saved: Path | None, write: Path | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Two updates after a checkpoint, which is read from `saved`, or else made of two updates, and
    written."""
    lora = LoraConfig(rank=RANK, alpha=ALPHA)
    engine = make_engine(folder, lora)
    parts = pack_share(engine)
    if saved is not None:
        engine.load_state(saved)
    else:
        [update_once(engine, world, parts) for _ in range(2)]
    if write is not None:
        engine.copy_state()(write)
    norms = [update_once(engine, world, parts)[1] for _ in range(2)]
    return norms, collect_published(engine, lora, LoraPublish.adapter)


def test_a_checkpoint_holds_adapters_alone_and_goes_on_to_the_bit_and_with_fewer_ranks(
    folder: Path, tmp_path: Path
) -> None:
    model = save_model("qwen3", folder)
    norms, expected = on_ranks(2, train_on, tmp_path / "first", model, None, tmp_path / "engine")[0]
    held = set()
    for file in (tmp_path / "engine").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            held |= set(opened.keys())
    kinds = {"model", "exp_avg", "exp_avg_sq", "step"}
    assert {name.partition(".")[0] for name in held} == kinds and all(".lora_" in name for name in held)
    assert len(held) == len(kinds) * len(expected)

    again, resumed = on_ranks(2, train_on, tmp_path / "second", model, tmp_path / "engine", None)[0]
    assert again == norms and all(torch.equal(resumed[name], expected[name]) for name in expected)
    alone, fewer = train_on(World(), model, tmp_path / "engine", None)
    assert alone == pytest.approx(norms, rel=1e-4)
    for name, matrix in fewer.items():
        torch.testing.assert_close(matrix, expected[name], atol=2e-5, rtol=0)
