"""Draws tokens for transformers' continuous batching, each sample by a seed of its own.

transformers draws all tokens of a batch from one stream of random numbers, at one temperature. This logits
processor draws them before that: it leaves to transformers a score of 0 for the drawn token and of -inf for
all others, of which the greatest is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

from generators.engine import Completion, Sample

CHUNK_ELEMENTS = 1 << 24
"""Probabilities that are added up in float64 at a time: 128 MB."""


@dataclass(slots=True, eq=False)
class DrawingSample:
    """A sample in the engine: its own random numbers, and what was drawn so far."""

    sample: Sample
    request_id: str
    """By which transformers knows it; never used twice."""
    random: np.random.Generator = field(init=False)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Philox (Salmon et al., 2011): streams of neighbouring seeds are independent.
        self.random = np.random.Generator(np.random.Philox(self.sample.seed))

    def make_completion(self, finish_reason: str) -> Completion:
        return Completion(
            id=self.sample.id,
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=finish_reason,
        )


class TokenDraw(ContinuousBatchingLogitsProcessor):
    """Draws a token for each request of a batch, from the distribution after temperature, min-p, top-k and
    top-p, in vLLM's order. A greedy sample takes the likeliest token, at temperature 1; a forced one is drawn
    from the whole distribution."""

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs = ()

    def __init__(self, *, temperature: float, top_p: float, top_k: int, min_p: float) -> None:
        self.running: dict[str, DrawingSample] = {}
        """By transformers' request id."""
        self.version = -1
        """Version of the weights that the next tokens are drawn from."""
        self.temperature = temperature
        self._truncations = LogitsProcessorList()
        if min_p > 0:
            self._truncations.append(MinPLogitsWarper(min_p))
        if top_k > 0:
            self._truncations.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self._truncations.append(TopPLogitsWarper(top_p))
        self._batch: list[DrawingSample] = []

    def make_list(self) -> ContinuousBatchingLogitsProcessorList:
        """Returns the list of this processor alone, as transformers takes it."""
        alone = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([self]))
        alone.tensors_required = 1
        return alone

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Tensor:
        """Notes whom the next scores are for. transformers calls this before each forward pass."""
        self._batch = [self.running[request.state.request_id] for request in requests_with_new_token]
        return torch.zeros(len(self._batch), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Draws a token from each row of `scores` [rows, vocabulary], and adds it to its sample. Rows beyond
        the requests' belong to prompts that are not read to their end."""
        batch, count = self._batch, len(self._batch)
        processed = self._process_scores(scores[:count]).log_softmax(-1)
        tokens = self._draw_tokens(processed)
        logprobs = processed.gather(-1, tokens[:, None])[:, 0]
        for drawing, token, logprob in zip(batch, tokens.tolist(), logprobs.tolist(), strict=True):
            drawing.tokens.append(token)
            drawing.logprobs.append(logprob)
            drawing.versions.append(self.version)
        scores.fill_(float("-inf"))
        scores[:count].scatter_(-1, tokens[:, None], 0.0)
        return scores

    def _process_scores(self, scores: Tensor) -> Tensor:
        samples = [drawing.sample for drawing in self._batch]
        temperatures = [1.0 if s.greedy else s.temperature or self.temperature for s in samples]
        scores = scores / torch.tensor(temperatures, device=scores.device)[:, None]
        if not self._truncations:
            return scores
        truncated = torch.tensor([not (s.greedy or s.forced) for s in samples], device=scores.device)
        return torch.where(truncated[:, None], self._truncations(None, scores), scores)

    def _draw_tokens(self, logprobs: Tensor) -> Tensor:
        """Returns [n] tokens: for each row, the first whose probability, added to those before it, exceeds a
        uniform number."""
        uniforms = torch.tensor(
            [drawing.random.random() for drawing in self._batch], dtype=torch.float64, device=logprobs.device
        )
        parts = []
        rows = max(1, CHUNK_ELEMENTS // logprobs.shape[-1])
        for some, chosen in zip(logprobs.split(rows), uniforms.split(rows), strict=True):
            sums = some.double().exp().cumsum(-1)
            whole = sums[:, -1]
            # Below the whole sum even where the product is rounded up to it.
            wanted = torch.minimum(chosen * whole, torch.nextafter(whole, torch.zeros_like(whole)))
            parts.append(torch.searchsorted(sums, wanted[:, None], right=True)[:, 0])
        tokens = torch.cat(parts)
        greedy = torch.tensor([drawing.sample.greedy for drawing in self._batch], device=tokens.device)
        return torch.where(greedy, logprobs.argmax(-1), tokens)
