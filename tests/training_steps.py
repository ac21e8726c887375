"""Batches that look like a generator's, and steps trained on them, for tests of whole training steps."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from buffers.trajectory import GREEDY, Trajectory, to_batch
from configs.load import load_config
from configs.schema import Config
from learners.engine import Engine
from learners.fsdp import FsdpEngine
from learners.models import Models
from learners.packing import Batch, batch_from_arrow

STEP = 12
"""Version of the step that is trained: one after VAPO's pre-training."""


GROUPS, SAMPLES, LONGEST = 6, 4, 12


GROUP_WEIGHTS = [0.5, 1.5, 1.0, 0.8, 1.2, 0.7]
"""Weights of the groups, as a sampler may give them."""


StepOutcome = tuple[dict[str, float], int, dict[str, dict[str, Tensor]]]
"""Metrics, number of tokens within `max_versions`, and by name the state of each model that is trained."""


def draw_log_ratios(rng: np.random.Generator, length: int, apart: bool) -> np.ndarray:
    """Returns log π / μ of a response's tokens: 0.03 to 0.15 either way, and 0.3 for the first if it is
    `apart`."""
    found = rng.uniform(0.03, 0.15, length) * rng.choice([-1, 1], length)
    return np.concatenate([[0.3], found[1:]]) if apart else found


def draw_responses(folder: Path, step: int = STEP) -> list[Trajectory]:
    """Returns six groups of four responses, of staleness 0 to 2.

    Tokens and ratios are drawn here, so that they are the same on every machine. The log-probabilities are
    the model's, less those ratios. The last response of a group, which is never cut off, is `apart`.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    rng, rows = np.random.default_rng(0), []
    for group in range(GROUPS):
        prompt, greedy = rng.integers(3, 300, rng.integers(3, 9)).tolist(), float(rng.integers(2))
        for sample in range(SAMPLES):
            length = LONGEST if sample == group % 3 else int(rng.integers(1, LONGEST))
            tokens = [*prompt, *rng.integers(3, 300, length).tolist()]
            with torch.no_grad():
                scores = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            logprobs = scores.gather(-1, torch.tensor(tokens)[len(prompt) :, None])[:, 0].numpy()
            behavior = logprobs - draw_log_ratios(rng, length, apart=sample == SAMPLES - 1)
            assert (behavior < 0).all(), "a log-probability that is cut at 0 has another ratio"
            versions = (step - np.sort(rng.integers(0, 3, length))[::-1]).clip(0)
            rows.append(
                Trajectory(
                    group=group,
                    sample=sample,
                    due=step,
                    prompt_id=group,
                    task="t",
                    generator="g",
                    started_at=0.0,
                    finished_at=1.0,
                    tokens=tokens,
                    sampled=[False] * len(prompt) + [True] * length,
                    logprobs=[0.0] * len(prompt) + behavior.tolist(),
                    versions=[-1] * len(prompt) + versions.tolist(),
                    reward=float(group == 1 or rng.integers(2)),
                    rewards={GREEDY: greedy},
                    finish_reason="length" if length == LONGEST else "stop",
                )
            )
    return rows


def make_step_batch(rows: list[Trajectory], weights: list[float] | None = None) -> Batch:
    return batch_from_arrow(pa.Table.from_batches([to_batch(rows)]), weights or [1.0] * GROUPS)


@cache
def configure_step(model: Path, *overrides: str) -> Config:
    """Returns the configuration of a step. Gradients are not clipped, so that their scale shows."""
    return load_config(
        [
            f"model.path={model}",
            f"learner.groups_per_step={GROUPS}",
            f"learner.samples_per_prompt={SAMPLES}",
            f"sampling.max_tokens={LONGEST}",
            "learner.lr=1e-4",
            "learner.warmup_steps=0",
            "learner.lr_end=1",
            "learner.max_grad_norm=1e6",
            "algo=grpo",
            "learner.minibatches=1",
            *overrides,
        ]
    )


def change_learner(config: Config, **learner: int) -> Config:
    return replace(config, learner=replace(config.learner, **learner))


def copy_state(engine: Engine) -> dict[str, Tensor]:
    """Returns this rank's part of the weights and of AdamW's first moment, by name."""
    assert isinstance(engine, FsdpEngine)
    return {
        name: value.to_local().clone()
        for name, value in engine._collect_state().items()
        if name.startswith(("model.", "exp_avg.")) and isinstance(value, DTensor)
    }


def assert_same(found: StepOutcome, expected: StepOutcome) -> None:
    """Asserts gradients within 2e-5 of the largest; weights within 1e-6, a hundredth of a step; metrics
    within 2e-4.

    AdamW's first step is all but the sign of the gradient: it hides its size, and where that is zero but for
    rounding it may go either way. So its first moment is compared as well, which after one update is the
    gradient times 1 − β, and weights where that is above a thousandth of the largest. After two updates one
    of the two gradients may still have been rounding: so may one weight in a thousand be up to two whole
    steps apart.
    """
    assert found[0] == pytest.approx(expected[0], rel=2e-4, abs=2e-6) and found[1] == expected[1]
    for model, state in expected[2].items():
        other = found[2][model]
        moments = {
            name.removeprefix("exp_avg."): value
            for name, value in state.items()
            if name.startswith("exp_avg.")
        }
        largest = max(float(value.abs().max()) for value in moments.values())
        assert largest > 0
        apart = []
        for name, value in moments.items():
            torch.testing.assert_close(other[f"exp_avg.{name}"], value, atol=2e-5 * largest, rtol=0)
            clear = value.abs() > 1e-3 * largest
            apart.append((other[f"model.{name}"] - state[f"model.{name}"])[clear].abs())
        weights_apart = torch.cat(apart)
        assert (weights_apart <= 1e-6).float().mean() >= 0.999 and weights_apart.max() <= 4e-4


def assert_equal(found: StepOutcome, expected: StepOutcome) -> None:
    """Asserts that all states are equal to the bit."""
    for model, state in expected[2].items():
        assert [name for name, value in state.items() if not torch.equal(value, found[2][model][name])] == []


def copy_states(models: Models) -> dict[tuple[str, str], Tensor]:
    """Returns the state of every trained model, optimizers included."""
    engines = models.trained_engines.items()
    return {
        (model, key): value.clone() for model, engine in engines for key, value in copy_state(engine).items()
    }
