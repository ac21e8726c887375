"""Waits for results of Ray that a second Ctrl-C ends: short calls of Ray, with a safe point after each."""

import time
from collections.abc import Sequence
from typing import Any

import ray

from slipstream.stop_signals import StopSignals

SLICE_S = 0.2
"""Seconds of the longest call of Ray, after which a second Ctrl-C acts."""


def is_ready(ref: Any) -> bool:
    """True when the method has returned or raised, or its actor has died."""
    return bool(ray.wait([ref], timeout=0)[0])


def wait_for_results(refs: Sequence[Any], num: int, timeout_s: float, signals: StopSignals) -> list[Any]:
    """Waits until `num` of the results are ready, or `timeout_s` are over. Returns those that are ready.

    Raises Interrupted.
    """
    deadline = time.monotonic() + timeout_s
    while refs:
        left_s = max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(refs), num_returns=num, timeout=min(SLICE_S, left_s))
        signals.raise_if_hurried()
        if len(ready) >= num or not left_s:
            return list(ready)
    return []
