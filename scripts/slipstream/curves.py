"""The picture that a run leaves beside its summary: `curves.png`, drawn from TensorBoard's files, so of all
lives of the run."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SMOOTHED = 5
"""Number of steps whose mean is a point of a thick line."""
PANELS = {
    "off-policy": {"staleness/mean": "mean staleness", "offpolicy/ess": "effective sample size"},
    "policy": {"policy/entropy": "entropy", "optimizer/grad_norm": "gradient norm"},
}
"""Title of a panel -> tags and their labels."""

# It warns of each restart of a run, whose repeated steps it drops, as it should.
logging.getLogger("tensorboard").setLevel(logging.ERROR)


def draw_curves(folder: Path, evaluations: Sequence[dict[str, Any]]) -> Path:
    """Draws the run in `folder`; `evaluations` as in its summary. Returns the picture. Raises OSError when it
    cannot be written."""
    from matplotlib.figure import Figure

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    known = set(events.Tags()["scalars"])
    figure = Figure(figsize=(5.5 * (1 + len(PANELS)), 4))
    reward, *others = figure.subplots(1, 1 + len(PANELS))
    if "reward/mean" in known:
        _draw_line(reward, events, "reward/mean", f"sampled, mean of {SMOOTHED} steps", "C0")
    if evaluations:
        versions, held_out = ([one[key] for one in evaluations] for key in ("version", "reward"))
        arms = [one["ci95"][1] - one["reward"] for one in evaluations]
        reward.errorbar(
            versions, held_out, yerr=arms, color="C1", marker="o", capsize=3, label="held out, 95 %"
        )
    reward.set(title="reward", xlabel="step")
    reward.legend()
    for panel, (title, tags) in zip(others, PANELS.items(), strict=True):
        for number, (tag, label) in enumerate((tag, label) for tag, label in tags.items() if tag in known):
            axis = panel if not number else panel.twinx()
            _draw_line(axis, events, tag, label, f"C{number}")
            axis.set_ylabel(label, color=f"C{number}")
        panel.set(title=title, xlabel="step")
    figure.tight_layout()
    path = folder / "curves.png"
    figure.savefig(path, dpi=110)
    return path


def _draw_line(axis: Any, events: EventAccumulator, tag: str, label: str, color: str) -> None:
    """Draws each step as a thin line, and the mean of the last few as a thick one."""
    steps, values = zip(*((event.step, event.value) for event in events.Scalars(tag)), strict=True)
    means = [
        sum(part) / len(part)
        for i in range(len(values))
        if (part := values[max(0, i - SMOOTHED + 1) : i + 1])
    ]
    axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    axis.plot(steps, means, color=color, linewidth=1.8, label=label)
