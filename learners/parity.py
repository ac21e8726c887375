"""Parity: generators and learner must say the same of the same tokens under the same weights, or training is wrong.

Two looks, one rule. The *probe*, before the first step of each life of the learner and, in an asynchronous run, every `learner.parity_every`
steps: an engine has sampled sequences of every length up to
`generators.max_model_len` (`buffers.parity_probe`), and the learner computes them packed, as it trains. The *watch*, at every step: the batch's
fresh tokens, of which the step's own forward pass says what the learner has to say.

The rule. d is |log μ − log π| of a token, τ the tolerance. But for a few outliers, every d is at most τ, and their mean at most τ / 10.

| arithmetic | τ | what rounding was seen to do | what a defect does |
|---|---|---|---|
| float32 | 1e-3 | mean 1e-6, largest 4e-6 to 2e-5 over thousands of tokens of models of 0.1 to 100 M parameters | TF32: half of the tokens beyond 1e-4. A lost window, soft cap or scale: 2 and more |
| bfloat16 | 1 | mean 0.01, largest 0.06 on such models; logits of 16 to 32, as real ones have, lie 1/8 apart | the same |

Errors grow with the logits, so there is room for larger ones, and τ is divided by a sampling temperature below 1. Why outliers: in bfloat16
differences have heavy tails, the more so in a mixture, where rounding sends a token to other experts (so IcePop, 2025, masks tokens whose
ratio is outside 0.5 … 5). A limit on the largest d would end every long run, and a defect does not stop at a token in a hundred. Why τ / 10
for the mean: in bfloat16 that is ½ d² of 0.005 or more, well below what `algo.correction` bears (`kl_k2` in docs/metrics.md), and several
times what rounding does.
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
FEW = 3
"""Tokens that may be outliers, however few there are; and one in a hundred of them all."""
MIN_TOKENS = 100
"""The watch judges no step with fewer fresh tokens: their mean says little, and a run has many steps."""


class ParityError(ValueError):
    """Generator and learner disagree about the log-probabilities of the same tokens: training would be wrong."""


@dataclass(frozen=True, slots=True)
class Difference:
    """|log μ − log π| of the tokens compared, and where in the batch they are."""

    places: Tensor
    """[n] int64"""
    values: Tensor
    """[n] float64, largest first; what is not a number counts as infinite"""

    def metrics(self) -> dict[str, float]:
        found = {"parity/tokens": float(len(self.values))}
        if len(self.values):
            found |= {"parity/max": float(self.values[0]), "parity/mean": float(self.values.mean())}
        return found


def tolerance_of(config: Config) -> float:
    """τ: the largest difference of a token that rounding explains."""
    if config.learner.parity_tolerance is not None:
        return config.learner.parity_tolerance
    return TOLERANCE[config.model.dtype] / min(1.0, config.sampling.temperature)


def fresh_tokens(batch: Batch, version: int) -> Tensor:
    """[T] bool: sampled tokens of the sequences that this version alone has sampled. A token after one of another version was sampled
    from what that one had left in the engine's cache."""
    others = (batch.sampled & (batch.versions != version)).float()
    mixed = torch.zeros(batch.num_sequences).index_add_(0, batch.sequence, others) > 0
    return batch.sampled & ~mixed[batch.sequence]


def compare(learner: Tensor, generator: Tensor, where: Tensor) -> Difference:
    """The log-probabilities [T] of both sides where `where` [T] is true."""
    places = where.nonzero()[:, 0]
    values = (learner.double() - generator.double()).abs()[places].nan_to_num(nan=torch.inf)
    values, order = values.sort(descending=True, stable=True)
    return Difference(places[order], values)


def agrees(values: Tensor, tolerance: float, outliers: int) -> bool:
    """The rule, of differences [n], largest first: but for so many outliers, which must be finite too."""
    rest = values[outliers:]
    if not len(rest):
        return bool(values.isfinite().all())
    return bool(values[0].isfinite() and rest[0] <= tolerance and rest.mean() <= MEAN_SHARE * tolerance)


def check_parity(
    difference: Difference, learner: Tensor, batch: Batch, tolerance: float, outliers: int, what: str
) -> None:
    """Raises ParityError with the worst token when the rule is broken. `what` names the look."""
    if agrees(difference.values, tolerance, outliers):
        return
    worst, largest = int(difference.places[0]), float(difference.values[0])
    row = int(np.searchsorted(batch.offsets, worst, side="right")) - 1
    start, end = batch.offsets[row : row + 2].tolist()
    raise ParityError(
        f"log-probabilities of generator and learner must agree within {tolerance:g}, and within {MEAN_SHARE * tolerance:g} on average, "
        f"but for {outliers} tokens of {len(difference.values)} (learner.parity_tolerance; docs/learner.md), got differences of up to "
        f"{largest:.3g}, {float(difference.values.mean()):.3g} on average, in {what}: token {worst - start} of {end - start} of a sequence "
        f"of group {int(batch.groups[row])}"
        + (f" by {batch.generators[row]}" if batch.generators else "")
        + f", id {int(batch.tokens[worst])}, has {float(batch.behavior_logprobs[worst]):.6f} from the generator and "
        f"{float(learner[worst]):.6f} from the learner"
    )


def check_probe(
    probe: Batch, learner: Tensor, config: Config, version: int, *, again: bool = False
) -> dict[str, float]:
    """The probe's figures. `learner` [T]: its log-probabilities of the probe's tokens. Raises ParityError.

    `again`: the probe is not the first of this life of the learner. In the first one, in float32, no token may be an outlier: there are
    few of them. A long run has many probes, and in a mixture the tie of two experts can make a token another's.
    """
    difference = compare(learner, probe.behavior_logprobs, probe.sampled)
    outliers = 0 if config.model.dtype is Dtype.float32 and not again else FEW
    check_parity(
        difference, learner, probe, tolerance_of(config), outliers, f"the parity probe of version {version}"
    )
    found, longest = difference.metrics(), int(np.diff(probe.offsets).max())
    log.info(
        "parity probe of version %d: %d tokens in sequences of up to %d, largest difference %.2e, mean %.2e",
        version, found["parity/tokens"], longest, found["parity/max"], found["parity/mean"],
    )  # fmt: skip
    return {"parity/probe_max": found["parity/max"], "parity/probe_mean": found["parity/mean"]}


class ParityWatch:
    """The watch over a life of the learner. What it finds in the same tensors is the same on every rank."""

    def __init__(self, config: Config) -> None:
        self._tolerance = tolerance_of(config)
        self._judges = not config.sampling.is_truncated
        """The log-probabilities of a truncated distribution are others, by what was cut off."""
        self.published_at = 0.0
        """Unix time in seconds, on the first rank, from which on engines could hold the version held. A version of the same number that
        an earlier life has published need not be the same to the last bit; nor need a replay's."""

    def see(
        self, batch: Batch, learner: Tensor, known: Tensor, version: int, since: float
    ) -> dict[str, float]:
        """The step's figures. `learner` [T]: log-probabilities under the version held, where `known` [T]; `since`: the first rank's
        `published_at`. Raises ParityError."""
        if batch.started_at is None:
            return {"parity/tokens": 0.0}
        fresh = fresh_tokens(batch, version) & known & (batch.started_at >= since)[batch.sequence]
        difference = compare(learner, batch.behavior_logprobs, fresh)
        number = len(difference.values)
        if self._judges and (number >= MIN_TOKENS or not difference.values.isfinite().all()):
            outliers = FEW + number // 100
            check_parity(
                difference, learner, batch, self._tolerance, outliers, f"the batch of step {version}"
            )
        return difference.metrics()
