"""What stands at the head of a model: log-probabilities and entropies, without [tokens, vocabulary] in memory, or values."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learners.memory import CHUNK_ELEMENTS


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(h W / temperature) at the targets, and the entropy of the same distribution.

    Chunks are computed again in the backward pass. Products in the dtype of `hidden`, everything after in float32.
    Shapes: hidden [K, H], weight [V, H], bias [V], targets [K] int64 -> [K], [K] float32.
    """

    def chunk(h: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(h, weight, bias).float() / temperature
        normalizer = logits.logsumexp(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = normalizer - ((logits - normalizer[:, None]).exp() * logits).sum(-1)
        return logits.gather(-1, target[:, None])[:, 0] - normalizer, entropy

    size = max(1, CHUNK_ELEMENTS // len(weight))
    if len(hidden) <= size:
        return chunk(hidden, targets)
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    outs = [checkpoint(chunk, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in parts]
    logprobs, entropies = zip(*outs, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


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
