"""Columns [T] of a policy loss by name, and the loss of a configuration on them."""

from typing import Any

import torch
from torch import Tensor

from algos.loss import policy_loss
from algos.objective import make_loss_inputs
from configs.algo import AlgoConfig

Columns = dict[str, Tensor]
"""Arguments of `make_loss_inputs`, by name"""


def compute_loss(algo: AlgoConfig, **columns: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns loss and sums of columns that are named as the arguments of `make_loss_inputs`."""
    return policy_loss(make_loss_inputs(algo, **columns))


def drop_columns(columns: Columns, *names: str) -> Columns:
    return {name: column for name, column in columns.items() if name not in names}


def pick_sequences(columns: Columns, order: list[int]) -> Columns:
    """Returns the columns of these sequences alone, in this order, numbered from 0."""
    index = torch.cat([(columns["sequence"] == number).nonzero()[:, 0] for number in order])
    picked = {name: column[index] for name, column in columns.items()}
    numbers = [order.index(number) for number in picked["sequence"].tolist()]
    return picked | {"sequence": torch.tensor(numbers, dtype=torch.int64)}
