"""A checkpoint of any engine becomes a Hugging Face folder, which stock transformers and the other engine
take up."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import LENGTHS, make_batch, save_model
from ranks import on_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.learner import LearnerConfig, LearnerKind
from configs.load import load_config, to_yaml
from configs.parallel import LoraConfig, MegatronConfig
from configs.schema import Config
from learners import checkpoint
from learners.engine import ModelKind
from learners.models import make_engine
from learners.packing import Packed, pack_rows
from learners.world import World
from slipstream.export import export_checkpoint

SHARDED = {
    "fsdp 2": (2, {}),
    "fsdp 2, lora": (2, {"lora": LoraConfig(rank=3)}),
    "megatron TP2": (2, {"engine": LearnerKind.megatron, "megatron": MegatronConfig(tensor_parallel=2)}),
    "megatron PP2": (2, {"engine": LearnerKind.megatron, "megatron": MegatronConfig(pipeline_parallel=2)}),
}


def configured(model: Path, ranks: int, learner: dict[str, Any]) -> Config:
    config = load_config([f"model.path={model}", "algo=grpo"])
    return replace(config, learner=replace(config.learner, ranks=ranks, **learner))


def inferred(world: World, config: Config) -> Tensor:
    """[T] log-probabilities of the batch by the run's engine."""
    engine = make_engine(config, ModelKind.policy, lora=config.learner.lora)
    return whole(world, engine)


def whole(world: World, engine: Any) -> Tensor:
    batch = make_batch()
    rows = list(range(len(LENGTHS)))[engine.share.index :: engine.share.count]
    found, part = torch.zeros(len(batch.tokens)), pack_rows(batch, rows)
    found[part.index] = engine.infer([part])[0] * engine.share.holds_results
    return world.add_tensor(found)


def trained(world: World, config: Config, run: Path) -> Tensor:
    """As `inferred`, after an update, of which a checkpoint is written."""
    engine = make_engine(config, ModelKind.policy, lora=config.learner.lora)
    batch = make_batch()
    part = pack_rows(batch, list(range(len(LENGTHS)))[engine.share.index :: engine.share.count])

    def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
        return -logprobs.sum() / len(batch.tokens)

    for _ in range(2):  # an adapter's first update moves one of its two matrices only
        engine.update([part], loss_fn, 1e-2)
    found = whole(world, engine)
    writer = checkpoint.CheckpointWriter(
        run / "checkpoints",
        1,
        World(world.rank, world.size, torch.distributed.FileStore(str(run / "writers"), world.size))
        if world.size > 1
        else None,
    )
    snapshot = engine.copy_state()
    writer.begin_checkpoint(
        checkpoint.CheckpointManifest(2, "life", 0), lambda folder: snapshot(folder / "engine")
    )
    writer.take_written(wait=True)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", SHARDED)
def test_an_export_is_the_policy_for_transformers_and_for_the_other_engine(
    name: str, model: Path, tmp_path: Path
) -> None:
    ranks, learner = SHARDED[name]
    config, run = configured(model, ranks, learner), tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(config))
    expected = on_ranks(ranks, trained, tmp_path / "train", config, run)[0]
    assert on_ranks(1, exported, tmp_path / "export", run, tmp_path / "model") == [2]

    stock, batch = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager"),
        make_batch(),
    )
    found = torch.zeros(len(batch.tokens))
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        tokens = batch.tokens[start:end]
        with torch.no_grad():
            scores = stock(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        found[start + 1 : end] = scores.gather(-1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    is_megatron = config.learner.engine is LearnerKind.megatron
    other = LearnerConfig() if is_megatron else replace(LearnerConfig(), engine=LearnerKind.megatron)
    further = replace(config, model=replace(config.model, path=str(tmp_path / "model")), learner=other)
    torch.testing.assert_close(
        on_ranks(1, inferred, tmp_path / "other", further)[0], expected, atol=1e-5, rtol=0
    )


def exported(world: World, run: Path, folder: Path) -> int:
    """The folder is named relative to the working directory, as a user names it."""
    torch.distributed.destroy_process_group()
    with contextlib.chdir(folder.parent):
        step = export_checkpoint(run, Path(folder.name), None, None)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}-after", rank=0, world_size=1)
    return step
