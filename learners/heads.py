"""Heads of models: log-probabilities and entropies without [tokens, vocabulary] in memory, or values."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learners.memory import CHUNK_ELEMENTS, CPU_ELEMENTS


class _ChunkedLogprobs(torch.autograd.Function):
    """Logits exist for one chunk at a time. The backward pass computes them again, and turns them into their
    gradient in place.

    ∂ log p_y / ∂ z_j = [j = y] − p_j,  ∂ H / ∂ z_j = −p_j (log p_j + H),  ∂ c tanh(z / c) / ∂ z = 1 − tanh²(z
    / c)
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
        size = _find_chunk_size(weight)
        logprobs, entropy, normalizer = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        for begin in range(0, len(hidden), size):
            rows = slice(begin, begin + size)
            logits = _compute_logits(hidden[rows], weight, bias, temperature, cap)
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
        # The sum is in float32, because a hundred chunks would lose two digits of bfloat16.
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        grad = torch.zeros_like(normalizer) if grad is None else grad
        size = _find_chunk_size(weight)
        for begin in range(0, len(hidden), size):
            rows = slice(begin, begin + size)
            logits = _compute_logits(hidden[rows], weight, bias, ctx.temperature, ctx.cap)
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
    """Adds left · right to `total`, which is float32, in its precision."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    else:
        total.addmm_(left.float(), right.float())


def _compute_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, cap: float | None
) -> Tensor:
    logits = F.linear(hidden, weight, bias).float()
    if temperature != 1.0:
        logits.div_(temperature)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _find_chunk_size(weight: Tensor) -> int:
    """Returns the number of rows of logits that exist at the same time."""
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
    """Returns log softmax(z) at the targets, and the entropy of the same distribution.

    z = h W / temperature, or cap · tanh(h W / (temperature · cap)). Products are in the dtype of `hidden`,
    everything after them in float32.

    Shapes: hidden [K, H], weight [V, H], bias [V], targets [K] int64 -> [K], [K] float32.
    """
    outputs: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(
        hidden, weight, bias, targets, temperature, entropy_gradient, cap
    )
    return outputs


class LogprobHead:
    """Makes a causal LM return [1, K, 2], log-probability and entropy of the tokens of `ask_tokens`, not
    logits.

    The model's own head is called inside the model's forward, where the sharded engine has gathered its
    weight. Changes of the logits after the head (granite and cohere scale them, gemma2 caps them) are part of
    the log-probability.
    """

    def __init__(self, model: Any, temperature: float, entropy_gradient: bool = False) -> None:
        """Raises ValueError for a model that does anything else to its logits."""
        self._head: Any = model.get_output_embeddings()
        scale, cap = measure_logit_curve(model)
        self._temperature, self._cap = temperature / scale, None if cap is None else cap / temperature
        self._entropy_gradient = entropy_gradient
        self._head.forward, forward = self._forward_head, model.forward

        def forward_with_outputs(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            # The model took the head's outputs for logits, and has scaled or capped them since.
            out.logits = self._outputs
            del self._outputs
            return out

        model.forward = forward_with_outputs

    def ask_tokens(self, sources: Tensor, targets: Tensor) -> None:
        """Sets the K tokens of the next forward pass: `sources` [K] are the positions whose output
        predicts the tokens `targets` [K]."""
        self._sources, self._targets = sources, targets

    def _forward_head(self, hidden: Tensor) -> Tensor:
        logprobs, entropy = chunked_logprobs(
            hidden[0].index_select(0, self._sources),
            self._head.weight,
            self._head.bias,
            self._targets,
            self._temperature,
            self._entropy_gradient,
            self._cap,
        )
        # This must not be a view, because FSDP hangs its hooks on the result.
        self._outputs = torch.stack([logprobs[None], entropy[None]], -1)
        return self._outputs


def measure_logit_curve(model: Any) -> tuple[float, float | None]:
    """Returns (scale, cap) of the change that a causal LM makes to the logits z of its head.

    They become cap · tanh(scale · z / cap), or scale · z where cap is None. The change is measured, because
    names and meanings in the configuration differ between families. Only the code after the head is computed.
    Raises ValueError for a model that changes logits otherwise.
    """
    base, head = model.base_model, model.get_output_embeddings()
    points = torch.tensor(POINTS, dtype=torch.float64)
    base.forward, head.forward = lambda *_, **__: _HeadlessOutput(), lambda _: points[None, None].clone()
    try:
        token = torch.zeros(1, 1, dtype=torch.long)
        changed = type(model).forward(model, input_ids=token).logits.flatten().double()
    finally:
        del base.forward, head.forward
    scale, cap = float((changed[0] / points[0]).float()), float(changed[-1])
    expected = scale * points if math.isinf(cap) else cap * torch.tanh(scale * points / cap)
    if not torch.allclose(changed, expected, rtol=1e-5, atol=0.0):
        raise ValueError(
            f"{type(model).__name__} of model.path must scale or cap the logits of its head, if it changes "
            f"them, got {changed[1:4].tolist()} for {points[1:4].tolist()}"
        )
    return scale, None if math.isinf(cap) else cap


POINTS = (1e-6, 1.0, -3.0, 20.0, -50.0, math.inf)
"""Logits at which a model's curve is measured. The first gives its slope at 0, the last its limit."""


class _HeadlessOutput:
    """Stands for the output of a model without its head: a hidden state, and None for every other field."""

    last_hidden_state = torch.zeros(1, 1, 1)

    def __getitem__(self, _: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


class ValueHead:
    """Makes a critic return [1, K, 2], the value after each source and 0, from its head of one number."""

    def __init__(self, head: nn.Module) -> None:
        self._head: Any = head
        head.forward = self._forward_head

    def ask_tokens(self, sources: Tensor, targets: Tensor) -> None:
        """Does what `LogprobHead.ask_tokens` does. A value does not depend on the token that comes next."""
        self._sources = sources

    def _forward_head(self, hidden: Tensor) -> Tensor:
        sources = hidden[0].index_select(0, self._sources)
        values = F.linear(sources, self._head.weight, self._head.bias).float()[:, 0]
        return torch.stack([values[None], torch.zeros_like(values)[None]], -1)
