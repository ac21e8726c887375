"""Writes the policy of a checkpoint as a Hugging Face folder: weights, configuration and tokenizer.

    scripts/export.sh outputs/NAME models/mine                  the newest checkpoint, in the dtype of the run
    scripts/export.sh outputs/NAME models/mine --step 50 --dtype bfloat16

Stock transformers (`from_pretrained`) and vLLM (`vllm serve models/mine`) load it, and so does another run
(`model.path=models/mine`). The folder appears whole or not at all. The weights are gathered a bucket at a
time, from however many ranks wrote them.
"""

import argparse
import dataclasses
import shutil
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from configs.load import parse_config
from configs.model import Dtype, ModelConfig
from configs.parallel import FsdpConfig, LoraConfig, LoraPublish, MegatronConfig
from configs.schema import Config
from learners import checkpoint
from learners.engine import ModelKind


def export_checkpoint(run: Path, folder: Path, step: int | None, dtype: Dtype | None) -> int:
    """Writes the policy of the checkpoint of `step` (None: the newest). Returns its step.

    Raises ValueError, in the words of the command line, for what cannot be.
    """
    from learners.models import make_engine
    from sync.publisher import Publisher

    if not (run / "config.yaml").is_file():
        raise ValueError(f"the run must be a folder with a config.yaml, got {run}")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"the folder must be new or empty, got {folder}")
    kept = {found.manifest.step: found for found in checkpoint.find_checkpoints(run / "checkpoints")}
    if not kept:
        raise ValueError(f"the run must hold a checkpoint, got {run} without one")
    chosen = max(kept) if step is None else step
    if chosen not in kept:
        raise ValueError(f"--step must be one of {sorted(kept)} (the checkpoints kept), got {chosen}")
    config = parse_config((run / "config.yaml").read_text())
    source = Path(config.model.path)
    if not (source / "config.json").is_file():
        raise ValueError(
            f"model.path of the run must still be there (its configuration and tokenizer), got {source}"
        )
    model = config.model if dtype is None else dataclasses.replace(config.model, dtype=dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The rendezvous is a URL of a file: of a relative path torch would take the first part for a host's name.
    with tempfile.TemporaryDirectory(dir=folder.parent.resolve(), prefix=".export-") as temporary:
        dist.init_process_group("gloo", init_method=f"file://{temporary}/rendezvous", rank=0, world_size=1)
        # A frozen model has no optimizer, whose state is twice as large. Adapters are trained, and are small.
        lora = merge_adapters(config.learner.lora)
        kind = ModelKind.frozen if lora.rank is None else ModelKind.policy
        engine = make_engine(place_on_one_rank(config, model), kind, lora=lora)
        engine.load_state(kept[chosen].folder / "engine")
        publisher = Publisher(Path(temporary) / "model", "export", model=source)
        publisher.publish_version(chosen, engine.stream_weights())
        publisher.close()
        dist.destroy_process_group()
        shutil.rmtree(folder, ignore_errors=True)
        (Path(temporary) / "model").rename(folder)
    return chosen


def place_on_one_rank(config: Config, model: ModelConfig) -> Config:
    """Returns the run's configuration with its engine on a single rank."""
    learner = dataclasses.replace(config.learner, ranks=1, fsdp=FsdpConfig(), megatron=MegatronConfig())
    return dataclasses.replace(config, learner=learner, model=model)


def merge_adapters(lora: LoraConfig) -> LoraConfig:
    return dataclasses.replace(lora, publish=LoraPublish.merged)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest)")
    parser.add_argument(
        "--dtype", type=Dtype, choices=list(Dtype), help="of the weights (default: model.dtype of the run)"
    )
    options = parser.parse_args(arguments)
    try:
        step = export_checkpoint(options.run, options.folder, options.step, options.dtype)
    except ValueError as error:
        print(f"Slipstream cannot export:\n{error}", file=sys.stderr)
        return 2
    print(f"step {step} of {options.run} is in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
