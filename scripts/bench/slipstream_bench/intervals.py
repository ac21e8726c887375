"""Confidence intervals of a few measurements."""

from statistics import mean, stdev

T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for a two-sided 95 % interval, by the number of measurements."""


def confidence_interval(values: list[float]) -> tuple[float, float]:
    """Returns the mean and half the width of its 95 % interval, which is NaN for fewer than two values."""
    if len(values) < 2:
        return mean(values), float("nan")
    return mean(values), T95[min(len(values), max(T95))] * stdev(values) / len(values) ** 0.5
