"""The routers of a mixture in training: replay of the generator's choices, balance of the load, and the auxiliary loss for it.

**Replay** (R3: Ma et al., 2025, arXiv 2510.11370). Rounding makes generator and learner choose other experts for some tokens, which changes
log-probabilities far more than rounding does. With `learner.moe.router_replay` the learner sends each token to the experts that it was
sent to when it was sampled; their weights, and the gradient, are those of the router that is trained. A token that has no record (the last
of a sequence; padding) goes where the router sends it.

**LoadBalance.** Without the loss experts that are chosen seldom learn seldom, and are chosen more seldom still. The loss of Switch Transformers (Fedus et al.,
2021, arXiv 2101.03961), summed over the layers l of E experts, k of them a token, over all T tokens of a minibatch:

    L = E Σ_l Σ_i f_li P_li    f_li = (1 / kT) Σ_t [t goes to i]    P_li = (1 / T) Σ_t p_lti

p are the router's probabilities, whose gradient trains it; the shares f are taken as given. It is 1 a layer where the load is even. T
counts every token of the minibatch, prompts too, over all ranks and microbatches (Qiu et al., 2025, arXiv 2501.11873, show that balance
within a microbatch costs quality). So f must be known before the first gradient: engines run the minibatch forward once more for it.
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
"""Families (`model_type`) by what makes probabilities of a router's logits."""


class _Attached(torch.autograd.Function):
    """Returns `scores` as they are; backwards, `loss` is added to whatever the scores end in."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor) -> Tensor:
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), device=grad.device)


class LoadBalance:
    """The load of a mixture's experts over the minibatch of one update, and the loss's part of every forward pass.

    An update calls `begin`, and where `needs_counting` the engine then runs the minibatch forward without gradient and calls
    `counted`; then it trains, and ends with `end`. Routers call `route` in every forward pass.
    """

    def __init__(self, config: Any, coefficient: float, scale: float = 1.0) -> None:
        """`config`: Hugging Face's. `scale`: what the engine divides gradients by. Raises ValueError for a model without known routers."""
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
        """Of the last update: `docs/metrics.md`. Empty where there are no routers."""

    def begin(self, device: torch.device) -> None:
        self._loads, self._probabilities = (
            torch.zeros(self._shape, dtype=torch.float64, device=device) for _ in "fP"
        )
        self._watches, self._trains = self._known, False

    def counted(self) -> None:
        """All has been forwarded once: sums over the ranks, after which the loss is attached."""
        self._sum_up()
        self._watches, self._trains = False, True

    def end(self) -> None:
        if self._watches:
            self._sum_up()
        self._watches = self._trains = False

    def _sum_up(self) -> None:
        for sums in (self._loads, self._probabilities):
            dist.all_reduce(sums)
        sparse = self._loads.sum(1) > 0  # some families have dense layers besides
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

    def route(
        self, layer: int, logits: Tensor, chosen: Tensor, scores: Tensor, valid: Tensor | None = None
    ) -> Tensor:
        """Scores, with this pass's part of the loss attached while training.

        Shapes: logits [T, E], chosen [T, k] int64 or [T, E] bool, scores any, valid [T] bool (False: padding) -> as scores.
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
    """What the routers must know of the forward pass at hand."""

    valid: Tensor | None = None
    """[T] bool: False where a token is padding; None: none is"""
    experts: Tensor | None = None
    """[T, layers, k] int64: where to send the tokens, -1 where there is no record; None: wherever the routers choose"""

    def begin(
        self, packed: Packed, padded: Packed, mine: slice, config: Any, replay: bool, device: torch.device
    ) -> None:
        """`padded`: the microbatch as the engine computes it, of which this rank has the tokens `mine`."""
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
            f"learner.moe.router_replay must be false unless model_type of model.path is one of {', '.join(SOFTMAX + SIGMOID)}, "
            f"got true for {config.model_type}"
        )


def replay_choices(config: Any, logits: Tensor, chosen: Tensor, recorded: Tensor) -> tuple[Tensor, Tensor]:
    """(weights [T, k], float32, of the experts that are used, these experts [T, k]): the recorded, or else the chosen ones.

    logits [T, E], chosen and recorded [T, k].
    """
    used = recorded.where((recorded >= 0).all(-1, keepdim=True), chosen)
    logits = logits.float()
    scores = (logits.sigmoid() if config.model_type in SIGMOID else logits.softmax(-1)).gather(-1, used)
    if getattr(config, "norm_topk_prob", True):  # mixtral always does
        scores = scores / (scores.sum(-1, keepdim=True) + (1e-20 if config.model_type in SIGMOID else 0.0))
    return scores * getattr(config, "routed_scaling_factor", 1.0), used


def watch_routers(model: Any, balance: LoadBalance, at_hand: ForwardPass) -> None:
    """Hooks every router of a Hugging Face model."""
    for number, layer in enumerate(getattr(model.base_model, "layers", ())):
        for module in layer.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(_hook(number, model.config, balance, at_hand))


def _hook(layer: int, config: Any, balance: LoadBalance, at_hand: ForwardPass) -> Callable[..., Any]:
    def hook(
        module: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, chosen = outputs
        if at_hand.experts is not None:
            weights, chosen = replay_choices(config, logits, chosen, at_hand.experts[:, layer])
            scores = weights.to(scores.dtype)
        return logits, balance.route(layer, logits, chosen, scores, at_hand.valid), chosen

    return hook
