"""Measures what staleness costs each algorithm on the tiny task: final reward by algorithm and S.

    scripts/study_staleness.sh             runs all of it; finished runs are kept in outputs/staleness.jsonl,
                                           and are not run again
    scripts/study_staleness.sh --seeds 2 --max-versions 0 4
                                           runs a part of it; --out FILE keeps it apart
    scripts/study_staleness.sh --write     also writes docs/staleness.md and its plot from the runs that there
                                           are

The script forces the lag. Step k trains, with the learner's own training step, on what version max(0, k − S)
has sampled: every token is as stale as the bound allows, which no real run is. Under the controller the lag
is what `staleness.controller=ess` admits. Wall time plays no part.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch import Tensor

from configs.load import load_config
from slipstream_bench.intervals import confidence_interval
from slipstream_bench.study_outcomes import (
    CONTROLLER_COLUMN,
    HELD_OUT,
    StudyJob,
    StudyOutcome,
    group_outcomes,
)
from slipstream_bench.study_report import write_report

ROOT = Path(__file__).parents[2]
OUT = ROOT / "outputs" / "staleness.jsonl"

COMMON = [
    "learner.groups_per_step=16",
    "learner.samples_per_prompt=8",
    "learner.minibatches=2",
    "learner.warmup_steps=5",
    "learner.lr_end=1",
    "learner.tokens_per_microbatch=65536",
    "algo.accept_uncorrected=true",
    "algo.aggregation=sequence_mean_token_mean",
]
ALGORITHMS: dict[str, list[str]] = {
    "PPO clip on μ": ["algo=grpo", "algo.proximal=behavior", "algo.correction=none"],
    "decoupled PPO": ["algo=grpo", "algo.correction=token_tis", "algo.correction_cap=5.0"],
    "TIS, two policies": ["algo=aipo", "algo.aipo.cap=2.0"],
    "CISPO": ["algo=cispo"],
    "GSPO": ["algo=gspo"],
    "M2PO": ["algo=m2po"],
}
CONTROLLED = ("PPO clip on μ", "decoupled PPO")
"""Algorithms that are run under the controller as well."""


def run_job(job: StudyJob) -> StudyOutcome:
    """Trains one run of the study, in the worker process that this is called in."""
    from buffers.controller import first_lag, next_lag
    from buffers.staleness import is_admitted
    from learners.models import load_models
    from learners.step import Trainer
    from sync.stream import collect_tensors

    began = time.monotonic()
    overrides = [
        *COMMON,
        *ALGORITHMS[job.algorithm],
        f"staleness.max_versions={job.max_versions}",
        f"learner.lr={job.lr}",
    ]
    config = load_config(
        [*overrides, f"run.seed={job.seed}", f"run.steps={job.steps}", f"model.path={_load_sampler().path}"]
    )
    torch.manual_seed(job.seed)
    trainer = Trainer(config, load_models(config))
    versions: deque[dict[str, Tensor]] = deque(maxlen=job.max_versions + 1)
    admission_lag = job.max_versions if job.controller == "fixed" else first_lag(job.max_versions)
    steps_since_change = 0
    # The version that samples the batch due at each step.
    leased: list[int] = []
    curve: list[float] = []
    staleness: list[int] = []
    ess: list[float] = []
    divergence: list[float] = []
    for step in range(job.steps):
        versions.append(collect_tensors(trainer.models.policy.stream_weights()))
        while is_admitted(len(leased), step, admission_lag):
            leased.append(step)
        behind = step - leased[step]
        batch = _load_sampler().sample_batch(config, versions[-1 - behind], step, behind)
        try:
            metrics, _ = trainer.train(batch, step)
        except FloatingPointError:
            return StudyOutcome(
                job, float("nan"), curve, mean(staleness), ess, divergence, time.monotonic() - began
            )
        curve.append(metrics["reward/mean"])
        staleness.append(behind)
        ess.append(metrics["offpolicy/ess_token"])
        divergence.append(metrics["offpolicy/kl_k3"])
        if job.controller == "ess":
            previous_lag = admission_lag
            admission_lag = next_lag(
                previous_lag,
                metrics["offpolicy/ess_token"],
                config.staleness.ess_target,
                job.max_versions,
                steps_since_change,
            )
            steps_since_change = 0 if admission_lag != previous_lag else steps_since_change + 1
    reward = _load_sampler().score_held_out(collect_tensors(trainer.models.policy.stream_weights()))
    return StudyOutcome(job, reward, curve, mean(staleness), ess, divergence, time.monotonic() - began)


class TinySampler:
    """Samples the tiny model with transformers. Each process has one."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        from generators.tasks.arithmetic import Task
        from learners.tiny_cache import prepare_tiny_model

        disable_progress_bar()
        torch.set_num_threads(1)
        folder = tempfile.mkdtemp()
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        self.task = Task()
        self.path = prepare_tiny_model(self.task.solved_examples("train", seed=0))
        self.model = AutoModelForCausalLM.from_pretrained(self.path).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.path, padding_side="left")

    @torch.no_grad()
    def _sample_responses(
        self, prompts: list[Any], num: int, seed: int
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Samples each prompt `num` times; returns prompt tokens, sampled tokens and their
        log-probabilities."""
        torch.manual_seed(seed)
        inputs = self.tokenizer([prompt.text for prompt in prompts], return_tensors="pt", padding=True)
        ids, mask = (column.repeat_interleave(num, 0) for column in (inputs.input_ids, inputs.attention_mask))
        out = self.model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=8, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
        sampled = out.sequences[:, ids.shape[1] :]
        logprobs = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
        eos = self.model.generation_config.eos_token_id
        lengths = ((sampled == eos).cumsum(1) == 0).sum(1).add(1).clamp(max=sampled.shape[1]).tolist()
        starts = (ids.shape[1] - mask.sum(1)).tolist()
        prompt_tokens = [row[start:] for row, start in zip(ids, starts, strict=True)]
        return (
            prompt_tokens,
            [row[:n] for row, n in zip(sampled, lengths, strict=True)],
            [row[:n] for row, n in zip(logprobs, lengths, strict=True)],
        )

    def _score_responses(self, prompts: list[Any], num: int, sampled: list[Tensor]) -> list[float]:
        texts = self.tokenizer.batch_decode(sampled, skip_special_tokens=True)
        return [self.task.score_response(prompts[i // num], text).reward for i, text in enumerate(texts)]

    def sample_batch(self, config: Any, weights: dict[str, Tensor], step: int, behind: int) -> Any:
        """Samples the groups of `step` under `weights`, which are those of version `step - behind`."""
        from learners.packing import Batch

        self.model.load_state_dict(weights)
        groups, num = config.learner.groups_per_step, config.learner.samples_per_prompt
        seed = config.run.seed
        prompts = [
            self.task.make_prompt("train", index, seed) for index in range(step * groups, (step + 1) * groups)
        ]
        before, sampled, logprobs = self._sample_responses(prompts, num, seed * 1_000_003 + step)
        lengths = [torch.tensor([len(p), len(s)]) for p, s in zip(before, sampled, strict=True)]
        flags = torch.cat([torch.arange(int(n.sum())) >= n[0] for n in lengths])
        most = config.sampling.max_tokens
        return Batch(
            tokens=torch.cat([torch.cat(pair) for pair in zip(before, sampled, strict=True)]),
            sampled=flags,
            behavior_logprobs=torch.cat(
                [torch.cat([torch.zeros(len(p)), found]) for p, found in zip(before, logprobs, strict=True)]
            ),
            versions=torch.where(flags, step - behind, -1).int(),
            offsets=torch.tensor([0, *(int(n.sum()) for n in lengths)]).cumsum(0).numpy(),
            rewards=torch.tensor(self._score_responses(prompts, num, sampled)),
            groups=torch.arange(groups).repeat_interleave(num),
            group_weights=torch.ones(groups * num),
            truncated=torch.tensor([len(s) == most for s in sampled]),
            greedy_rewards=torch.full((groups * num,), float("nan")),
        )

    def score_held_out(self, weights: dict[str, Tensor]) -> float:
        """Returns the mean reward of one response to each of the `HELD_OUT` prompts."""
        self.model.load_state_dict(weights)
        prompts = [self.task.make_prompt("eval", index, 0) for index in range(HELD_OUT)]
        _, sampled, _ = self._sample_responses(prompts, 1, 0)
        return mean(self._score_responses(prompts, 1, sampled))


@cache
def _load_sampler() -> TinySampler:
    return TinySampler()


def list_jobs(options: argparse.Namespace) -> list[StudyJob]:
    plain = [
        StudyJob(algorithm, max_versions, seed, "fixed", options.lr, options.steps)
        for algorithm in options.algorithms
        for max_versions in options.max_versions
        for seed in range(options.seeds)
    ]
    controlled = [
        StudyJob(algorithm, max(options.max_versions), seed, "ess", options.lr, options.steps)
        for algorithm in options.algorithms
        if algorithm in CONTROLLED and max(options.max_versions) > 1
        for seed in range(options.seeds)
    ]
    return plain + controlled


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS), metavar="NAME"
    )
    parser.add_argument("--max-versions", nargs="+", type=int, default=[0, 1, 4, 16], metavar="S")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT, help="where finished runs are kept (JSON lines)")
    parser.add_argument("--write", action="store_true", help="write docs/staleness.md and docs/staleness.png")
    options = parser.parse_args(arguments)
    wanted = list_jobs(options)
    done = [msgspec.json.decode(line, type=StudyOutcome) for line in _read_lines(options.out)]
    have = {outcome.job for outcome in done}
    todo = [job for job in wanted if job not in have]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    context = multiprocessing.get_context("spawn")
    with Progress(*columns, console=Console(stderr=True)) as progress, options.out.open("ab") as file:
        bar = progress.add_task("runs", total=len(todo))
        with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
            try:
                for future in as_completed([pool.submit(run_job, job) for job in todo]):
                    outcome = future.result()
                    done.append(outcome)
                    file.write(msgspec.json.encode(outcome) + b"\n")
                    file.flush()
                    progress.advance(bar)
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                print(f"stopped; {len(done)} runs are kept in {options.out}", file=sys.stderr)
                return 130
    chosen = [outcome for outcome in done if outcome.job in set(wanted)]
    Console().print(make_table(chosen))
    if options.write:
        write_report(chosen, ROOT / "docs", " ".join(arguments))
    return 0


def make_table(outcomes: list[StudyOutcome]) -> Table:
    groups = group_outcomes(outcomes)
    columns = sorted(
        {column for _, column in groups}, key=lambda column: (column == CONTROLLER_COLUMN, column.zfill(6))
    )
    shown = Table(
        "algorithm",
        *(f"S = {c}" if c != CONTROLLER_COLUMN else "controller" for c in columns),
        title="held-out reward",
    )
    for algorithm in dict.fromkeys(name for name, _ in groups):
        row = []
        for column in columns:
            rewards = [outcome.reward for outcome in groups.get((algorithm, column), [])]
            row.append("{:.3f} ± {:.3f}".format(*confidence_interval(rewards)) if rewards else "")
        shown.add_row(algorithm, *row)
    return shown


def _read_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines() if line.strip()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
