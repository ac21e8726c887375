"""The routers of a mixture in training: replay of the generator's choices, balance of the load, and the
auxiliary loss for it.

**Replay** (R3: Ma et al., 2025, arXiv 2510.11370). Rounding makes generator and learner choose different
experts for some tokens, which changes log-probabilities far more than rounding itself does. With
`learner.moe.router_replay` the learner sends each token to the experts that it was sent to when it was
sampled; the weights of these experts, and the gradient, come from the router that is trained. A token without
a record (the last of a sequence; padding) goes where the router sends it.

**Balance.** Without the loss, experts that are chosen seldom learn seldom, and are chosen more seldom still.
The loss of Switch Transformers (Fedus et al., 2021, arXiv 2101.03961) is summed over the layers l of E
experts, k of them for a token, over all T tokens of a minibatch:

    L = E Σ_l Σ_i f_li P_li    f_li = (1 / kT) Σ_t [t goes to i]    P_li = (1 / T) Σ_t p_lti

p are the router's probabilities, and their gradient trains it; the shares f are taken as given. L is 1 for
each layer where the load is even. T counts every token of the minibatch, prompts too, over all ranks and
microbatches (Qiu et al., 2025, arXiv 2501.11873, show that balance within a microbatch costs quality). So f
must be known before the first gradient, and engines run the minibatch forward once more to count it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learners.packing import Packed

SOFTMAX = ("mixtral", "qwen2_moe", "qwen3_moe")
SIGMOID = ("deepseek_v3",)
"""Families (`model_type`) by the function that turns a router's logits into probabilities."""


class _Attached(torch.autograd.Function):
    """Returns `scores` unchanged.

    Backward, it gives `loss` the gradient 1, as if the loss were added to the scores' own.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor) -> Tensor:
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), device=grad.device)


class LoadBalance:
    """Counts the load of a mixture's experts over the minibatch of one update, and attaches the loss to each
    forward pass.

    An update calls `begin_update`. Where `needs_counting`, the engine then runs the minibatch forward without
    gradient and calls `finish_counting`. Then it trains, and ends with `end_update`. Routers call
    `attach_loss` in every forward pass.
    """

    def __init__(self, config: Any, coefficient: float, scale: float = 1.0) -> None:
        """`config`: Hugging Face's. `scale`: the number that the engine divides gradients by.

        Raises ValueError for a coefficient above 0 and a model whose routers are not known.
        """
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        self._known = config.model_type in SOFTMAX + SIGMOID and bool(experts)
        if coefficient and not self._known:
            raise ValueError(
                "learner.moe.aux_loss_coefficient must be 0 unless model_type of model.path is one of "
                f"{', '.join(SOFTMAX + SIGMOID)}, got {coefficient} for {config.model_type}"
            )
        self.needs_counting = coefficient > 0
        self._coefficient, self._scale = coefficient, scale
        self._sigmoid = config.model_type in SIGMOID
        self._shape = (config.num_hidden_layers, experts or 0)
        self._top_k = getattr(config, "num_experts_per_tok", 0)
        self._watches = self._trains = False
        self.metrics: dict[str, float] = {}
        """Metrics of the last update (`docs/metrics.md`). Empty for a model without routers."""

    def begin_update(self, device: torch.device) -> None:
        """Sets the counts of the minibatch, [layers, E], to zero."""
        self._loads, self._probabilities = (
            torch.zeros(self._shape, dtype=torch.float64, device=device) for _ in "fP"
        )
        self._watches, self._trains = self._known, False

    def finish_counting(self) -> None:
        """Sums the counts over the ranks, once the whole minibatch was forwarded; from now on passes carry
        the loss. Collective."""
        self._sum_up()
        self._watches, self._trains = False, True

    def end_update(self) -> None:
        """Collective."""
        if self._watches:
            self._sum_up()
        self._watches = self._trains = False

    def _sum_up(self) -> None:
        for sums in (self._loads, self._probabilities):
            dist.all_reduce(sums)
        # Some families have dense layers too, whose counts stay zero.
        sparse = self._loads.sum(1) > 0
        tokens = self._loads[sparse].sum(1, keepdim=True) / self._top_k
        self._num_tokens = float(tokens[0]) if len(tokens) else 0.0
        self._shares = self._loads / (self._top_k * max(self._num_tokens, 1.0))
        if self._num_tokens:
            experts, even = self._shape[1], self._shares[sparse] * self._shape[1]
            loss = experts * (self._shares[sparse] * self._probabilities[sparse] / tokens).sum(1)
            self.metrics = {
                "moe/balance_loss": float(loss.mean()),
                "moe/load_max": float(even.amax(1).mean()),
                "moe/load_min": float(even.amin(1).mean()),
            }

    def attach_loss(
        self, layer: int, logits: Tensor, chosen: Tensor, scores: Tensor, valid: Tensor | None = None
    ) -> Tensor:
        """Counts where the tokens go, and returns the scores, with this pass's part of the loss attached
        while training.

        Shapes: logits [T, E], chosen [T, k] int64 or [T, E] bool, scores any, valid [T] bool (False: padding)
        -> as scores.
        """
        trains = self._trains and torch.is_grad_enabled()
        if not (self._watches or trains):
            return scores
        probabilities = logits.float().sigmoid() if self._sigmoid else logits.float().softmax(-1)
        if self._sigmoid:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        if valid is not None:
            probabilities = probabilities.where(valid[:, None], 0.0)
        summed = probabilities.sum(0)
        if self._watches:
            kept = chosen if valid is None else chosen[valid]
            load = (
                kept.sum(0) if kept.dtype is torch.bool else kept.flatten().bincount(minlength=self._shape[1])
            )
            self._loads[layer] += load.detach()
            self._probabilities[layer] += summed.detach()
        if not trains:
            return scores
        shares = self._shares[layer].to(summed.dtype)
        factor = self._coefficient * self._scale * self._shape[1] / self._num_tokens
        return _Attached.apply(scores, factor * (shares * summed).sum())


@dataclass(slots=True)
class ForwardPass:
    """Facts of the forward pass at hand that the routers need."""

    valid: Tensor | None = None
    """[T] bool: False where a token is padding; None where no token is."""
    experts: Tensor | None = None
    """[T, layers, k] int64: the experts to send the tokens to, -1 without a record; None leaves the choice to
    the routers."""

    def begin_pass(
        self, packed: Packed, padded: Packed, mine: slice, config: Any, replay: bool, device: torch.device
    ) -> None:
        """`padded`: the microbatch as the engine computes it; this rank has its tokens `mine`.

        `config`: Hugging Face's.
        """
        self.valid = self.experts = None
        if len(padded.tokens) > len(packed.tokens):
            self.valid = (torch.arange(mine.start, mine.stop) < len(packed.tokens)).to(device)
        if replay and padded.experts is not None:
            shape = (-1, config.num_hidden_layers, config.num_experts_per_tok)
            self.experts = padded.experts[mine].view(shape).to(device, torch.int64)


def check_replay(config: Any) -> None:
    """Raises ValueError for a model whose routers are not known. `config`: Hugging Face's."""
    if config.model_type not in SOFTMAX + SIGMOID:
        raise ValueError(
            "learner.moe.router_replay must be false unless model_type of model.path is one of "
            f"{', '.join(SOFTMAX + SIGMOID)}, got true for {config.model_type}"
        )


def replay_choices(config: Any, logits: Tensor, chosen: Tensor, recorded: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (weights [T, k] float32, experts [T, k]) of the experts that are used: the recorded ones, or
    else the chosen ones.

    Shapes: logits [T, E], chosen and recorded [T, k]. `config`: Hugging Face's.
    """
    used = recorded.where((recorded >= 0).all(-1, keepdim=True), chosen)
    logits = logits.float()
    scores = (logits.sigmoid() if config.model_type in SIGMOID else logits.softmax(-1)).gather(-1, used)
    # Mixtral has no such setting and always normalizes.
    if getattr(config, "norm_topk_prob", True):
        scores = scores / (scores.sum(-1, keepdim=True) + (1e-20 if config.model_type in SIGMOID else 0.0))
    return scores * getattr(config, "routed_scaling_factor", 1.0), used


def watch_routers(model: Any, balance: LoadBalance, forward_pass: ForwardPass) -> None:
    """Hooks replay and balance into every router of a Hugging Face model."""
    for number, layer in enumerate(getattr(model.base_model, "layers", ())):
        for module in layer.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(_make_hook(number, model.config, balance, forward_pass))


def _make_hook(
    layer: int, config: Any, balance: LoadBalance, forward_pass: ForwardPass
) -> Callable[..., Any]:
    def hook(
        module: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, chosen = outputs
        if forward_pass.experts is not None:
            weights, chosen = replay_choices(config, logits, chosen, forward_pass.experts[:, layer])
            scores = weights.to(scores.dtype)
        return logits, balance.attach_loss(layer, logits, chosen, scores, forward_pass.valid), chosen

    return hook
