"""Rules that many fields share. Each gives a problem, with field, rule and value, for each field that breaks it."""

import math


def positive(**fields: float | None) -> list[str]:
    """A problem for each field that is not a finite number above zero; None means "not set" and is fine."""
    return [
        f"{name} must be a finite number above 0, got {value}"
        for name, value in fields.items()
        if value is not None and not (math.isfinite(value) and value > 0)
    ]


def not_negative(**fields: float) -> list[str]:
    return [
        f"{name} must be a finite number of at least 0, got {value}"
        for name, value in fields.items()
        if not (math.isfinite(value) and value >= 0)
    ]


def within_one(**fields: float | None) -> list[str]:
    return [
        f"{name} must be in [0, 1], got {value}"
        for name, value in fields.items()
        if value is not None and not 0 <= value <= 1
    ]


LEAST_GPU_SHARE = 0.05
"""The smallest part of a GPU that is worth a process."""


def gpu_share(name: str, gpus: float | None, *, most: float) -> list[str]:
    """A problem unless the process takes no GPU, a part of one, or several whole ones; None means "not set" and is fine."""
    if gpus is None or gpus == 0 or LEAST_GPU_SHARE <= gpus <= 1 or (1 < gpus <= most and gpus % 1 == 0):
        return []
    several = "" if most <= 1 else " or a whole number"
    return [f"{name} must be 0, in [{LEAST_GPU_SHARE}, 1]{several}, got {gpus}"]
