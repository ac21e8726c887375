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
