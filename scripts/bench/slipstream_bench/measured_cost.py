"""Time and peak memory of one action, measured by repeating it."""

import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch


class MeasuredCost(NamedTuple):
    ms: float
    """Median over the repeats."""
    peak_mib: float
    """The most that the action has allocated and not given back at any moment of its first round; its
    arguments are left out."""


def measure_cost(action: Callable[[], Any], repeat: int) -> MeasuredCost:
    """Runs `action` once for its memory, which also warms up, then `repeat` times for its time.

    With one thread on a CPU the time is the processor's, so that other programs count for little. Otherwise
    it is the clock's, and the GPU's queue is awaited before and after each round.
    """
    cuda = torch.cuda.is_available()
    read_clock = time.perf_counter if cuda or torch.get_num_threads() > 1 else time.thread_time
    wait_for_gpu = torch.cuda.synchronize if cuda else lambda: None
    peak_bytes = _measure_peak_on_gpu(action) if cuda else _measure_peak_on_cpu(action)
    seconds = []
    for _ in range(repeat):
        wait_for_gpu()
        began = read_clock()
        action()
        wait_for_gpu()
        seconds.append(read_clock() - began)
    return MeasuredCost(1e3 * median(seconds), peak_bytes / 2**20)


def _measure_peak_on_gpu(action: Callable[[], Any]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


def _measure_peak_on_cpu(action: Callable[[], Any]) -> int:
    """Adds up the allocations that torch's profiler records, in the order of their time."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        action()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))
