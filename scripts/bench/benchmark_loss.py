"""Measures what the loss side of a step costs, for every preset, beside a log-softmax over a vocabulary.

    scripts/benchmark_loss.sh [--tokens 65536] [--repeat 5] [--threads 1] [--json FILE]

The step has 64 sequences of lognormal lengths, in groups of 8, all in one microbatch. An eighth of each
sequence is its prompt. All columns are random float32. The log-softmax has as many tokens. Times are medians
after a round that is left out. With one thread they are the processor's time, so other programs count for
little; otherwise they are the clock's.

    policy loss     `algos.loss.policy_loss`, forward and backward, its metrics included
    its metrics     the part of that which `algos.metrics.sum_policy_metrics` takes
    advantages      the estimator that `algo.advantage` names and, with a critic, the critic's targets
    other           aggregation weights; off-policy weights of a whole minibatch, where an algorithm
                    needs them; the losses of critic and implicit reward model, forward and backward
    log-softmax     32,768 words, 4,096 tokens at a time (always the same ones: all would be 8 GiB),
                    forward, and with the backward pass of a gradient that is given

Memory is the most that a part, its arguments left out, has allocated and not given back at any moment of the
first round. On a CPU torch's profiler counts it, which records each allocation; on a GPU
`torch.cuda.max_memory_allocated` does.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from algos.advantages import ADVANTAGES, AdvantageInputs, compute_value_targets
from algos.aggregation import compute_aggregation_weights
from algos.inputs import LossInputs, Tokens
from algos.loss import policy_loss
from algos.metrics import sum_policy_metrics
from algos.objective import compute_off_policy_weights, make_loss_inputs
from algos.rewards import charge_kl
from algos.values import implicit_reward_loss, value_loss
from configs.advantages import Advantage, GaeConfig, Span
from configs.algo import Aggregation, AlgoConfig
from configs.load import FOLDER, load_config
from slipstream_bench.measured_cost import MeasuredCost, measure_cost

NUM_SEQUENCES, GROUP, HORIZON = 64, 8, 8_192
VOCABULARY, CHUNK = 32_768, 4_096
Actions = dict[str, Callable[[], Any]]
say = Console(stderr=True)


class RandomStep:
    """Random columns [T] of a step, as `learners.step` hands them to the loss side."""

    def __init__(self, num_tokens: int) -> None:
        torch.manual_seed(0)
        shares = torch.randn(NUM_SEQUENCES).exp()
        ends = (shares.cumsum(0) / shares.sum() * (num_tokens - 2 * NUM_SEQUENCES)).round().long()
        # Each sequence has at least two tokens: one of the prompt and one of the response.
        ends += 2 * torch.arange(1, NUM_SEQUENCES + 1)
        offsets = torch.cat([ends.new_zeros(1), ends])
        sequence = torch.repeat_interleave(torch.arange(NUM_SEQUENCES), offsets.diff())
        mask = torch.arange(num_tokens) >= (offsets[:-1] + (offsets.diff() // 8).clamp(min=1))[sequence]
        logprobs = torch.rand(num_tokens).clamp(min=0.01).log()
        self.proximal_logprobs, self.behavior_logprobs, self.reference_logprobs = (
            logprobs + spread * torch.randn(num_tokens) for spread in (0.01, 0.1, 0.3)
        )
        self.entropy, self.staleness = torch.rand(num_tokens), torch.randint(0, 9, (num_tokens,))
        self.logprobs, self.values = logprobs.requires_grad_(), torch.randn(num_tokens).requires_grad_()
        rewards = torch.randint(0, 2, (NUM_SEQUENCES,)).float()
        self.samples = AdvantageInputs(
            rewards=rewards,
            token_rewards=charge_kl(rewards, torch.zeros(num_tokens), 0.0, mask, ends - 1),
            groups=torch.arange(NUM_SEQUENCES) // GROUP,
            offsets=offsets,
            sequence=sequence,
            sampled=mask,
            mask=mask,
            greedy_rewards=torch.rand(NUM_SEQUENCES),
            values=self.values.detach(),
            log_ratio=self.proximal_logprobs - self.behavior_logprobs,
            process_rewards=0.05 * torch.randn(num_tokens),
        )

    def list_choices(self) -> Actions:
        """Returns an action for every advantage and every aggregation that presets choose from."""
        algos = {str(name): replace(AlgoConfig(), advantage=name) for name in Advantage}
        algos["gae, span=turn"] = replace(algos["gae"], gae=GaeConfig(span=Span.turn))
        found: Actions = {
            f"advantage={name}": partial(self.compute_advantages, algo) for name, algo in algos.items()
        }
        return found | {f"aggregation={kind}": partial(self.weigh_tokens, kind) for kind in Aggregation}

    def list_parts(self, algo: AlgoConfig) -> Actions:
        """Returns an action for each part of the loss side that a preset computes in a step."""
        s, advantages = self.samples, self.compute_advantages(algo)
        aggregation_weights = self.weigh_tokens(algo.aggregation)
        off_policy_weights = self.weigh_off_policy(algo, advantages)
        tokens = Tokens(
            logprobs=self.logprobs.detach(),
            proximal_logprobs=self.proximal_logprobs,
            behavior_logprobs=self.behavior_logprobs,
            advantages=advantages,
            mask=s.mask,
            sequence=s.sequence,
        )
        make_inputs = partial(self._make_inputs, algo, advantages, aggregation_weights, off_policy_weights)

        def backpropagate_loss() -> None:
            torch.autograd.grad(policy_loss(make_inputs())[0], self.logprobs)

        inputs = make_inputs()

        @torch.no_grad()
        def compute_metrics() -> None:
            zeros = torch.zeros_like(self.entropy)
            sum_policy_metrics(inputs, tokens, off_policy_weights, self.entropy, zeros)

        found: Actions = {
            "policy loss": backpropagate_loss,
            "its metrics": compute_metrics,
            "advantages": partial(self.compute_advantages, algo),
        }
        found["aggregation weights"] = partial(self.weigh_tokens, algo.aggregation)
        if algo.needs_whole_minibatch:
            found["off-policy weights"] = partial(self.weigh_off_policy, algo, advantages)
        if algo.needs_critic:
            targets = compute_value_targets(s, algo)
            found |= {
                "targets": partial(compute_value_targets, s, algo),
                "critic": partial(self.backpropagate_critic, targets, aggregation_weights),
            }
        if algo.advantage.needs_reward_model:
            found["reward model"] = self.backpropagate_reward_model
        return found

    def _make_inputs(
        self, algo: AlgoConfig, advantages: Tensor, aggregation_weights: Tensor, off_policy_weights: Tensor
    ) -> LossInputs:
        return make_loss_inputs(
            algo,
            logprobs=self.logprobs,
            proximal_logprobs=self.proximal_logprobs,
            behavior_logprobs=self.behavior_logprobs,
            advantages=advantages,
            mask=self.samples.mask,
            sequence=self.samples.sequence,
            entropy=self.entropy,
            aggregation_weights=aggregation_weights,
            staleness=self.staleness,
            off_policy_weights=off_policy_weights if algo.needs_whole_minibatch else None,
            reference_logprobs=self.reference_logprobs if algo.needs_reference else None,
            imitation_weights=aggregation_weights if algo.imitation_coef else None,
        )

    def compute_advantages(self, algo: AlgoConfig) -> Tensor:
        return ADVANTAGES[algo.advantage](self.samples, algo)

    def weigh_tokens(self, kind: Aggregation) -> Tensor:
        return compute_aggregation_weights(
            kind, self.samples.mask, self.samples.sequence, NUM_SEQUENCES, HORIZON
        )

    def weigh_off_policy(self, algo: AlgoConfig, advantages: Tensor) -> Tensor:
        s = self.samples
        return compute_off_policy_weights(
            algo, self.proximal_logprobs - self.behavior_logprobs, advantages, s.mask, s.sequence
        )

    def backpropagate_critic(self, targets: Tensor, aggregation_weights: Tensor) -> None:
        loss, _ = value_loss(
            self.values, self.values.detach(), targets, self.samples.mask, aggregation_weights, clip=0.2
        )
        torch.autograd.grad(loss, self.values)

    def backpropagate_reward_model(self) -> None:
        s, outcomes = self.samples, self.samples.rewards[self.samples.sequence]
        loss, _ = implicit_reward_loss(
            self.logprobs, self.reference_logprobs, outcomes, s.sampled, s.sequence, NUM_SEQUENCES, beta=0.05
        )
        torch.autograd.grad(loss, self.logprobs)


def make_log_softmax_actions(num_tokens: int) -> Actions:
    logits, gradient = torch.randn(CHUNK, VOCABULARY, requires_grad=True), torch.ones(CHUNK, VOCABULARY)
    chunks = [min(CHUNK, num_tokens - begin) for begin in range(0, num_tokens, CHUNK)]

    @torch.no_grad()
    def run_forward() -> None:
        for size in chunks:
            F.log_softmax(logits[:size], -1)

    def run_forward_and_backward() -> None:
        for size in chunks:
            chunk = logits[:size]
            torch.autograd.grad(F.log_softmax(chunk, -1), chunk, gradient[:size])

    return {"log-softmax": run_forward, "log-softmax and backward": run_forward_and_backward}


def print_report(found: dict[str, dict[str, MeasuredCost]], where: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    presets, yardstick = dict(found), found["log-softmax"]
    words = f"log-softmax: float32, {VOCABULARY:,} words, {CHUNK:,} tokens at a time, always the same ones"
    table = Table(where, "ms", "peak MiB", caption=words, caption_justify="left")
    for name in ("choices", "log-softmax"):
        for part, one in presets.pop(name).items():
            table.add_row(part, f"{one.ms:,.2f}", f"{one.peak_mib:,.1f}")
    console.print(table)
    kinds = ("policy loss", "its metrics", "advantages", "other", "all")
    columns = (*kinds, "peak MiB", *(f"all / {name}" for name in yardstick))
    table = Table(Column("algo=", no_wrap=True), *columns, title="milliseconds", title_justify="left")
    for name, parts in presets.items():
        ms = {part: one.ms for part, one in parts.items()}
        inner, advantages = ms.pop("its metrics"), ms["advantages"] + ms.get("targets", 0.0)
        whole, peak = sum(ms.values()), max(one.peak_mib for one in parts.values())
        cells = (ms["policy loss"], inner, advantages, whole - ms["policy loss"] - advantages, whole, peak)
        table.add_row(
            name, *(f"{c:,.1f}" for c in cells), *(f"{whole / one.ms:.2%}" for one in yardstick.values())
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.tokens < 2 * NUM_SEQUENCES:
        parser.error(f"--tokens must be at least {2 * NUM_SEQUENCES}, got {options.tokens}")
    torch.set_num_threads(options.threads)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.set_default_device("cuda")
    step = RandomStep(options.tokens)
    measured = {"log-softmax": make_log_softmax_actions(options.tokens), "choices": step.list_choices()}
    names = sorted(path.stem for path in (FOLDER / "algo").glob("*.yaml"))
    measured |= {name: step.list_parts(load_config([f"algo={name}"]).algo) for name in names}
    found: dict[str, dict[str, MeasuredCost]] = {}
    for name, actions in measured.items():
        say.print(f"{name} ...")
        found[name] = {part: measure_cost(action, options.repeat) for part, action in actions.items()}
    device = (
        torch.cuda.get_device_name()
        if cuda
        else f"CPU, threads: {options.threads}, load {os.getloadavg()[0]:.1f}"
    )
    print_report(found, f"{options.tokens:,} tokens, {device}")
    if options.json:
        named = {name: {part: one._asdict() for part, one in parts.items()} for name, parts in found.items()}
        options.json.write_text(json.dumps(named, indent=1))


if __name__ == "__main__":
    main()
