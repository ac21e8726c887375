"""The picture that a run leaves beside its summary: `curves.png`, drawn from TensorBoard's files, so of all
lives of the run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.tracking.tensorboard_files import read_scalars

SMOOTHED = 5
"""Number of drawn steps whose mean is a point of a thick line."""
MAX_DRAWN = 10_000
"""Steps of a line, about. Of a longer run a random share is drawn."""
PANELS = {
    "off-policy": {"staleness/mean": "mean staleness", "offpolicy/ess": "effective sample size"},
    "policy": {"policy/entropy": "entropy", "optimizer/grad_norm": "gradient norm"},
}
"""Title of a panel -> tags and their labels."""


def draw_curves(folder: Path, evaluations: Sequence[dict[str, Any]]) -> Path:
    """Draws the run in `folder`; `evaluations` as in its summary. Returns the picture. Raises OSError when it
    cannot be written."""
    from matplotlib.figure import Figure

    drawn = {"reward/mean", *(tag for panel in PANELS.values() for tag in panel)}
    scalars = read_scalars(folder / "tensorboard", drawn, MAX_DRAWN)
    figure = Figure(figsize=(5.5 * (1 + len(PANELS)), 4))
    reward, *others = figure.subplots(1, 1 + len(PANELS))
    if scalars["reward/mean"]:
        _draw_line(reward, scalars["reward/mean"], f"sampled, mean of {SMOOTHED} steps", "C0")
    scored = [one for one in evaluations if one["avg"] is not None]
    for number, name in enumerate(dict.fromkeys(one["set"] for one in scored)):
        _draw_evaluations(reward, [one for one in scored if one["set"] == name], f"C{1 + number}")
    reward.set(title="reward", xlabel="step")
    reward.legend()
    for panel, (title, tags) in zip(others, PANELS.items(), strict=True):
        for number, (tag, label) in enumerate((tag, label) for tag, label in tags.items() if scalars[tag]):
            axis = panel if not number else panel.twinx()
            _draw_line(axis, scalars[tag], label, f"C{number}")
            axis.set_ylabel(label, color=f"C{number}")
        panel.set(title=title, xlabel="step")
    figure.tight_layout()
    path = folder / "curves.png"
    figure.savefig(path, dpi=110)
    return path


def _draw_evaluations(axis: Any, entries: Sequence[dict[str, Any]], color: str) -> None:
    """Draws the averages on one set, with their intervals."""
    averages = [one["avg"] for one in entries]
    intervals = [one["avg_ci95"] or [one["avg"]] * 2 for one in entries]
    arms = [
        [average - low for average, (low, _) in zip(averages, intervals, strict=True)],
        [high - average for average, (_, high) in zip(averages, intervals, strict=True)],
    ]
    versions, label = [one["version"] for one in entries], f"{entries[0]['set']}, 95 %"
    # An interval of draws may miss the mean by a rounding error.
    arms = [[max(0.0, arm) for arm in side] for side in arms]
    axis.errorbar(versions, averages, yerr=arms, color=color, marker="o", capsize=3, label=label)


def _draw_line(axis: Any, values_by_step: Mapping[int, float], label: str, color: str) -> None:
    """Draws the values as a thin line, and the mean of the last few as a thick one."""
    steps, values = zip(*sorted(values_by_step.items()), strict=True)
    means = [
        sum(part) / len(part)
        for i in range(len(values))
        if (part := values[max(0, i - SMOOTHED + 1) : i + 1])
    ]
    axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    axis.plot(steps, means, color=color, linewidth=1.8, label=label)
