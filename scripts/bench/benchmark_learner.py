"""Measures what a training step costs, and what the same step costs in other loops.

    scripts/benchmark_learner.sh [--sequences 64] [--mean-tokens 200] [--cv 1.0] [--threads 1] [--repeats 1]
    [--no-trl] [--json FILE]

The others are a bare FSDP2 loop, the usual padded step, TRL's step, and the fastest matrix product of the
machine. All take the same step: GRPO (mean over tokens) on the same sequences in groups of 8, whose responses
have lognormal lengths, with the same small Qwen3 (random weights, float32), clipping and fused AdamW. Losses
and gradient norms of the first steps must agree. Repeats are interleaved and the least time counts. With one
thread on a CPU it is the processor's time, so other programs count for little; otherwise it is the clock's.

    Trainer.train          `learners.step`: packing, advantages, loss, update, metrics
    engine.update          the part of it that `FsdpEngine.update` takes
    bare loop              `fully_shard`, the same microbatches, attention and head, the shortest
                           policy gradient
    bare loop, plain head  the same with a head of one line: all logits of a microbatch at once, no
                           entropies
    padded                 plain PyTorch: 8 sequences a microbatch, all as long as the longest of the
                           batch, logits of all positions
    padded by microbatch   the same, each microbatch as long as its own longest
    TRL                    `trl.GRPOTrainer`, 8 sequences a microbatch, no checkpointing of activations
                           (its default would compute more)
    TRL, head compact      the same with its head for sampled tokens alone, as it is on a GPU;
                           elsewhere it takes all positions

MFU is `learners.flops.count_step_flops` (6 N T + 6 L A Σ n², the head included, nothing counted twice) over a
step's time, as a share of the fastest matrix product that was measured between the steps.

Memory of the head is the most that forward and backward allocate over their arguments, as `benchmark_loss.py`
counts it.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from configs.load import load_config
from configs.model import Dtype
from learners.flops import count_step_flops
from learners.fsdp import FsdpEngine
from learners.heads import chunked_logprobs
from learners.models import Models
from learners.packing import Batch, Packed, pack_rows
from learners.step import Trainer
from slipstream_bench.learner_peers import (
    BETAS,
    GROUP,
    LR,
    MAX_GRAD_NORM,
    ROWS,
    BareLoop,
    Step,
    Work,
    make_padded_step,
    make_trl_step,
    read_clock,
)
from slipstream_bench.measured_cost import measure_cost

TOKENS, VOCABULARY, HIDDEN = 8_192, 32_768, 512
"""Sizes of the head whose memory is measured."""
MATRICES = (4096, 8192) if torch.cuda.is_available() else (512, 1024, 2048)
say = Console(stderr=True)


def make_work(options: argparse.Namespace, folder: Path) -> Work:
    hidden, vocabulary, num = options.hidden, options.vocab, options.sequences
    torch.manual_seed(options.seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        head_dim=min(64, hidden),
        max_position_embeddings=1 << 16,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    rng = np.random.default_rng(options.seed)

    def draw_lognormal(mean: float, cv: float, size: int) -> np.ndarray:
        sigma = math.sqrt(math.log(1 + cv**2))
        return np.maximum(2, rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, size)).astype(np.int64)

    responses = draw_lognormal(options.mean_tokens, options.cv, num)
    prompts = draw_lognormal(options.mean_tokens / 4, 0.5, num // GROUP).repeat(GROUP)
    return Work(str(folder), make_batch(prompts, responses, vocabulary, rng), options.budget)


def make_batch(
    prompts: np.ndarray, responses: np.ndarray, vocabulary: int, rng: np.random.Generator
) -> Batch:
    """Makes a batch of random tokens, with prompts and responses of these lengths [N]."""
    num, lengths = len(prompts), prompts + responses
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    sampled = torch.from_numpy(np.arange(offsets[-1]) >= (offsets[:-1] + prompts).repeat(lengths))
    return Batch(
        tokens=torch.from_numpy(rng.integers(1, vocabulary, offsets[-1], dtype=np.int32)),
        sampled=sampled,
        behavior_logprobs=torch.zeros(len(sampled)),
        versions=torch.where(sampled, 0, -1).int(),
        offsets=offsets,
        rewards=torch.from_numpy(rng.integers(0, 2, num)).float(),
        groups=torch.arange(num) // GROUP,
        group_weights=torch.ones(num),
        truncated=torch.zeros(num, dtype=torch.bool),
        greedy_rewards=torch.full((num,), math.nan),
    )


# ---- the steps


class TimedEngine(FsdpEngine):
    """Engine that keeps the microbatches it was given and the seconds of its last update."""

    seconds = 0.0
    microbatches: Sequence[Packed] = ()

    def update(self, microbatches: Sequence[Packed], loss_fn: Any, lr: float) -> float:
        self.microbatches, began = microbatches, read_clock()
        norm = super().update(microbatches, loss_fn, lr)
        self.seconds = read_clock() - began
        return norm


def make_trainer_step(work: Work, engine: TimedEngine) -> Step:
    """Makes the step `Trainer.train`. Afterwards `engine` has the update's seconds and microbatches."""
    num = work.batch.num_sequences
    config = load_config(
        [
            f"model.path={work.path}",
            "algo=grpo",
            "algo.aggregation=token_mean",
            "eval.prompts=0",
            f"learner.lr={LR}",
            "learner.lr_end=1",
            "learner.minibatches=1",
            "learner.warmup_steps=0",
            f"learner.tokens_per_microbatch={work.budget}",
            f"learner.groups_per_step={num // GROUP}",
            f"learner.samples_per_prompt={GROUP}",
            f"sampling.max_tokens={max(work.lengths)}",
            f"generators.max_model_len={max(work.lengths) + 1}",
        ]
    )
    whole = Trainer(config, Models(policy=engine))
    batch = replace(work.batch, behavior_logprobs=whole.infer_logprobs(work.batch))

    def step() -> tuple[float, float]:
        metrics, _ = whole.train(batch, 0)
        return metrics["loss/policy"], metrics["optimizer/grad_norm"]

    return step


# ---- measuring


@contextmanager
def join_process_group(folder: Path) -> Iterator[None]:
    """Makes a process group of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_matrix_peak(device: torch.device, sizes: Sequence[int]) -> float:
    """Returns FLOP/s of the fastest product of square matrices, in float32 on a CPU, in bfloat16 on a GPU."""
    dtype, rates = torch.bfloat16 if device.type == "cuda" else torch.float32, []
    for size in sizes:
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        for _ in range(3):
            began = read_clock()
            torch.mm(left, right)
            rates.append(2 * size**3 / (read_clock() - began))
    return max(rates)


def measure_steps(
    work: Work, repeats: int, with_trl: bool, matrices: Sequence[int] = MATRICES
) -> dict[str, Any]:
    """Returns seconds and first results of each step, the peak FLOP/s between them, and the bare loop's
    shares."""
    dtype = Dtype.bfloat16 if work.cuda else Dtype.float32
    engine = TimedEngine(
        work.path, dtype=dtype, attention=work.attention, betas=BETAS, max_grad_norm=MAX_GRAD_NORM
    )
    loop = BareLoop(work, lambda: engine.microbatches)
    ours: dict[str, Step] = {
        "Trainer.train": make_trainer_step(work, engine),
        "bare loop": loop,
        "bare loop, plain head": BareLoop(work, lambda: engine.microbatches, entropies=False),
    }
    others = {
        "padded": make_padded_step(work),
        "padded by microbatch": make_padded_step(work, by_microbatch=True),
    }
    if with_trl:
        others |= {"TRL": make_trl_step(work), "TRL, head compact": make_trl_step(work, compact=True)}
    seconds: dict[str, list[float]] = {
        name: [] for name in ("Trainer.train", "engine.update", *ours, *others)
    }
    results: dict[str, tuple[float, float]] = {}
    peak = 0.0
    for number in range(repeats):
        for name, step in (*ours.items(), *ours.items(), *others.items()):
            say.print(f"{number + 1} of {repeats}: {name} ...")
            began = read_clock()
            result = step()
            seconds[name].append(read_clock() - began)
            results.setdefault(name, result)
            if name == "Trainer.train":
                seconds["engine.update"].append(engine.seconds)
                peak = max(peak, measure_matrix_peak(work.device, matrices))
    return {"seconds": seconds, "results": results, "peak": peak, "shares": loop.measure_shares()}


def check_results(results: dict[str, tuple[float, float]], tolerance: float) -> None:
    """Raises AssertionError where loss and gradient norm of a first step differ from those of the bare
    loop."""
    for name, found in results.items():
        expected = results["bare loop"]
        assert np.allclose(found, expected, rtol=tolerance, atol=tolerance / 10), (
            f"{name}: {found}, not {expected}"
        )


def compute_padding(work: Work) -> dict[str, float]:
    """Returns the share of positions that hold no token, for each padded step."""
    lengths, responses = torch.tensor(work.lengths), work.responses.long()
    tokens, num = int(lengths.sum()), len(lengths)
    prompts = lengths - responses
    shares = {
        "padded": tokens / (num * int(lengths.max())),
        "padded by microbatch": tokens / sum(len(part) * int(part.max()) for part in lengths.split(ROWS)),
        "TRL": tokens / (num * int(prompts.max() + responses.max())),
    }
    return {name: 1 - share for name, share in shares.items()}


def measure_head(num_tokens: int, vocabulary: int, hidden: int) -> dict[str, Any]:
    """Measures log-probabilities, forward and backward: our head and `log_softmax`.

    Returns time and peak memory.
    """
    torch.manual_seed(0)
    states, weight = torch.randn(num_tokens, hidden), torch.randn(vocabulary, hidden) / math.sqrt(hidden)
    targets, upstream = torch.randint(vocabulary, (num_tokens,)), torch.randn(num_tokens)
    found: dict[str, tuple[Tensor, ...]] = {}

    def run_head(name: str) -> None:
        h, w = states.detach().requires_grad_(), weight.detach().requires_grad_()
        if name == "log_softmax":
            logprobs = F.linear(h, w).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        else:
            logprobs = chunked_logprobs(h, w, None, targets, 1.0)[0]
        found[name] = (logprobs.detach(), *torch.autograd.grad(logprobs, (h, w), upstream))

    costs = {
        name: measure_cost(partial(run_head, name), 1)._asdict()
        for name in ("log_softmax", "chunked_logprobs")
    }
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    return costs


QWEN3: dict[str, dict[str, int]] = {
    "0.6 B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "4 B": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
}


def measure_large_models(folder: Path) -> dict[str, dict[str, float]]:
    """Measures `engine.update` on a GPU: one microbatch of sequences of 2,048 tokens.

    The models are Qwen3 with random weights, in bfloat16.
    """
    found = {}
    for name, sizes in QWEN3.items():
        config = Qwen3Config(
            vocab_size=151_936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, **sizes,
            max_position_embeddings=40_960, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / name)
        engine = FsdpEngine(folder / name, dtype=Dtype.bfloat16, activation_checkpointing=name == "4 B")
        for num_tokens in (8_192, 32_768):
            num, rng = num_tokens // 2_048, np.random.default_rng(0)
            batch = make_batch(np.full(num, 512), np.full(num, 1_536), config.vocab_size, rng)
            packed, seconds = pack_rows(batch, range(num)), []
            torch.cuda.reset_peak_memory_stats()
            for _ in range(4):
                began = read_clock()
                engine.update([packed], lambda logprobs, entropy, packed: -logprobs.mean(), LR)
                seconds.append(read_clock() - began)
            rate = count_step_flops(config, [2_048] * num) / min(seconds)
            found[f"{name}, {num_tokens:,} tokens"] = {
                "tokens_per_s": num_tokens / min(seconds),
                "flops_per_s": rate,
                "mfu": rate / measure_matrix_peak(torch.device("cuda"), MATRICES),
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
        del engine
        torch.cuda.empty_cache()
    return found


# ---- reporting


def summarize_steps(work: Work, found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the figures of each step, by its least time."""
    flops, ours = count_step_flops(work.config, work.lengths), min(found["seconds"]["Trainer.train"])
    return {
        name: {
            "seconds": min(seconds),
            "tokens_per_s": sum(work.lengths) / min(seconds),
            "beside_ours": min(seconds) / ours,
            "mfu": flops / min(seconds) / found["peak"],
        }
        for name, seconds in found["seconds"].items()
    }


def print_report(work: Work, found: dict[str, Any], where: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows, shares, results = found["steps"], found["padding"], found["results"]
    columns = ("s", "tokens/s", "time / Trainer.train", "MFU", "padding", "loss", "gradient norm")
    table = Table(Column("one step", no_wrap=True), *columns, title=where, title_justify="left")
    for name, row in rows.items():
        loss, norm = results.get(name, (math.nan, math.nan))
        pad = shares.get(name.partition(", head")[0])
        table.add_row(
            name,
            f"{row['seconds']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['beside_ours']:.2f}",
            f"{row['mfu']:.1%}",
            "" if pad is None else f"{pad:.0%}",
            *(("", "") if name not in results else (f"{loss:.6f}", f"{norm:.6f}")),
        )
    console.print(table)
    sizes = f"{len(work.lengths)} sequences, {sum(work.lengths):,} tokens, the longest {max(work.lengths):,}"
    flops = count_step_flops(work.config, work.lengths)
    console.print(
        f"{sizes}; {flops:.3g} FLOP a step; the fastest matrix product: {found['peak'] / 1e9:,.0f} GFLOP/s"
    )
    for name in ("engine.update", "Trainer.train"):
        console.print(
            f"{name} over the bare loop: {rows[name]['seconds'] / rows['bare loop']['seconds'] - 1:+.1%}"
        )
    console.print(
        "the bare loop: " + ", ".join(f"{name} {share:.0%}" for name, share in found["shares"].items())
    )
    table = Table(
        Column(found["head_of"], no_wrap=True), "ms", "peak MiB", title="the head, forward and backward"
    )
    for name, one in found["head"].items():
        table.add_row(name, f"{one['ms']:,.0f}", f"{one['peak_mib']:,.0f}")
    console.print(table)
    if found["large"]:
        table = Table(Column("Qwen3, bfloat16", no_wrap=True), "tokens/s", "TFLOP/s", "MFU", "peak GiB")
        for name, one in found["large"].items():
            figures = (f"{one['tokens_per_s']:,.0f}", f"{one['flops_per_s'] / 1e12:.1f}", f"{one['mfu']:.1%}")
            table.add_row(name, *figures, f"{one['peak_gib']:.1f}")
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 4),
        ("hidden", 256),
        ("vocab", 8_192),
        ("sequences", 64),
        ("mean-tokens", 200),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--cv", type=float, default=1.0, help="coefficient of variation of the lengths of responses"
    )
    parser.add_argument("--budget", type=int, default=4_096, help="tokens of a packed microbatch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--repeats", type=int, default=1, help="repeats of padded steps; the others are taken twice as often"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.sequences % GROUP or options.sequences < GROUP:
        parser.error(f"--sequences must be a multiple of {GROUP}, got {options.sequences}")
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    cuda = torch.cuda.is_available()
    device = (
        torch.cuda.get_device_name()
        if cuda
        else f"CPU, threads: {options.threads}, load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as name, join_process_group(Path(name)):
        work = make_work(options, Path(name) / "model")
        found = measure_steps(work, options.repeats, not options.no_trl)
        check_results(found["results"], tolerance=5e-2 if cuda else 1e-4)
        found |= {"steps": summarize_steps(work, found), "padding": compute_padding(work)}
        say.print("the head ...")
        with torch.device(work.device):
            found |= {
                "head_of": f"{TOKENS} x {HIDDEN} to {VOCABULARY}",
                "head": measure_head(TOKENS, VOCABULARY, HIDDEN),
            }
        found["large"] = measure_large_models(Path(name)) if cuda else {}
        print_report(
            work,
            found,
            f"{device}; {options.layers} layers, hidden {options.hidden}, {options.vocab:,} words",
        )
    if options.json:
        options.json.write_text(
            json.dumps(found | {"options": vars(options) | {"json": str(options.json)}}, indent=1)
        )


if __name__ == "__main__":
    main()
