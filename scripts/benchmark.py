"""Asynchronous against on-policy training on the same work.

    scripts/benchmark.sh [--setting simulated|real|both] [--seeds N] [--steps N] [--json FILE] [--png FILE]

`real` trains the tiny model with vLLM on this machine. Where generators and learner share two cores, overlap has little to
give: both sides compete for the same arithmetic. `simulated` shows the overlap itself: engine and learner keep time (so many
tokens a second) and use no CPU, while leases, buffer, sockets, weights and Ray are the real ones. Both sides are balanced,
lengths are lognormal. `of bound` is the share of max(generation, training): the time that the slower side alone would need for
the tokens of the measured steps, divided by the time they took. The first and the last steps, in which the pipeline fills and
drains, are not measured.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
GROUPS, SAMPLES, STALENESS = 8, 2, 3
RATE, MEAN_TOKENS = 100, 150
SLOTS = (STALENESS + 1) * GROUPS * SAMPLES
WARM_UP, DRAIN = 6, 4
TARGET = 0.6

SIMULATED = [
    "generators.engine=simulated", "learner.engine=simulated", "eval.prompts=0", "generators.count=2",
    f"learner.groups_per_step={GROUPS}", f"learner.samples_per_prompt={SAMPLES}", "generators.max_model_len=2000",
    "sampling.max_tokens=1900", f"generators.max_sequences={SLOTS}", f"generators.simulated.slots={SLOTS}",
    f"generators.simulated.tokens_per_s={RATE}", f"generators.simulated.mean_tokens={MEAN_TOKENS}",
    f"generators.simulated.train_tokens_per_s={GROUPS * SAMPLES * RATE}",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    setting: str
    name: str
    overrides: tuple[str, ...]
    steps: int


@dataclass(frozen=True)
class Result:
    setting: str
    name: str
    seed: int
    steps_per_s: float
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    share_of_bound: float | None
    masked_share: float
    idle_learner: float
    idle_generators: float
    staleness_mean: float
    staleness_max: int
    seconds_to_reward: float | None
    curve: list[tuple[float, float]]
    """(seconds, reward) of each step."""


def cases(setting: str, steps: int | None) -> list[Case]:
    found = []
    if setting in ("simulated", "both"):
        for cv, on_late in ((0.5, "wait"), (1.0, "mask")):
            lengths = f"generators.simulated.cv={cv}"
            waits = (lengths, "mode=on_policy")
            overlaps = (lengths, f"staleness.max_versions={STALENESS}", f"staleness.on_late={on_late}")
            found.append(
                Case("simulated", f"on-policy, CV {cv}", (*SIMULATED, *waits), (steps or 60) // 4 + WARM_UP + DRAIN)
            )
            found.append(
                Case("simulated", f"async S={STALENESS} {on_late}, CV {cv}", (*SIMULATED, *overlaps), steps or 60)
            )
    if setting in ("real", "both"):
        for name, overrides in (("on-policy", ("mode=on_policy",)), ("async S=2", ())):
            found.append(Case("real", name, (*overrides, "eval.prompts=0"), steps or 100))
    return found


def measure(case: Case, seed: int, outputs: Path) -> Result:
    """One run, as a user starts it. Raises RuntimeError with its output when it fails."""
    name = re.sub(r"[^\w.]+", "-", f"{case.setting} {case.name} {seed}")
    command = [sys.executable, str(ROOT / "scripts/train.py"), f"run.outputs={outputs}", f"run.name={name}"]
    command += [f"run.seed={seed}", f"run.steps={case.steps}", "learner.checkpoint_every=1000000", *case.overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    summary = json.loads((outputs / name / "summary.json").read_text())
    scalars = read_scalars(outputs / name / "tensorboard", ("time/seconds", "length/mean", "reward/mean"))
    seconds, lengths, rewards = (scalars[key] for key in ("time/seconds", "length/mean", "reward/mean"))
    window = seconds[-DRAIN - 1] - seconds[WARM_UP - 1]
    tokens = sum(lengths[WARM_UP:-DRAIN]) * SAMPLES * GROUPS
    averaged = [mean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
    return Result(
        setting=case.setting,
        name=case.name,
        seed=seed,
        steps_per_s=(len(seconds) - WARM_UP - DRAIN) / window,
        generated_tokens_per_s=summary["throughput"]["generated_tokens_per_s"],
        trained_tokens_per_s=summary["throughput"]["trained_tokens_per_s"],
        share_of_bound=tokens / (GROUPS * SAMPLES * RATE) / window if case.setting == "simulated" else None,
        masked_share=summary["tokens"]["masked"] / max(1, summary["tokens"]["generated"]),
        idle_learner=summary["idle"]["learner"],
        idle_generators=summary["idle"]["generators"],
        staleness_mean=summary["staleness"]["mean"],
        staleness_max=summary["staleness"]["max"],
        seconds_to_reward=next((t for t, r in zip(seconds, averaged, strict=True) if r >= TARGET), None),
        curve=list(zip(seconds, averaged, strict=True)),
    )


def read_scalars(folder: Path, names: tuple[str, ...]) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in names}


def tables(results: list[Result]) -> list[Table]:
    found = []
    for setting in dict.fromkeys(result.setting for result in results):
        table = Table(title=f"{setting}, means over seeds", title_justify="left")
        for column in (
            "", "steps/s", "tok/s\ngenerated", "tok/s\ntrained", "of\nbound", "masked", "idle\nlearner", "idle\ngenerators",
            "staleness\nmean (max)", f"s to\nreward {TARGET}",
        ):  # fmt: skip
            table.add_column(column, justify="left" if not column else "right", no_wrap=True)
        mine = [result for result in results if result.setting == setting]
        for name in dict.fromkeys(result.name for result in mine):
            table.add_row(name, *row([result for result in mine if result.name == name]))
        found.append(table)
    return found


def row(runs: list[Result]) -> list[str]:
    def average(key: str) -> float | None:
        values = [getattr(run, key) for run in runs]
        return None if None in values else mean(values)

    share, reached = average("share_of_bound"), average("seconds_to_reward")
    return [
        f"{average('steps_per_s'):.2f}",
        f"{average('generated_tokens_per_s'):,.0f}",
        f"{average('trained_tokens_per_s'):,.0f}",
        "–" if share is None else f"{share:.3f}",
        f"{average('masked_share'):.1%}",
        f"{average('idle_learner'):.0%}",
        f"{average('idle_generators'):.0%}",
        f"{average('staleness_mean'):.2f} ({max(run.staleness_max for run in runs)})",
        "–" if reached is None or runs[0].setting == "simulated" else f"{reached:.0f}",
    ]


def plot(results: list[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = list(dict.fromkeys(result.setting for result in results))
    figure, axes = plt.subplots(1, len(settings), figsize=(6.5 * len(settings), 4), squeeze=False)
    for axis, setting in zip(axes[0], settings, strict=True):
        mine = [result for result in results if result.setting == setting]
        names = list(dict.fromkeys(result.name for result in mine))
        if setting == "simulated":
            shares = [mean(r.share_of_bound or 0.0 for r in mine if r.name == name) for name in names]
            bars = axis.barh(
                names[::-1], shares[::-1], color=["#d95f02" if "async" in n else "#7570b3" for n in names[::-1]]
            )
            axis.bar_label(bars, fmt="%.2f", padding=3)
            axis.axvline(1.0, color="black", linestyle=":", linewidth=1)
            axis.set(
                xlim=(0, 1.15), xlabel="share of max(generation, training)", title="simulated: steps against the bound"
            )
        else:
            for name, color in zip(names, ("#7570b3", "#d95f02"), strict=False):
                for number, result in enumerate(r for r in mine if r.name == name):
                    axis.plot(*zip(*result.curve, strict=True), color=color, label=None if number else name, alpha=0.8)
            axis.set(
                xlabel="seconds since version 0",
                ylabel="reward (mean of 5 steps)",
                title="real: tiny model, vLLM, this machine",
            )
            axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=("simulated", "real", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case, interleaved (default 3)")
    parser.add_argument("--steps", type=int, help="steps of a run (default: simulated 60, real 100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run's figures")
    parser.add_argument("--png", type=Path, default=Path("benchmark.png"), metavar="FILE")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or (arguments.steps is not None and arguments.steps <= WARM_UP + DRAIN):
        parser.error(
            f"--seeds must be at least 1 and --steps above {WARM_UP + DRAIN}, got {arguments.seeds} and {arguments.steps}"
        )
    console, results = Console(width=None if sys.stdout.isatty() else 120), []
    work = [(case, seed) for seed in range(arguments.seeds) for case in cases(arguments.setting, arguments.steps)]
    with tempfile.TemporaryDirectory(prefix="slipstream-benchmark-") as outputs:
        for number, (case, seed) in enumerate(work, 1):
            console.print(
                f"run {number} of {len(work)}: {case.setting}, {case.name}, seed {seed}, {case.steps} steps ..."
            )
            results.append(measure(case, seed, Path(outputs)))
    for table in tables(results):
        console.print(table)
    plot(results, arguments.png)
    console.print(f"plot: {arguments.png}")
    if arguments.json:
        machine: dict[str, Any] = {"machine": platform.platform(), "processor": platform.processor()}
        arguments.json.write_text(json.dumps(machine | {"runs": [asdict(result) for result in results]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
