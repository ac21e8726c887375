"""The loss of episodes that are longer than a microbatch.

Their branches lie in several microbatches, perhaps of several ranks, and a loss may compare whole episodes.
So such an episode's loss is asked once, as a whole, before the update:

    log-probabilities ℓ of the weights held ─▶ loss L of each divided episode ─▶ slopes ∂L/∂ℓ_t
        ─▶ in each microbatch Σ_t ∂L/∂ℓ_t · ℓ_t in the place of the loss

The gradient is the same, because ∂L/∂θ = Σ_t ∂L/∂ℓ_t · ∂ℓ_t/∂θ, and the slopes are those at the weights that
the update begins with. It costs the divided episodes another forward pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from learners.engine import LossFn
from learners.packing import Batch, Packed, pack_rows


class DividedEpisodes:
    """Some episodes of a batch, and the slopes of their losses."""

    def __init__(self, batch: Batch, rows: Sequence[int]) -> None:
        self._batch, self._rows = batch, rows
        self.slopes = torch.zeros(2, len(batch.tokens))
        """[2, T]: derivative of the loss by each token's log-probability, or value, and by its entropy"""
        self.is_divided = torch.zeros(batch.num_sequences, dtype=torch.bool)
        """[N] bool: the episodes that are divided"""
        self.is_divided[list(rows)] = True
        self.entropy = torch.zeros(len(batch.tokens))
        """[T] the entropies of their tokens that an update has seen here; 0 elsewhere"""

    def ask_loss(self, loss_fn: LossFn, outputs: Tensor, places: slice) -> None:
        """Asks the loss of the episodes in these places of the list.

        `outputs` [T] are the log-probabilities, or values, of the weights that the update begins with.
        """
        for row in self._rows[places]:
            packed = pack_rows(self._batch, [row])
            leaf, entropy = outputs[packed.index].requires_grad_(), torch.zeros(len(packed.index))
            loss = loss_fn(leaf, entropy.requires_grad_(), packed)
            found = torch.autograd.grad(loss, (leaf, entropy), allow_unused=True, materialize_grads=True)
            self.slopes[:, packed.index] = torch.stack(found)

    def replace_loss(self, loss_fn: LossFn) -> LossFn:
        """Returns a loss of microbatches that may hold parts of these episodes."""
        episodes = self._batch.sequence

        def loss(outputs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
            held = episodes[packed.index]
            here = self.is_divided[held]
            self.entropy[packed.index[here]] = entropy.detach()[here]
            steep = self.slopes[:, packed.index]
            # A token that is not trained has no slope, and what an engine gives it cannot matter.
            total = sum(
                torch.where(here & (slope != 0), slope * values, 0.0).sum()
                for slope, values in zip(steep, (outputs, entropy), strict=True)
            )
            if not bool(here.all()):
                whole = pack_rows(self._batch, held[~here].unique_consecutive().tolist())
                total = total + loss_fn(outputs[~here], entropy[~here], whole)
            assert isinstance(total, Tensor)
            return total

        return loss
