"""Measures how much of a model's bfloat16 weights a step of reinforcement learning changes, and what patches
save.

    scripts/measure_patches.sh [--steps 20] [--rates 1e-6 1e-5 ...]

The table has a row for each learning rate. The tiny model learns its arithmetic task on-policy: 64 prompts of
8 samples a step, group-normalized advantages, the learner's own engine (AdamW over float32 master weights).
Each step is published in bfloat16, and the patch from the version before is made and applied as hosts do. The
first two steps, in which AdamW's averages are young, are left out of the means.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from algos.advantages import grpo_advantages
from generators.tasks.arithmetic import Task
from learners.fsdp import FsdpEngine
from learners.packing import Batch, Packed, pack_share
from learners.tiny_cache import prepare_tiny_model
from sync.patch import apply_patches, make_patch
from sync.publisher import Publisher
from sync.snapshot import Snapshot
from sync.stream import collect_tensors, stream_tensor

PROMPTS, SAMPLES = 64, 8
NUM_YOUNG_STEPS = 2
"""First steps, which are left out of the means."""


def sample_batch(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, weights: dict[str, Tensor], step: int
) -> Batch:
    """Samples the trajectories of a step under these weights."""
    model.load_state_dict(weights, strict=False)
    torch.manual_seed(step)
    task, rows, rewards = Task(), [], []
    for index in range(step * PROMPTS, (step + 1) * PROMPTS):
        prompt = task.make_prompt("train", index, 0)
        tokens = tokenizer(prompt.text, return_tensors="pt").input_ids
        out = model.generate(tokens, do_sample=True, num_return_sequences=SAMPLES, max_new_tokens=8)
        for row in out:
            length = tokens.shape[1]
            sampled = row[length:]
            ends = (sampled == model.generation_config.eos_token_id).nonzero()
            sampled = sampled[: int(ends[0]) + 1] if len(ends) else sampled
            rows.append((row[: length + len(sampled)], length))
            rewards.append(
                task.score_response(prompt, tokenizer.decode(sampled, skip_special_tokens=True)).reward
            )
    lengths = torch.tensor([len(row) for row, _ in rows])
    mask = torch.cat([torch.arange(len(row)) >= first for row, first in rows])
    return Batch(
        tokens=torch.cat([row for row, _ in rows]),
        sampled=mask,
        behavior_logprobs=torch.zeros(len(mask)),
        versions=torch.where(mask, step, -1).int(),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).numpy(),
        rewards=torch.tensor(rewards),
        groups=torch.arange(PROMPTS).repeat_interleave(SAMPLES),
        group_weights=torch.ones(len(rows)),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        greedy_rewards=torch.full((len(rows),), float("nan")),
    )


def train_step(engine: FsdpEngine, batch: Batch, rate: float) -> None:
    coefficients = (
        grpo_advantages(batch.rewards, batch.groups)[batch.sequence] * batch.sampled / batch.sampled.sum()
    )

    def compute_loss(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
        return -(coefficients[packed.index] * logprobs).sum()

    engine.update(pack_share(batch, range(batch.num_sequences), 1 << 14, 1, 0), compute_loss, rate)


def measure_rate(rate: float, steps: int, folder: Path) -> tuple[float, float, float, float]:
    """Trains at one learning rate; returns four figures of its steps.

    They are the mean and the largest share of numbers that change, the size of a patch as a share of the
    snapshot's, and the sampled reward at the end.
    """
    path = prepare_tiny_model(Task().solved_examples("train", seed=0))
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    engine = FsdpEngine(path)
    publisher = Publisher(folder / "weights", "measured")
    shares, sizes, rewards = [], [], []
    before: Snapshot | None = None
    for step in track(
        range(steps + 1), f"learning rate {rate:g}", console=Console(stderr=True), transient=True
    ):
        held = collect_tensors(engine.stream_weights())
        published = (
            part for name, whole in held.items() for part in stream_tensor(name, whole, torch.bfloat16)
        )
        snapshot = Snapshot(publisher.publish_version(step, published))
        if before is not None:
            pairs = zip(before.named_tensors(), snapshot.named_tensors(), strict=True)
            changed = sum(
                int((old.view(torch.int16) != new.view(torch.int16)).sum()) for (_, old), (_, new) in pairs
            )
            shares.append(changed / sum(tensor.numel() for _, tensor in snapshot.named_tensors()))
            sizes.append(measure_patch(before, snapshot, folder))
        before = snapshot
        batch = sample_batch(model, tokenizer, held, step)
        rewards.append(float(batch.rewards.mean()))
        train_step(engine, batch, rate)
    publisher.close()
    return (
        mean(shares[NUM_YOUNG_STEPS:]),
        max(shares[NUM_YOUNG_STEPS:]),
        mean(sizes[NUM_YOUNG_STEPS:]),
        mean(rewards[-5:]),
    )


def measure_patch(before: Snapshot, after: Snapshot, folder: Path) -> float:
    """Makes a patch, applies it and verifies the result.

    Returns its size as a share of the snapshot's: 1 where no patch is worth it and the whole is sent.
    """
    path = folder / "patch"
    if not make_patch(before, after, path):
        return 1.0
    into = folder / "patched.safetensors"
    into.write_bytes(Path(before.manifest.path).read_bytes())
    apply_patches(msgspec.structs.replace(before.manifest, path=str(into)), [path])
    Snapshot(msgspec.structs.replace(after.manifest, path=str(into))).verify_bytes()
    return path.stat().st_size / after.manifest.num_bytes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rates = [1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3]
    parser.add_argument("--rates", nargs="+", type=float, default=rates)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    table = Table(
        "learning rate",
        "changed, mean",
        "changed, most",
        "patch / snapshot",
        "bytes saved",
        "reward at the end",
    )
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        for rate in options.rates:
            share, most, size, reward = measure_rate(rate, options.steps, Path(folder))
            table.add_row(
                f"{rate:g}", f"{share:.2%}", f"{most:.2%}", f"{size:.3f}", f"{1 - size:.0%}", f"{reward:.3f}"
            )
        dist.destroy_process_group()
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
