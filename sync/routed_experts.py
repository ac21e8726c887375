"""The record of the experts that vLLM's routers choose for each token of each request, made inside the
worker.

vLLM's own recording needs its newer model runner, which does not run on a CPU. But its routers pass their
choices to a callback. After each step the rows of all layers are dealt out to the requests of the batch, in
the batch's order.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch


class RoutedExpertsRecord:
    """Records the choices of all routers, from its construction on and as long as the model runner lives."""

    def __init__(self, runner: Any, routers: Iterable[tuple[int, Any]], num_layers: int) -> None:
        """`routers`: pairs of a layer's number and vLLM's router."""
        self._runner, self._num_layers = runner, num_layers
        self._step: dict[int, torch.Tensor] = {}
        self._held: dict[str, list[np.ndarray]] = {}
        for layer, router in routers:
            router.set_capture_fn(partial(self._step.__setitem__, layer))
        self._execute = runner.execute_model
        runner.execute_model = self._execute_and_record

    def take_experts(self, request: str) -> list[np.ndarray]:
        """Returns the experts of a request's tokens in order, parts of [n, layers, k] int16, and forgets the
        request."""
        return self._held.pop(request, [])

    def _execute_and_record(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._step.clear()
        out = self._execute(scheduled, *args, **kwargs)
        if self._step:
            self._deal_out_rows(scheduled.num_scheduled_tokens)
        return out

    def _deal_out_rows(self, num_tokens: dict[str, int]) -> None:
        """Appends each request's rows to its record. `num_tokens`: tokens of each request in this step.

        A request that vLLM pushes out and computes again keeps the rows that were recorded when its tokens
        were sampled.
        """
        some = next(iter(self._step.values()))
        chosen = np.zeros((len(some), self._num_layers, some.shape[1]), np.int16)
        for layer, ids in self._step.items():
            chosen[:, layer] = ids.numpy()
        batch, row = self._runner.input_batch, 0
        for place, request in enumerate(batch.req_ids):
            count, begin = num_tokens.get(request, 0), int(batch.num_computed_tokens_cpu[place])
            held = self._held.setdefault(request, [])
            known = sum(len(part) for part in held)
            assert begin <= known, (
                f"request {request} skips from token {known} to {begin}: a prefix cache is on"
            )
            held.append(chosen[row + known - begin : row + count])
            row += count
