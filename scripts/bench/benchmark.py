"""Compares asynchronous with on-policy training on the same work.

    scripts/benchmark.sh [--setting simulated|throttled|real|all] [--seeds N] [--steps N] [--folder FOLDER]

`simulated` shows the overlap alone. Engine and learner keep time (so many tokens a second) and use no CPU;
leases, buffer, sockets, weights and Ray are the real ones. Both sides are balanced and lengths are lognormal.
`of bound` is the share of max(generation, training): the time that the slower side alone would need for the
tokens of the measured steps, divided by the time they took. The first and the last steps, in which the
pipeline fills and drains, are not measured.

`throttled` is real: vLLM samples, the learner trains, and lengths have a long tail. Each side has hardware of
its own: in both modes the two sides take turns of some milliseconds and are stopped in between
(scripts/bench/slipstream_bench/turns.py).

`real` is the default run: generators and learner compete for the cores of this machine. On two cores overlap
gains little. There is a third case, in which they take turns on all cores (`placement.mode=colocated`).

Tables and intervals go to the console. Pictures and the figures of every run go to --folder.
"""

import argparse
import json
import math
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream_bench.intervals import confidence_interval
from slipstream_bench.turns import Turns

ROOT = Path(__file__).parents[2]
SETTINGS = ("simulated", "throttled", "real")
GROUPS, SAMPLES, STALENESS = 8, 2, 3
RATE, MEAN_TOKENS = 100, 150
SLOTS = (STALENESS + 1) * GROUPS * SAMPLES
WARM_UP, DRAIN = 6, 4
TARGETS = {"real": 0.8, "throttled": 0.6}
"""Held-out reward, by setting. The benchmark measures the time until a run reaches it."""
GENERATORS_SHARE = 0.64
"""Share of the time that generators have in `throttled`. With it both sides need about as long for a step."""
PERIOD_S = 0.02
"""Seconds in which each side has one turn."""

SIMULATED = [
    "generators.engine=simulated",
    "learner.engine=simulated",
    "eval.prompts=0",
    "generators.count=2",
    f"learner.groups_per_step={GROUPS}",
    f"learner.samples_per_prompt={SAMPLES}",
    "generators.max_model_len=2000",
    "sampling.max_tokens=1900",
    f"generators.max_sequences={SLOTS}",
    f"generators.simulated.slots={SLOTS}",
    f"generators.simulated.tokens_per_s={RATE}",
    f"generators.simulated.mean_tokens={MEAN_TOKENS}",
    f"generators.simulated.train_tokens_per_s={GROUPS * SAMPLES * RATE}",
]


ON_POLICY, ASYNC, COLOCATED = "on-policy", "async S=2", "colocated S=2"
THROTTLED = [
    "task.args={numbers:4,longest:24}", "sampling.max_tokens=32", "generators.count=1", "eval.every=20",
]  # fmt: skip
"""Overrides of `throttled`: half of the lists have 4 or 5 numbers, and one in forty has 24."""


@dataclass(frozen=True)
class BenchmarkCase:
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
    wall_s: float
    """Seconds from the start of the command to its end."""
    generators_share: float | None
    """Measured share of the time that generators had; None in settings without turns."""
    curve: list[tuple[float, float]]
    """(seconds, sampled reward) of each step; the reward is a mean over five steps."""
    held_out: list[tuple[int, float, float]]
    """(version, seconds until the version existed, reward) of each evaluation."""

    @property
    def seconds_to_target(self) -> float | None:
        """Seconds until the held-out reward reached the target, or None if it never did.

        The reward is assumed to rise evenly between two evaluations.
        """
        target = TARGETS.get(self.setting, math.inf)
        for (_, before, low), (_, after, high) in pairwise(self.held_out):
            if low < target <= high:
                return before + (after - before) * (target - low) / (high - low)
        return None


def list_cases(setting: str, steps: int | None) -> list[BenchmarkCase]:
    found = []
    if setting in ("simulated", "all"):
        for cv, on_late in ((0.5, "wait"), (1.0, "mask")):
            lengths = f"generators.simulated.cv={cv}"
            waits = (lengths, "mode=on_policy")
            overlaps = (lengths, f"staleness.max_versions={STALENESS}", f"staleness.on_late={on_late}")
            found.append(
                BenchmarkCase(
                    "simulated",
                    f"on-policy, CV {cv}",
                    (*SIMULATED, *waits),
                    (steps or 60) // 4 + WARM_UP + DRAIN,
                )
            )
            found.append(
                BenchmarkCase(
                    "simulated",
                    f"async S={STALENESS} {on_late}, CV {cv}",
                    (*SIMULATED, *overlaps),
                    steps or 60,
                )
            )
    for real, overrides, usual in (("throttled", THROTTLED, 160), ("real", ["eval.every=20"], 320)):
        if setting in (real, "all"):
            found.append(BenchmarkCase(real, ON_POLICY, (*overrides, "mode=on_policy"), steps or usual))
            found.append(BenchmarkCase(real, ASYNC, (*overrides, "staleness.max_versions=2"), steps or usual))
    if setting in ("real", "all"):
        turns = ("eval.every=20", "staleness.max_versions=2", "placement.mode=colocated")
        found.append(BenchmarkCase("real", COLOCATED, turns, steps or 320))
    return found


def measure_run(case: BenchmarkCase, seed: int, outputs: Path) -> Result:
    """Starts one run as a user does and waits for its end.

    Raises RuntimeError with its output when it fails.
    """
    name = re.sub(r"[^\w.]+", "-", f"{case.setting} {case.name} {seed}")
    command = [sys.executable, "-P", "-m", "slipstream.train", f"run.outputs={outputs}", f"run.name={name}"]
    command += [
        f"run.seed={seed}",
        f"run.steps={case.steps}",
        "learner.checkpoint_every=1000000",
        *case.overrides,
    ]
    began = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        turns = Turns(run.pid, GENERATORS_SHARE, PERIOD_S) if case.setting == "throttled" else None
        try:
            with turns or nullcontext():
                said, _ = run.communicate()
        except BaseException:
            run.terminate()
            raise
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{said[-3000:]}")
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
        wall_s=time.monotonic() - began,
        generators_share=turns.measured_share if turns else None,
        curve=list(zip(seconds, averaged, strict=True)),
        held_out=[
            (found["version"], seconds[found["version"] - 1] if found["version"] else 0.0, found["avg"])
            for found in summary["evaluations"]
            if found["set"] == "held_out"
        ],
    )


def read_scalars(folder: Path, names: tuple[str, ...]) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in names}


def make_tables(results: list[Result]) -> list[Table]:
    found = []
    for setting in dict.fromkeys(result.setting for result in results):
        table = Table(title=f"{setting}, means over seeds", title_justify="left")
        last = "of\nbound" if setting == "simulated" else "held out\nat the end"
        for column in (
            "",
            "steps/s",
            "tok/s\ngenerated",
            "tok/s\ntrained",
            "masked",
            "idle\nlearner",
            "idle\ngenerators",
            "staleness\nmean (max)",
            last,
            f"s to\n{TARGETS.get(setting, '')}",
            "whole\ncommand, s",
        ):
            table.add_column(column, justify="left" if not column else "right", no_wrap=True)
        mine = [result for result in results if result.setting == setting]
        for name in dict.fromkeys(result.name for result in mine):
            table.add_row(name, *format_row([result for result in mine if result.name == name]))
        found.append(table)
    return found


def format_row(runs: list[Result]) -> list[str]:
    def average_over_runs(key: str) -> float:
        return mean(getattr(run, key) for run in runs)

    reached = [run.seconds_to_target for run in runs]
    times = [seconds for seconds in reached if seconds is not None]
    return [
        f"{average_over_runs('steps_per_s'):.2f}",
        f"{average_over_runs('generated_tokens_per_s'):,.0f}",
        f"{average_over_runs('trained_tokens_per_s'):,.0f}",
        f"{average_over_runs('masked_share'):.1%}",
        f"{average_over_runs('idle_learner'):.0%}",
        f"{average_over_runs('idle_generators'):.0%}",
        f"{average_over_runs('staleness_mean'):.2f} ({max(run.staleness_max for run in runs)})",
        (
            f"{average_over_runs('share_of_bound'):.3f}"
            if runs[0].share_of_bound
            else f"{mean(run.held_out[-1][2] for run in runs):.3f}"
        ),
        f"{mean(times):.0f}" if len(times) == len(runs) else "–",
        f"{average_over_runs('wall_s'):.0f}",
    ]


def compare_modes(results: list[Result], setting: str) -> list[str]:
    """Compares asynchronous with on-policy runs of one setting with real training, seed by seed.

    Returns lines with means and their 95 % intervals.
    """
    pairs = _pair_by_seed(results, ON_POLICY, ASYNC)
    faster = [after.steps_per_s / before.steps_per_s for before, after in pairs]
    lines = [f"steps a second, asynchronous / on-policy: {_plus_minus(faster)}"]
    if turns := _pair_by_seed(results, ON_POLICY, COLOCATED):
        faster = [after.steps_per_s / before.steps_per_s for before, after in turns]
        lines.append(f"steps a second, colocated / on-policy: {_plus_minus(faster)}")
    times = [(before.seconds_to_target, after.seconds_to_target) for before, after in pairs]
    sooner = [before / after for before, after in times if before is not None and after is not None]
    if len(sooner) == len(pairs):
        lines.append(f"held-out reward {TARGETS[setting]}, sooner by: {_plus_minus(sooner)}")
    lost = [mean(x[2] - y[2] for x, y in zip(a.held_out[1:], b.held_out[1:], strict=True)) for a, b in pairs]
    lines.append(
        "held-out reward that a version loses for being trained on stale tokens, mean over versions:"
        f" {_plus_minus(lost)}"
    )
    shares = [share for pair in pairs for run in pair if (share := run.generators_share) is not None]
    if shares:
        lines.append(
            f"share of the time that generators had: {min(shares):.3f} to {max(shares):.3f}, in turns of "
            f"{1e3 * PERIOD_S * GENERATORS_SHARE:.1f} ms; the learner had the rest"
        )
    return lines


def _pair_by_seed(results: list[Result], before: str, after: str) -> list[tuple[Result, Result]]:
    """Returns the runs of two cases that have the same seed."""
    return [
        (one, other)
        for one in results for other in results
        if (one.name, other.name) == (before, after) and one.seed == other.seed
    ]  # fmt: skip


def _plus_minus(values: list[float]) -> str:
    center, half = confidence_interval(values)
    return f"{center:.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}") + f" ({len(values)} seeds)"


def write_figures(results: list[Result], folder: Path) -> None:
    """Writes the figures of all settings.

    It is called after each run, so that a run that fails costs no other.
    """
    machine: dict[str, Any] = {"machine": platform.platform(), "processor": platform.processor()}
    for setting in dict.fromkeys(result.setting for result in results):
        mine = [asdict(result) for result in results if result.setting == setting]
        (folder / f"{setting}.json").write_text(json.dumps(machine | {"runs": mine}, indent=1))


COLORS = {ON_POLICY: "#7570b3", ASYNC: "#d95f02", COLOCATED: "#1b9e77"}


def plot_results(results: list[Result], setting: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(result.name for result in results))
    if setting == "simulated":
        figure, axis = plt.subplots(figsize=(6.5, 4))
        shares = [mean(r.share_of_bound or 0.0 for r in results if r.name == name) for name in names]
        colors = [COLORS[ASYNC if "async" in name else ON_POLICY] for name in names]
        bars = axis.barh(names[::-1], shares[::-1], color=colors[::-1])
        axis.bar_label(bars, fmt="%.2f", padding=3)
        axis.axvline(1.0, color="black", linestyle=":", linewidth=1)
        axis.set(
            xlim=(0, 1.15),
            xlabel="share of max(generation, training)",
            title="simulated: steps against the bound",
        )
    else:
        figure, (by_time, by_step) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
        for name in names:
            for number, result in enumerate(r for r in results if r.name == name):
                style = {
                    "color": COLORS[name],
                    "label": None if number else name,
                    "alpha": 0.8,
                    "marker": ".",
                }
                versions, seconds, rewards = zip(*result.held_out, strict=True)
                by_time.plot(seconds, rewards, **style)
                by_step.plot(versions, rewards, **style)
        by_time.axhline(TARGETS[setting], color="black", linestyle=":", linewidth=1)
        by_time.set(
            xlabel="seconds since the first step began", ylabel="held-out reward", title=f"{setting}: by time"
        )
        by_step.set(xlabel="version", title="by training steps")
        by_time.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=(*SETTINGS, "all"), default="all")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case, interleaved (default 3)")
    parser.add_argument(
        "--steps", type=int, help="steps of a run (default: simulated 60, throttled 160, real 320)"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "outputs" / "benchmark", help="for pictures and figures"
    )
    arguments = parser.parse_args()
    if arguments.seeds < 1 or (arguments.steps is not None and arguments.steps <= WARM_UP + DRAIN):
        parser.error(
            f"--seeds must be at least 1 and --steps above {WARM_UP + DRAIN}, got {arguments.seeds} and"
            f" {arguments.steps}"
        )
    # A signal ends the benchmark as Ctrl-C does, so that no process stays stopped by the turns.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        # A command under `nohup` ignores SIGHUP; then it stays ignored.
        if signal.getsignal(ending) is not signal.SIG_IGN:
            signal.signal(ending, lambda number, frame: sys.exit(128 + number))
    console, results = Console(width=None if sys.stdout.isatty() else 150), []
    work = [
        (case, seed)
        for seed in range(arguments.seeds)
        for case in list_cases(arguments.setting, arguments.steps)
    ]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slipstream-benchmark-") as outputs:
        for number, (case, seed) in enumerate(work, 1):
            console.print(
                f"run {number} of {len(work)}: {case.setting}, {case.name}, seed {seed}, {case.steps}"
                " steps ..."
            )
            results.append(measure_run(case, seed, Path(outputs)))
            write_figures(results, arguments.folder)
    for table in make_tables(results):
        console.print(table)
    for setting in dict.fromkeys(result.setting for result in results):
        mine = [result for result in results if result.setting == setting]
        if setting != "simulated":
            console.print(f"{setting}:", *compare_modes(mine, setting), sep="\n  ")
        plot_results(mine, setting, arguments.folder / f"{setting}.png")
        console.print(f"picture and figures: {arguments.folder / setting}.png, .json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
