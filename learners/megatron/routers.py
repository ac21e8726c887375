"""Replay and balance (`learners.routing`) for the routers of Megatron's mixtures."""

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from learners.routing import ForwardPass, LoadBalance, replay_choices


def watch_routers(model: Any, config: Any, balance: LoadBalance) -> None:
    """Replaces the routing of every router of a `MegatronModel`. `config`: Hugging Face's."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.routing = _make_watched_routing(
                module, module.routing, config, balance, model.forward_pass
            )


def _make_watched_routing(
    router: Any,
    routing: Callable[..., tuple[Tensor, Tensor]],
    config: Any,
    balance: LoadBalance,
    forward_pass: ForwardPass,
) -> Callable[..., Any]:
    """Returns `TopKRouter.routing` with our replay and loss, in the place where Megatron does its own.

    Megatron's own replay takes one choice for all ranks' tokens and knows no token without a record.
    """
    layer = router.layer_number - 1

    def route_watched(logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores, chosen = routing(logits, padding_mask=padding_mask)
        valid = None if padding_mask is None else padding_mask.reshape(-1)
        flat = logits.view(-1, logits.shape[-1])
        if forward_pass.experts is not None:
            recorded = forward_pass.experts[:, layer]
            own = chosen.to(scores.dtype).topk(recorded.shape[1], -1).indices
            weights, used = replay_choices(config, flat, own, recorded)
            scores = scores.new_zeros(scores.shape).scatter(1, used, weights.to(scores.dtype))
            chosen = chosen.new_zeros(chosen.shape).scatter(1, used, True)
        return balance.attach_loss(layer, flat, chosen, scores, valid), chosen

    return route_watched
