"""The pipeline at S = 0 is the synchronous algorithm, bit for bit: it equals a plain loop, with real vLLM on
both sides, whether learner and engines are apart or take turns."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from algos.advantages import grpo_advantages
from algos.aggregation import compute_aggregation_weights
from algos.loss import policy_loss
from algos.objective import make_loss_inputs
from buffers.trajectory import Trajectory, to_batch
from configs.load import load_config
from configs.placement import PlacementMode
from configs.schema import Config
from generators.engine import Engine, Sample
from generators.group import make_sample_seed
from generators.joining import make_engine
from generators.task import Task
from generators.tasks import load_task
from learners.fsdp import FsdpEngine
from learners.packing import batch_from_arrow, pack_share
from sync.publisher import Publisher
from sync.snapshot import Snapshot
from sync.stream import collect_tensors

ROOT = Path(__file__).parents[1]
STEPS, GROUPS, SAMPLES = 4, 8, 4
SAME = [
    "mode=on_policy",
    f"run.steps={STEPS}",
    f"learner.groups_per_step={GROUPS}",
    f"learner.samples_per_prompt={SAMPLES}",
    "generators.count=1",
    "eval.prompts=0",
    "learner.lr=1e-3",
    "learner.warmup_steps=0",
    "learner.lr_end=1",
]


def sample_step(
    engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, step: int
) -> list[Trajectory]:
    """Samples and scores the groups of one step, all under the version that the engine holds."""
    groups = range(step * GROUPS, (step + 1) * GROUPS)
    prompts = {group: task.make_prompt("train", group, 0) for group in groups}
    encoded = {group: list(tokenizer.encode(prompt.text)) for group, prompt in prompts.items()}
    for group in groups:
        for i in range(SAMPLES):
            seed = make_sample_seed(0, "train", group, i)
            engine.add_sample(Sample(id=f"{group}/{i}", prompt=encoded[group], max_tokens=16, seed=seed))
    done = {}
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
    rows = []
    for group in groups:
        for i in range(SAMPLES):
            completion, unsampled = done[f"{group}/{i}"], len(encoded[group])
            response = tokenizer.decode(completion.tokens, skip_special_tokens=True)
            rows.append(
                Trajectory(
                    group=group,
                    sample=i,
                    due=step,
                    prompt_id=group,
                    task="t",
                    tokens=encoded[group] + completion.tokens,
                    sampled=[False] * unsampled + [True] * len(completion.tokens),
                    logprobs=[0.0] * unsampled + completion.logprobs,
                    versions=[-1] * unsampled + completion.versions,
                    reward=task.score_response(prompts[group], response).reward,
                    finish_reason=completion.finish_reason,
                    generator="g",
                    started_at=0.0,
                    finished_at=0.0,
                )
            )
    return rows


def train_synchronously(config: Config, folder: Path) -> dict[str, Tensor]:
    """Generates a batch, trains on it, and repeats. It has no buffer, no sockets and no other process."""
    import pyarrow as pa

    engine, task = make_engine(config, seed=123), load_task(config.task.name, config.task.args)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    trainer, publisher = FsdpEngine(config.model.path), Publisher(folder, "reference")
    for step in range(STEPS):
        engine.load_version(Snapshot(publisher.publish_version(step, trainer.stream_weights())))
        rows = sample_step(engine, task, tokenizer, step)
        batch = batch_from_arrow(pa.Table.from_batches([to_batch(rows)]))
        assert set(batch.versions[batch.sampled].tolist()) == {step}
        advantages = grpo_advantages(batch.rewards, batch.groups)[batch.sequence]
        weights = compute_aggregation_weights(
            config.algo.aggregation, batch.sampled, batch.sequence, batch.num_sequences
        )
        packed = pack_share(batch, range(batch.num_sequences), 16384, 1, 0)

        def loss_fn(logprobs, entropy, part, batch=batch, advantages=advantages, weights=weights):
            columns = {"advantages": advantages, "mask": batch.sampled, "aggregation_weights": weights}
            inputs = make_loss_inputs(
                config.algo,
                logprobs=logprobs,
                proximal_logprobs=logprobs.detach(),
                entropy=entropy,
                sequence=part.sequence,
                behavior_logprobs=batch.behavior_logprobs[part.index],
                **{name: column[part.index] for name, column in columns.items()},
            )
            return policy_loss(inputs)[0]

        trainer.update(packed, loss_fn, 1e-3)
    publisher.close()
    weights = collect_tensors(trainer.stream_weights())
    engine.shutdown()  # takes the process group along
    return weights


@contextmanager
def process_group(rendezvous: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():  # the inference engine's end may have taken it along
            dist.destroy_process_group()


def start_run(outputs: Path, mode: PlacementMode) -> subprocess.Popen[str]:
    named = [f"run.outputs={outputs}", f"run.name={mode}", f"placement.mode={mode}"]
    command = [sys.executable, "-P", "-m", "slipstream.train", *named, *SAME]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.whole_run
@pytest.mark.timeout(900)
def test_the_pipeline_at_s_zero_is_the_synchronous_loop_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    run = start_run(tmp_path, PlacementMode.apart)
    torch.set_num_threads(1)
    try:
        with process_group(tmp_path / "loop"):  # beside the run
            expected = train_synchronously(
                load_config([*SAME, f"model.path={tiny_model}"]), tmp_path / "weights"
            )
        said, _ = run.communicate(timeout=400)
        assert run.returncode == 0, said
        run = start_run(tmp_path, PlacementMode.colocated)
        said, _ = run.communicate(timeout=400)
        assert run.returncode == 0, said
    finally:
        run.terminate()
    for mode in PlacementMode:
        with process_group(tmp_path / f"pipeline {mode}"):
            pipeline = FsdpEngine(tiny_model)
            start = collect_tensors(pipeline.stream_weights())
            pipeline.load_state(tmp_path / mode / "checkpoints" / f"step_{STEPS}" / "engine")
            found = collect_tensors(pipeline.stream_weights())
        assert any(not torch.equal(start[name], found[name]) for name in found), "nothing was learned"
        different = [name for name in expected if not torch.equal(expected[name], found[name])]
        assert not different, f"{mode}: {len(different)} of {len(expected)} tensors differ: {different[:3]}"
