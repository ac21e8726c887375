"""The order of prompts.

It is a function of the seed alone, so it survives restarts and passes over no prompt.
"""

import numpy as np


class PromptOrder:
    """Gives group g prompt `prompt_index(g)`.

    A task without end (`size` None) is walked through in order: 0, 1, 2, … A task of N prompts is walked
    through in epochs of N groups, each in an order of its own. Every prompt is leased once an epoch, whatever
    fails or is rejected.
    """

    def __init__(self, size: int | None, seed: int) -> None:
        if size is not None and size < 1:
            raise ValueError(f"task.size must be at least 1, got {size}")
        self._size, self._seed = size, seed
        self._epochs: dict[int, np.ndarray] = {}
        """Orders of the epochs under way, [N] int64 each."""

    def prompt_index(self, group: int) -> int:
        if self._size is None:
            return group
        epoch, place = divmod(group, self._size)
        if epoch not in self._epochs:
            if len(self._epochs) > 1:  # groups of two epochs may be under way at once
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = np.random.default_rng([self._seed, epoch]).permutation(self._size)
        return int(self._epochs[epoch][place])
