"""The report of `study_staleness.py`: docs/staleness.md and its plot, from the runs alone."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import study_staleness as study
from slipstream_bench.intervals import interval

BEGIN, END = "<!-- study: begin -->", "<!-- study: end -->"


def write(outcomes: Sequence["study.Outcome"], docs: Path, arguments: str) -> None:
    """Puts the study's table between two marks of `docs/staleness.md`, whose other words stay, and draws
    `docs/staleness.png`."""
    page = docs / "staleness.md"
    text = page.read_text() if page.exists() else f"# Staleness\n\n{BEGIN}\n{END}\n"
    found = "\n".join([BEGIN, *_lines(list(outcomes), arguments), END])
    page.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: found, text, flags=re.S))
    plot(list(outcomes), docs / "staleness.png")


def _lines(outcomes: list["study.Outcome"], arguments: str) -> list[str]:
    cells = study.cells(outcomes)
    columns = sorted({column for _, column in cells if column != "ess"}, key=int) + ["ess"]
    job = outcomes[0].job
    seeds = len({outcome.job.seed for outcome in outcomes})
    hours = sum(outcome.seconds for outcome in outcomes) / 3600
    lines = [
        (
            f"`scripts/study_staleness.sh {arguments}`: {len(outcomes)} runs of {job.steps} steps, learning"
            f" rate {job.lr:g}, {seeds} seeds, {hours:.1f} core hours. Held-out reward of the last version on"
            f" {study.HELD_OUT} prompts, mean ± half of the 95 % interval over seeds (Student's t):"
        ),
        "",
        "| | " + " | ".join(_heading(column, outcomes) for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for algorithm in dict.fromkeys(name for name, _ in cells):
        row = [_cell(cells.get((algorithm, column), [])) for column in columns]
        lines.append(f"| {algorithm} | " + " | ".join(row) + " |")
    lines += [
        "",
        (
            "Effective sample size of the tokens' π_θ / μ, mean over the steps (in brackets its lowest step,"
            " mean over seeds):"
        ),
        "",
        "| | " + " | ".join(_heading(column, outcomes) for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for algorithm in dict.fromkeys(name for name, _ in cells):
        row = []
        for column in columns:
            runs = cells.get((algorithm, column), [])
            figure = (
                f"{mean(mean(o.ess) for o in runs):.2f} ({mean(min(o.ess) for o in runs):.2f})"
                if runs
                else ""
            )
            row.append(figure)
        lines.append(f"| {algorithm} | " + " | ".join(row) + " |")
    return lines


def _heading(column: str, outcomes: list["study.Outcome"]) -> str:
    if column != "ess":
        return f"S = {column}"
    lags = [o.mean_lag for o in outcomes if o.job.controller == "ess"]
    most = max((o.job.lag for o in outcomes if o.job.controller == "ess"), default=0)
    return f"controller, S = {most} (mean lag {mean(lags):.1f})" if lags else "controller"


def _cell(runs: list["study.Outcome"]) -> str:
    rewards = [run.reward for run in runs if math.isfinite(run.reward)]
    lost = len(runs) - len(rewards)
    if not rewards:
        return f"{lost} of {lost} ended in a gradient that is not finite" if lost else ""
    value = "{:.3f} ± {:.3f}".format(*interval(rewards))
    return value + (f" ({lost} ended in a gradient that is not finite)" if lost else "")


def plot(outcomes: list["study.Outcome"], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = study.cells(outcomes)
    algorithms = list(dict.fromkeys(name for name, _ in cells))
    lags = sorted({int(column) for _, column in cells if column != "ess"})
    colors = dict(
        zip(algorithms, ("#666666", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e"), strict=False)
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6))
    for number, algorithm in enumerate(algorithms):
        points = [
            (place, interval(_rewards(cells.get((algorithm, str(lag)), []))))
            for place, lag in enumerate(lags)
        ]
        shift = (number - len(algorithms) / 2) * 0.06
        left.errorbar(
            [place + shift for place, _ in points],
            [value for _, (value, _) in points],
            [width for _, (_, width) in points],
            label=algorithm,
            color=colors[algorithm],
            marker="o",
            markersize=4,
            capsize=3,
            linewidth=1.2,
        )
        if controlled := cells.get((algorithm, "ess")):
            value, width = interval(_rewards(controlled))
            left.errorbar(
                [len(lags) + shift],
                [value],
                [width],
                color=colors[algorithm],
                marker="D",
                capsize=3,
                linestyle="none",
            )
    left.set_xticks(range(len(lags) + 1), [*(f"S = {lag}" for lag in lags), f"controller,\nS = {max(lags)}"])
    left.set(ylabel="held-out reward", title="final reward, mean and 95 % interval over seeds")
    left.legend(fontsize=8)
    for algorithm in algorithms:
        for column, style in ((str(max(lags)), "-"), ("ess", ":")):
            if runs := cells.get((algorithm, column)):
                length = min(len(run.curve) for run in runs)
                curve = [mean(run.curve[step] for run in runs) for step in range(length)]
                smooth = [mean(curve[max(0, step - 9) : step + 1]) for step in range(length)]
                label = f"{algorithm}{', controller' if column == 'ess' else ''}"
                right.plot(smooth, style, color=colors[algorithm], label=label, linewidth=1.3)
    right.set(
        xlabel="step", ylabel="reward as sampled (mean of 10 steps)", title=f"learning at S = {max(lags)}"
    )
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _rewards(runs: list["study.Outcome"]) -> list[float]:
    return [run.reward for run in runs if math.isfinite(run.reward)] or [float("nan")]
