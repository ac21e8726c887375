"""Parity: generators and learner must compute the same log-probabilities from the same tokens and weights.

Where they do not, training is wrong. There are two looks and one rule.

- The *probe* comes before the first step of each life of the learner, and in an asynchronous run every
  `learner.parity_every` steps. An engine samples sequences of every length up to `generators.max_model_len`
  (`buffers.parity_probe`), and the learner computes them packed, as it trains.
- The *watch* comes at every step. It compares the batch's fresh tokens with the step's own forward pass.

The rule: d = |log μ − log π| of a token, τ the tolerance. Without a few outliers, every d is at most τ, and
the mean of d is at most τ / 10.

| arithmetic | τ | rounding | defects |
|---|---|---|---|
| float32 | 1e-3 | mean 1e-6, largest 4e-6 to 2e-5 | TF32: half of all d beyond 1e-4; others: 2 and more |
| bfloat16 | 1 | mean 0.01, largest 0.06 | the same |

The numbers come from thousands of tokens of models of 0.1 to 100 M parameters. Other defects are a
lost window, soft cap or scale. In bfloat16, logits of 16 to 32, as real models have, lie 1/8 apart.

Errors grow with the logits, so there is room for larger ones, and τ is divided by a sampling temperature
below 1.

Why outliers: in bfloat16 differences have heavy tails, and heavier ones in a mixture, where rounding sends a
token to other experts. For the same reason IcePop (2025) masks tokens whose ratio is outside 0.5 … 5. A limit
on the largest d would end every long run; a defect does not stop at one token in a hundred.

Why τ / 10 for the mean: in bfloat16 that is ½ d² of 0.005 or more. It is well below what `algo.correction`
bears (`kl_k2` in docs/metrics.md), and several times what rounding does.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.model import Dtype
from configs.schema import Config
from learners.packing import Batch

log = logging.getLogger("slipstream.learner")

TOLERANCE = {Dtype.float32: 1e-3, Dtype.bfloat16: 1.0}
MEAN_SHARE = 0.1
NUM_OUTLIERS = 3
"""Tokens that may be outliers, however few are compared. The watch allows one in a hundred besides."""
MIN_TOKENS = 100
"""Fewest fresh tokens of a step that the watch judges: the mean of fewer says little, and a run has many
steps."""


class ParityError(ValueError):
    """Generator and learner disagree about the log-probabilities of the same tokens, so training would be
    wrong."""


@dataclass(frozen=True, slots=True)
class Differences:
    """|log μ − log π| of n compared tokens, and their places in the batch."""

    places: Tensor
    """[n] int64: index of each token in the batch"""
    values: Tensor
    """[n] float64, largest first; NaN counts as infinite"""

    def metrics(self) -> dict[str, float]:
        """Returns the figures: number of tokens, and largest and mean difference where there is a token."""
        metrics = {"parity/tokens": float(len(self.values))}
        if len(self.values):
            metrics |= {"parity/max": float(self.values[0]), "parity/mean": float(self.values.mean())}
        return metrics


def find_tolerance(config: Config) -> float:
    """Returns τ, the largest difference of a token that rounding explains."""
    if config.learner.parity_tolerance is not None:
        return config.learner.parity_tolerance
    return TOLERANCE[config.model.dtype] / min(1.0, config.sampling.temperature)


def find_fresh_tokens(batch: Batch, version: int) -> Tensor:
    """Returns [T] bool: the sampled tokens of the branches that only this version sampled.

    A token after one of another version does not count: it was sampled from that version's entries in the
    engine's cache.
    """
    others = (batch.sampled & (batch.versions != version)).float()
    branch = batch.branch
    mixed = torch.zeros(batch.num_branches).index_add_(0, branch, others) > 0
    return batch.sampled & ~mixed[branch]


def compare_logprobs(learner_logprobs: Tensor, behavior_logprobs: Tensor, where: Tensor) -> Differences:
    """Compares the log-probabilities [T] of learner and generator where `where` [T] is true."""
    places = where.nonzero()[:, 0]
    values = (learner_logprobs.double() - behavior_logprobs.double()).abs()[places].nan_to_num(nan=torch.inf)
    values, order = values.sort(descending=True, stable=True)
    return Differences(places[order], values)


def is_within_tolerance(values: Tensor, tolerance: float, num_outliers: int) -> bool:
    """True where differences [n], largest first, keep the rule without the `num_outliers` largest, which
    must be finite."""
    rest = values[num_outliers:]
    if not len(rest):
        return bool(values.isfinite().all())
    return bool(values[0].isfinite() and rest[0] <= tolerance and rest.mean() <= MEAN_SHARE * tolerance)


def check_parity(
    differences: Differences,
    learner_logprobs: Tensor,
    batch: Batch,
    tolerance: float,
    num_outliers: int,
    source: str,
) -> None:
    """Raises ParityError, which names the worst token, when the rule is broken. `source` names the look in
    the message."""
    if is_within_tolerance(differences.values, tolerance, num_outliers):
        return
    worst, largest = int(differences.places[0]), float(differences.values[0])
    row, branch = (
        int(np.searchsorted(offsets, worst, side="right")) - 1
        for offsets in (batch.offsets, batch.branch_offsets)
    )
    start, end = batch.branch_offsets[branch : branch + 2].tolist()
    raise ParityError(
        f"log-probabilities of generator and learner must agree within {tolerance:g}, and within "
        f"{MEAN_SHARE * tolerance:g} on average, but for {num_outliers} tokens of {len(differences.values)} "
        f"(learner.parity_tolerance; docs/learner.md), got differences of up to {largest:.3g}, "
        f"{float(differences.values.mean()):.3g} on average, in {source}: token {worst - start} of "
        f"{end - start} of a sequence of group {int(batch.groups[row])}"
        + (f" by {batch.generators[row]}" if batch.generators else "")
        + f", id {int(batch.tokens[worst])}, has {float(batch.behavior_logprobs[worst]):.6f} from the "
        f"generator and {float(learner_logprobs[worst]):.6f} from the learner"
    )


def check_probe(
    probe: Batch, learner_logprobs: Tensor, config: Config, version: int, *, again: bool = False
) -> dict[str, float]:
    """Returns the figures of a probe, whose tokens have the `learner_logprobs` [T] of the learner. Raises
    ParityError.

    `again` is false for the first probe of this life of the learner. In that one, in float32, no token may be
    an outlier, because it has few tokens. A long run has many probes, and in a mixture a tie of two experts
    may send one token to another expert.
    """
    differences = compare_logprobs(learner_logprobs, probe.behavior_logprobs, probe.sampled)
    num_outliers = 0 if config.model.dtype is Dtype.float32 and not again else NUM_OUTLIERS
    source = f"the parity probe of version {version}"
    check_parity(differences, learner_logprobs, probe, find_tolerance(config), num_outliers, source)
    metrics, longest = differences.metrics(), int(np.diff(probe.branch_offsets).max())
    log.info(
        "parity probe of version %d: %d tokens in sequences of up to %d, largest difference %.2e, mean %.2e",
        version,
        metrics["parity/tokens"],
        longest,
        metrics["parity/max"],
        metrics["parity/mean"],
    )
    return {"parity/probe_max": metrics["parity/max"], "parity/probe_mean": metrics["parity/mean"]}


class ParityWatch:
    """The watch over a life of the learner. It finds the same on every rank, because every rank has the
    same tensors."""

    def __init__(self, config: Config) -> None:
        self._tolerance = find_tolerance(config)
        # The log-probabilities of a truncated distribution differ from the learner's by the part that was cut
        # off.
        self._judges = not config.sampling.is_truncated
        self.published_at = 0.0
        """Unix time in seconds, on the first rank, from which on engines could hold the version held.

        A version of the same number that an earlier life published need not be the same to the last bit, and
        neither need a replay's.
        """

    def check_step(
        self, batch: Batch, learner_logprobs: Tensor, known: Tensor, version: int, since: float
    ) -> dict[str, float]:
        """Returns the step's figures. Raises ParityError.

        `learner_logprobs` [T] are those under the version held, and mean something where `known` [T] is true.
        `since` is the first rank's `published_at`.
        """
        if batch.started_at is None:
            return {"parity/tokens": 0.0}
        is_recent = (batch.started_at >= since)[batch.sequence]
        fresh = find_fresh_tokens(batch, version) & known & is_recent
        differences = compare_logprobs(learner_logprobs, batch.behavior_logprobs, fresh)
        num_tokens = len(differences.values)
        if self._judges and (num_tokens >= MIN_TOKENS or not differences.values.isfinite().all()):
            num_outliers, source = NUM_OUTLIERS + num_tokens // 100, f"the batch of step {version}"
            check_parity(differences, learner_logprobs, batch, self._tolerance, num_outliers, source)
        return differences.metrics()
