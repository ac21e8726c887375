"""The routers of Megatron's mixtures, watched for the balance of their load (`learners.routing`)."""

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from learners.routing import Balance


def watch_routers(model: nn.Module, balance: Balance) -> None:
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.routing = _watched(module, module.routing, balance)


def _watched(router: Any, routing: Callable[..., tuple[Tensor, Tensor]], balance: Balance) -> Callable[..., Any]:
    """`TopKRouter.routing`, which is where Megatron attaches losses of its own, with ours."""

    def watched(logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores, chosen = routing(logits, padding_mask=padding_mask)
        valid = None if padding_mask is None else padding_mask.reshape(-1)
        flat = logits.view(-1, logits.shape[-1])
        return balance.route(router.layer_number - 1, flat, chosen, scores, valid), chosen

    return watched
