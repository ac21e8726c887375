"""What stands at the head of a model: log-probabilities and entropies, without [tokens, vocabulary] in memory, or values."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learners.memory import CHUNK_ELEMENTS, CPU_ELEMENTS


class _Logprobs(torch.autograd.Function):
    """Logits exist for one chunk at a time; the backward pass computes them again and turns them into their gradient in place.

    ∂ log p_y / ∂ z_j = [j = y] − p_j,  ∂ H / ∂ z_j = −p_j (log p_j + H),  ∂ c tanh(z / c) / ∂ z = 1 − tanh²(z / c)
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
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        size = _chunk(weight)
        logprobs, entropy, normalizer = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        for begin in range(0, len(hidden), size):
            rows = slice(begin, begin + size)
            logits = _logits(hidden[rows], weight, bias, temperature, cap)
            highest = logits.amax(-1, keepdim=True)
            wanted = logits.sub_(highest).gather(-1, targets[rows, None])[:, 0]
            powers = logits.exp()
            total = powers.sum(-1)
            torch.sub(wanted, total.log(), out=logprobs[rows])
            torch.sub(total.log(), torch.linalg.vecdot(powers, logits) / total, out=entropy[rows])
            torch.add(total.log(), highest[:, 0], out=normalizer[rows])
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.cap = temperature, cap
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
        # In float32: the sum over a hundred chunks would lose two digits of bfloat16.
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        grad = torch.zeros_like(normalizer) if grad is None else grad
        size = _chunk(weight)
        for begin in range(0, len(hidden), size):
            rows = slice(begin, begin + size)
            logits = _logits(hidden[rows], weight, bias, ctx.temperature, ctx.cap)
            slope = None if ctx.cap is None else logits.div(ctx.cap).square_().neg_().add_(1)
            logp = logits.sub_(normalizer[rows, None])
            if grad_entropy is None:
                d = logp.exp_().mul_(-grad[rows, None])
            else:
                factor = (
                    (logp + entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(grad[rows, None]).neg_()
                )
                d = logp.exp_().mul_(factor)
            d.scatter_add_(1, targets[rows, None], grad[rows, None])
            if slope is not None:
                d.mul_(slope)
            if ctx.temperature != 1.0:
                d.div_(ctx.temperature)
            d = d.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(d, weight, out=d_hidden[rows])
            if d_weight is not None:
                _add_product(d_weight, d.t(), hidden[rows])
            if d_bias is not None:
                d_bias.add_(d.sum(0, dtype=torch.float32))
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right, in the precision of `total`, which is float32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    else:
        total.addmm_(left.float(), right.float())


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, cap: float | None
) -> Tensor:
    logits = F.linear(hidden, weight, bias).float()
    if temperature != 1.0:
        logits.div_(temperature)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


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
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(z) at the targets, and the entropy of the same distribution, with z = h W / temperature, or
    cap · tanh(h W / (temperature · cap)).

    Products in the dtype of `hidden`, everything after in float32.
    Shapes: hidden [K, H], weight [V, H], bias [V], targets [K] int64 -> [K], [K] float32.
    """
    found: tuple[Tensor, Tensor] = _Logprobs.apply(
        hidden, weight, bias, targets, temperature, entropy_gradient, cap
    )
    return found


class LogprobHead:
    """Makes a causal LM return [1, K, 2], log-probability and entropy, where `ask` says, and not logits.

    The model's own head is called inside the model's forward, where the sharded engine has gathered its weight. What the model does
    to logits after its head (granite and cohere scale them, gemma2 caps them) is part of the log-probability.
    """

    def __init__(self, model: Any, temperature: float, entropy_gradient: bool = False) -> None:
        """Raises ValueError for a model that does anything else to its logits."""
        self._head: Any = model.get_output_embeddings()
        scale, cap = logit_curve(model)
        self._temperature, self._cap = temperature / scale, None if cap is None else cap / temperature
        self._entropy_gradient = entropy_gradient
        self._head.forward, forward = self._forward, model.forward

        def found(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            out.logits = self._found  # as the head has returned it: the model then took it for logits
            del self._found
            return out

        model.forward = found

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
            self._cap,
        )
        # No view: FSDP hangs its hooks on what comes out.
        self._found = torch.stack([logprobs[None], entropy[None]], -1)
        return self._found


def logit_curve(model: Any) -> tuple[float, float | None]:
    """(scale, cap): a causal LM changes the logits z of its head to cap · tanh(scale · z / cap), or to scale · z where cap is None.

    It is measured: between families, names and meanings in the configuration differ. Nothing but what follows the head is computed.
    Raises ValueError for a model that does anything else.
    """
    base, head, points = (
        model.base_model,
        model.get_output_embeddings(),
        torch.tensor(POINTS, dtype=torch.float64),
    )
    base.forward, head.forward = lambda *_, **__: _Hidden(), lambda _: points[None, None].clone()
    try:
        found = (
            type(model)
            .forward(model, input_ids=torch.zeros(1, 1, dtype=torch.long))
            .logits.flatten()
            .double()
        )
    finally:
        del base.forward, head.forward
    scale, cap = float((found[0] / points[0]).float()), float(found[-1])
    expected = scale * points if math.isinf(cap) else cap * torch.tanh(scale * points / cap)
    if not torch.allclose(found, expected, rtol=1e-5, atol=0.0):
        raise ValueError(
            f"{type(model).__name__} of model.path must scale or cap the logits of its head, if it changes them, got "
            f"{found[1:4].tolist()} for {points[1:4].tolist()}"
        )
    return scale, None if math.isinf(cap) else cap


POINTS = (1e-6, 1.0, -3.0, 20.0, -50.0, math.inf)
"""Logits at which a model's curve is measured: its slope at 0 and its limit are the first and the last."""


class _Hidden:
    """Stands for what a model without its head returns: a hidden state, and none of the rest."""

    last_hidden_state = torch.zeros(1, 1, 1)

    def __getitem__(self, _: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


class ValueHead:
    """The same for a critic: [1, K, 2], the value after each source and 0, from a head of one number."""

    def __init__(self, head: nn.Module) -> None:
        self._head: Any = head
        head.forward = self._forward

    def ask(self, sources: Tensor, targets: Tensor) -> None:
        """As `LogprobHead.ask`; the tokens that come next do not matter to a value."""
        self._sources = sources

    def _forward(self, hidden: Tensor) -> Tensor:
        values = F.linear(
            hidden[0].index_select(0, self._sources), self._head.weight, self._head.bias
        ).float()[:, 0]
        return torch.stack([values[None], torch.zeros_like(values)[None]], -1)
