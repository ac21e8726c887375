"""Report of `study_staleness.py`: writes docs/staleness.md and its plot from the outcomes of the runs."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from slipstream_bench.intervals import confidence_interval
from slipstream_bench.study_outcomes import CONTROLLER_COLUMN, HELD_OUT, StudyOutcome, group_outcomes

BEGIN, END = "<!-- study: begin -->", "<!-- study: end -->"
COLORS = ("#666666", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e")
"""Colors of the plot's algorithms, in their order."""
Groups = dict[tuple[str, str], list[StudyOutcome]]
"""Outcomes by algorithm and column."""


def write_report(outcomes: Sequence[StudyOutcome], docs: Path, arguments: str) -> None:
    """Puts the study's tables between two marks of `docs/staleness.md` and draws `docs/staleness.png`.

    The words outside the marks stay. `arguments` are those of the command, which the page names.
    """
    page = docs / "staleness.md"
    text = page.read_text() if page.exists() else f"# Staleness\n\n{BEGIN}\n{END}\n"
    report = "\n".join([BEGIN, *_format_report(outcomes, arguments), END])
    page.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: report, text, flags=re.S))
    plot_outcomes(outcomes, docs / "staleness.png")


def _format_report(outcomes: Sequence[StudyOutcome], arguments: str) -> list[str]:
    job = outcomes[0].job
    num_seeds = len({outcome.job.seed for outcome in outcomes})
    hours = sum(outcome.seconds for outcome in outcomes) / 3600
    return [
        (
            f"`scripts/study_staleness.sh {arguments}`: {len(outcomes)} runs of {job.steps} steps, learning"
            f" rate {job.lr:g}, {num_seeds} seeds, {hours:.1f} core hours. Held-out reward of the last"
            f" version on {HELD_OUT} prompts, mean ± half of the 95 % interval over seeds (Student's t):"
        ),
        "",
        *_format_table(outcomes, _format_rewards),
        "",
        (
            "Effective sample size of the tokens' π_θ / μ, mean over the steps (in brackets its lowest step,"
            " mean over seeds):"
        ),
        "",
        *_format_table(outcomes, _format_sample_sizes),
    ]


def _format_table(
    outcomes: Sequence[StudyOutcome], format_cell: Callable[[list[StudyOutcome]], str]
) -> list[str]:
    """Makes a Markdown table with a row for each algorithm and a column for each S and for the controller."""
    groups = group_outcomes(outcomes)
    columns = [*map(str, _sort_bounds(groups)), CONTROLLER_COLUMN]
    lines = [
        "| | " + " | ".join(_format_heading(column, outcomes) for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for algorithm in _list_algorithms(groups):
        row = [format_cell(groups.get((algorithm, column), [])) for column in columns]
        lines.append(f"| {algorithm} | " + " | ".join(row) + " |")
    return lines


def _list_algorithms(groups: Groups) -> list[str]:
    return list(dict.fromkeys(algorithm for algorithm, _ in groups))


def _sort_bounds(groups: Groups) -> list[int]:
    return sorted({int(column) for _, column in groups if column != CONTROLLER_COLUMN})


def _format_heading(column: str, outcomes: Sequence[StudyOutcome]) -> str:
    if column != CONTROLLER_COLUMN:
        return f"S = {column}"
    controlled = [outcome for outcome in outcomes if outcome.job.controller == "ess"]
    if not controlled:
        return "controller"
    max_versions = max(outcome.job.max_versions for outcome in controlled)
    staleness = mean(outcome.mean_staleness for outcome in controlled)
    return f"controller, S = {max_versions} (mean staleness {staleness:.1f})"


def _format_rewards(runs: list[StudyOutcome]) -> str:
    rewards = [run.reward for run in runs if math.isfinite(run.reward)]
    num_failed = len(runs) - len(rewards)
    if not rewards:
        return f"{num_failed} of {num_failed} ended in a gradient that is not finite" if num_failed else ""
    value = "{:.3f} ± {:.3f}".format(*confidence_interval(rewards))
    return value + (f" ({num_failed} ended in a gradient that is not finite)" if num_failed else "")


def _format_sample_sizes(runs: list[StudyOutcome]) -> str:
    if not runs:
        return ""
    return f"{mean(mean(run.ess) for run in runs):.2f} ({mean(min(run.ess) for run in runs):.2f})"


def plot_outcomes(outcomes: Sequence[StudyOutcome], path: Path) -> None:
    """Draws final rewards by S and the learning curves at the largest S, side by side, into `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = group_outcomes(outcomes)
    colors = dict(zip(_list_algorithms(groups), COLORS, strict=False))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6))
    _plot_final_rewards(left, groups, colors)
    _plot_learning_curves(right, groups, colors)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_final_rewards(axis: Any, groups: Groups, colors: dict[str, str]) -> None:
    bounds = _sort_bounds(groups)
    for number, (algorithm, color) in enumerate(colors.items()):
        # Points of one S stand a little beside each other, so that their intervals can be told apart.
        shift = (number - len(colors) / 2) * 0.06
        points = [
            confidence_interval(_finite_rewards(groups.get((algorithm, str(bound)), []))) for bound in bounds
        ]
        axis.errorbar(
            [place + shift for place in range(len(bounds))],
            [value for value, _ in points],
            [width for _, width in points],
            label=algorithm,
            color=color,
            marker="o",
            markersize=4,
            capsize=3,
            linewidth=1.2,
        )
        if controlled := groups.get((algorithm, CONTROLLER_COLUMN)):
            value, width = confidence_interval(_finite_rewards(controlled))
            place = [len(bounds) + shift]
            axis.errorbar(place, [value], [width], color=color, marker="D", capsize=3, linestyle="none")
    labels = [*(f"S = {bound}" for bound in bounds), f"controller,\nS = {max(bounds)}"]
    axis.set_xticks(range(len(bounds) + 1), labels)
    axis.set(ylabel="held-out reward", title="final reward, mean and 95 % interval over seeds")
    axis.legend(fontsize=8)


def _plot_learning_curves(axis: Any, groups: Groups, colors: dict[str, str]) -> None:
    largest = max(_sort_bounds(groups))
    for algorithm, color in colors.items():
        for column, style in ((str(largest), "-"), (CONTROLLER_COLUMN, ":")):
            if runs := groups.get((algorithm, column)):
                length = min(len(run.curve) for run in runs)
                curve = [mean(run.curve[step] for run in runs) for step in range(length)]
                smooth = [mean(curve[max(0, step - 9) : step + 1]) for step in range(length)]
                label = f"{algorithm}{', controller' if column == CONTROLLER_COLUMN else ''}"
                axis.plot(smooth, style, color=color, label=label, linewidth=1.3)
    axis.set(xlabel="step", ylabel="reward as sampled (mean of 10 steps)", title=f"learning at S = {largest}")
    axis.legend(fontsize=8)


def _finite_rewards(runs: list[StudyOutcome]) -> list[float]:
    return [run.reward for run in runs if math.isfinite(run.reward)] or [float("nan")]
