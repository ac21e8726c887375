"""The routers of Megatron's mixtures, with replay and balance (`learners.routing`)."""

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from learners.routing import ForwardPass, LoadBalance, replay_choices


def watch_routers(model: Any, config: Any, balance: LoadBalance) -> None:
    """`model`: `learners.megatron.model.MegatronModel`. `config`: Hugging Face's."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.routing = _watched(module, module.routing, config, balance, model.at_hand)


def _watched(
    router: Any,
    routing: Callable[..., tuple[Tensor, Tensor]],
    config: Any,
    balance: LoadBalance,
    at_hand: ForwardPass,
) -> Callable[..., Any]:
    """`TopKRouter.routing`, which is where Megatron replays and attaches losses of its own, with ours.

    Megatron's own replay takes one choice for all ranks' tokens and knows no token without a record.
    """
    layer = router.layer_number - 1

    def watched(logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores, chosen = routing(logits, padding_mask=padding_mask)
        valid = None if padding_mask is None else padding_mask.reshape(-1)
        flat = logits.view(-1, logits.shape[-1])
        if at_hand.experts is not None:
            recorded = at_hand.experts[:, layer]
            own = chosen.to(scores.dtype).topk(recorded.shape[1], -1).indices
            weights, used = replay_choices(config, flat, own, recorded)
            scores = scores.new_zeros(scores.shape).scatter(1, used, weights.to(scores.dtype))
            chosen = chosen.new_zeros(chosen.shape).scatter(1, used, True)
        return balance.route(layer, flat, chosen, scores, valid), chosen

    return watched
