"""The figures of an evaluation: the mean reward and pass@k over its prompts, with bootstrap intervals."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

NUM_RESAMPLES = 2000
CHUNK = 1 << 20
"""Numbers that are drawn at once."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSamples:
    """The scored samples of one prompt."""

    rewards: Sequence[float]
    """[n] at least one; samples that failed are left out. They count as float32, which rows on disk have."""
    num_tokens: int
    """Sampled tokens of all n together."""
    num_truncated: int = 0
    """Samples that ended because they had no tokens left."""
    versions: tuple[int, int] | None = None
    """Oldest and newest version that sampled a token; None where nothing was sampled."""

    @property
    def mean_reward(self) -> float:
        return math.fsum(self._scores) / len(self.rewards)

    def count_passes(self, passes_at: float) -> int:
        return int((self._scores >= np.float32(passes_at)).sum())

    @property
    def _scores(self) -> np.ndarray:
        return np.asarray(self.rewards, np.float32)


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one evaluation set at one version."""

    evaluation_set: str = msgspec.field(name="set")
    version: int
    """Version that was asked for; -1 where the weights have none."""
    digest: str
    """Digest of the weights that were asked for."""
    prompts: int
    """Prompts with at least one scored sample. The figures are means over these."""
    samples: int
    """Their scored samples, all prompts together."""
    failed: int
    """Prompts without any. They count nowhere else."""
    avg: float | None = None
    """Mean over prompts of the mean reward of a prompt's samples. Where rewards are 0 or 1, this is avg@n."""
    avg_ci95: Interval | None = None
    """None for fewer than two prompts, like each interval."""
    passes: dict[str, float] = msgspec.field(name="pass", default_factory=dict)
    """By k: the chance that one of k samples passes, over the prompts that have at least k."""
    pass_ci95: dict[str, Interval] = {}
    pass_left_out: dict[str, int] = {}
    """By k: prompts with fewer than k samples, where there are any."""
    tokens: float | None = None
    """Mean number of sampled tokens of a sample."""
    truncated: float | None = None
    """Share of the samples that ended because they had no tokens left."""
    versions: tuple[int, int] | None = None
    """Oldest and newest version that sampled a token."""


def summarize_samples(
    evaluation_set: str,
    prompts: Sequence[PromptSamples],
    *,
    num_failed: int,
    k: Sequence[int],
    passes_at: float = 1.0,
    version: int = -1,
    digest: str = "",
) -> EvaluationResult:
    """Returns the figures of a set. The order of prompts, and of a prompt's samples, changes nothing.

    `k`: the numbers of pass@k, each at least 1. A sample passes with a reward of at least `passes_at`.
    """
    assert all(prompt.rewards for prompt in prompts), "a prompt without scored samples counts as failed"
    num_samples = np.array([len(prompt.rewards) for prompt in prompts], dtype=np.int64)
    num_passed = np.array([prompt.count_passes(passes_at) for prompt in prompts], dtype=np.int64)
    means = np.array([prompt.mean_reward for prompt in prompts])
    chances = {number: estimate_pass(num_samples, num_passed, number) for number in sorted(set(k))}
    known = {number: values[~np.isnan(values)] for number, values in chances.items()}
    intervals = {number: bootstrap_interval(values) for number, values in known.items()}
    total = int(num_samples.sum())
    spans = [prompt.versions for prompt in prompts if prompt.versions is not None]
    return EvaluationResult(
        evaluation_set=evaluation_set,
        version=version,
        digest=digest,
        prompts=len(prompts),
        samples=total,
        failed=num_failed,
        avg=find_mean(means) if len(means) else None,
        avg_ci95=bootstrap_interval(means),
        passes={str(number): find_mean(values) for number, values in known.items() if len(values)},
        pass_ci95={str(number): found for number, found in intervals.items() if found is not None},
        pass_left_out={
            str(number): len(prompts) - len(values)
            for number, values in known.items()
            if len(values) < len(prompts)
        },
        tokens=sum(prompt.num_tokens for prompt in prompts) / total if total else None,
        truncated=sum(prompt.num_truncated for prompt in prompts) / total if total else None,
        versions=(min(old for old, _ in spans), max(new for _, new in spans)) if spans else None,
    )


def estimate_pass(num_samples: np.ndarray, num_passed: np.ndarray, k: int) -> np.ndarray:
    """Returns pass@k of each prompt, without bias; NaN where a prompt has fewer than k samples.

    Chen et al., 2021, arXiv 2107.03374:  1 − C(n − c, k) / C(n, k), for c of n samples that pass. The ratio
    is the product of (n − c − j) / (n − j) over j = 0 .. k − 1, so no large number appears.

    Shapes: all [prompts].
    """
    assert k >= 1, "pass@k needs at least one sample"
    misses = np.ones(len(num_samples))
    left, failing = num_samples.astype(np.float64), (num_samples - num_passed).astype(np.float64)
    for j in range(k):
        misses *= np.maximum(failing - j, 0.0) / np.maximum(left - j, 1.0)
    return np.where(num_samples >= k, 1.0 - misses, np.nan)


def bootstrap_interval(values: np.ndarray, num_resamples: int = NUM_RESAMPLES) -> Interval | None:
    """Returns the 95 % percentile interval of the mean of one value per prompt; None for fewer than two.

    Efron and Tibshirani, 1993, chapter 13: prompts are drawn again with replacement. The generator's seed is
    a digest of the values in order of size: the same values give the same interval on every machine. Values
    that are all the same give an interval without width.
    """
    if len(values) < 2:
        return None
    values = np.sort(np.asarray(values, dtype=np.float64)) + 0.0  # -0.0 has other bytes than 0.0
    seed = int.from_bytes(hashlib.sha256(values.astype("<f8").tobytes()).digest()[:8], "little")
    random = np.random.Generator(np.random.PCG64(seed))
    means = _resample_means(values, num_resamples, random)
    low, high = np.quantile(means, [0.025, 0.975])
    return _round_sum(low), _round_sum(high)


def compare_means(first: np.ndarray, second: np.ndarray) -> tuple[float, Interval | None]:
    """Returns how much higher the mean of `second` is, and the interval of that.

    Both: [prompts], one value for each prompt, in the same order. The differences of the prompts are drawn
    again, so what makes a prompt hard for both cancels.
    """
    assert len(first) == len(second) > 0, "both need the same prompts"
    differences = np.asarray(second, dtype=np.float64) - first
    return find_mean(differences), bootstrap_interval(differences)


def _resample_means(values: np.ndarray, num_resamples: int, random: np.random.Generator) -> np.ndarray:
    """Returns the means of `num_resamples` resamples."""
    size = len(values)
    distinct, counts = np.unique(values, return_counts=True)
    # With few distinct values, as for rewards of 0 and 1, how often each is drawn says all.
    if len(distinct) * 16 < size:
        return random.multinomial(size, counts / size, size=num_resamples) @ distinct / size
    rows = max(1, CHUNK // size)
    chunks = [min(rows, num_resamples - begin) for begin in range(0, num_resamples, rows)]
    drawn = (random.integers(size, size=(chunk, size), dtype=np.int32) for chunk in chunks)
    return np.concatenate([values[indices].mean(axis=1) for indices in drawn])


def find_mean(values: np.ndarray) -> float:
    return math.fsum(values) / len(values)


def _round_sum(value: float) -> float:
    """Rounds off the last digits, which depend on the order in which a processor adds."""
    return float(f"{value:.12g}")
