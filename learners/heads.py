"""What stands at the head of a model: log-probabilities and entropies, without [tokens, vocabulary] in memory, or values."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learners.memory import CHUNK_ELEMENTS, CPU_ELEMENTS


class _Logprobs(torch.autograd.Function):
    """Logits exist for one chunk at a time; the backward pass computes them again and turns them into their gradient in place.

    ∂ log p_y / ∂ z_j = [j = y] − p_j,  ∂ H / ∂ z_j = −p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        size = _chunk(weight)
        logprobs, entropy, normalizer = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        for begin in range(0, len(hidden), size):
            rows = slice(begin, begin + size)
            logits = _logits(hidden[rows], weight, bias, temperature)
            highest = logits.amax(-1, keepdim=True)
            wanted = logits.sub_(highest).gather(-1, targets[rows, None])[:, 0]
            powers = logits.exp()
            total = powers.sum(-1)
            torch.sub(wanted, total.log(), out=logprobs[rows])
            torch.sub(total.log(), torch.linalg.vecdot(powers, logits) / total, out=entropy[rows])
            torch.add(total.log(), highest[:, 0], out=normalizer[rows])
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight) if wants_weight else None
        d_bias = torch.zeros_like(bias) if wants_bias else None
        grad = torch.zeros_like(normalizer) if grad is None else grad
        size = _chunk(weight)
        for begin in range(0, len(hidden), size):
            rows = slice(begin, begin + size)
            logp = _logits(hidden[rows], weight, bias, ctx.temperature).sub_(normalizer[rows, None])
            if grad_entropy is None:
                d = logp.exp_().mul_(-grad[rows, None])
            else:
                factor = (logp + entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(grad[rows, None]).neg_()
                d = logp.exp_().mul_(factor)
            d.scatter_add_(1, targets[rows, None], grad[rows, None])
            if ctx.temperature != 1.0:
                d.div_(ctx.temperature)
            d = d.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(d, weight, out=d_hidden[rows])
            if d_weight is not None:
                d_weight.addmm_(d.t(), hidden[rows])
            if d_bias is not None:
                d_bias.add_(d.sum(0))
        return d_hidden, d_weight, d_bias, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = F.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunk(weight: Tensor) -> int:
    """Rows of logits that exist at the same time."""
    return max(1, (CHUNK_ELEMENTS if weight.is_cuda else min(CHUNK_ELEMENTS, CPU_ELEMENTS)) // len(weight))


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(h W / temperature) at the targets, and the entropy of the same distribution.

    Products in the dtype of `hidden`, everything after in float32.
    Shapes: hidden [K, H], weight [V, H], bias [V], targets [K] int64 -> [K], [K] float32.
    """
    found: tuple[Tensor, Tensor] = _Logprobs.apply(hidden, weight, bias, targets, temperature, entropy_gradient)
    return found


class LogprobHead:
    """Makes a model's own head return [1, K, 2], log-probability and entropy, where `ask` says, and not logits.

    The head is called inside the model's forward, where the sharded engine has gathered its weight.
    """

    def __init__(self, head: nn.Module, temperature: float, entropy_gradient: bool = False) -> None:
        self._head: Any = head
        self._temperature, self._entropy_gradient = temperature, entropy_gradient
        head.forward = self._forward

    def ask(self, sources: Tensor, targets: Tensor) -> None:
        """For the next forward pass: [K] positions whose output predicts the [K] tokens."""
        self._sources, self._targets = sources, targets

    def _forward(self, hidden: Tensor) -> Tensor:
        logprobs, entropy = chunked_logprobs(
            hidden[0].index_select(0, self._sources),
            self._head.weight,
            self._head.bias,
            self._targets,
            self._temperature,
            self._entropy_gradient,
        )
        return torch.stack([logprobs[None], entropy[None]], -1)  # no view: FSDP hangs its hooks on what comes out


class ValueHead:
    """The same for a critic: [1, K, 2], the value after each source and 0, from a head of one number."""

    def __init__(self, head: nn.Module) -> None:
        self._head: Any = head
        head.forward = self._forward

    def ask(self, sources: Tensor, targets: Tensor) -> None:
        """As `LogprobHead.ask`; the tokens that come next do not matter to a value."""
        self._sources = sources

    def _forward(self, hidden: Tensor) -> Tensor:
        values = F.linear(hidden[0].index_select(0, self._sources), self._head.weight, self._head.bias).float()[:, 0]
        return torch.stack([values[None], torch.zeros_like(values)[None]], -1)
