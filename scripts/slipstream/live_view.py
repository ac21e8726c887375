"""The live view of a run: on a terminal one picture that is redrawn, elsewhere a line now and then."""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console as Rich
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from buffers import messages as m
from buffers.role_registry import MAX_NAMED, SILENT_S, name_some
from buffers.run_status import LedgerAccount, RunStatus
from configs.checks import find_warnings
from configs.schema import Config
from configs.staleness import Controller
from learners.memory import GIB, format_bytes
from slipstream.evaluation_report import describe_change, describe_entry, make_entry
from slipstream.generator_presence import GeneratorPresence
from slipstream.throughput import Throughput

LINE_EVERY_S = 2.0
STILL_S = 5.0
"""Seconds without a step after which the line says who waits for whom, and comes so seldom."""
TOOK = {"training": "time/train_s", "copying": "time/checkpoint_s", "writing": "time/checkpoint_s"}
"""First word of a learner's activity -> metric with the seconds that it took last time."""
MAX_SHOWN = 12
"""Roles that a row of the picture names."""
BARS = "▁▂▃▄▅▆▇█"


class LiveView:
    """Shows a run while the `with` block lasts; lines can be printed afterwards too."""

    def __init__(self, config: Config, folder: Path, resume_step: int | None) -> None:
        self._config, self._folder, self._first_step = config, folder, resume_step or 0
        self._throughput = Throughput(is_resumed=resume_step is not None)
        self._rich = Rich(highlight=False)
        self._live = (
            Live(console=self._rich, refresh_per_second=4, transient=True) if self._rich.is_terminal else None
        )
        self._began = time.monotonic()
        self._last_line = self._presence_at = 0.0
        self._presence = GeneratorPresence(config.engine_names)
        self._progress, self._progress_at = (-1, -1), self._began
        """Version and number of trained steps, and since when they are so."""
        self._rewards: dict[int, float] = {}
        """Mean reward by step."""
        self._num_restarts = self._num_buffer_restarts = 0
        self._evaluated: set[tuple[str, int]] = set()
        """Sets and versions whose evaluation was printed."""
        self._num_skipped = 0
        """Evaluations that were given up, as far as that was printed."""
        self._metrics: dict[str, float] = {}
        """Metrics of the last step."""
        self._said_what_stops = float("-inf")

    def __enter__(self) -> None:
        config = self._config
        self._rich.print(
            f"[bold]Slipstream[/] {config.mode}, {config.algo.name}, task {config.task.name}, "
            f"S = {config.max_versions} ({config.staleness.on_late}), {config.run.steps} steps of "
            f"{config.learner.groups_per_step} × {config.learner.samples_per_prompt} → {self._folder}",
            soft_wrap=True,
        )
        for warning in find_warnings(config):
            self._rich.print(f"[yellow]note:[/] {warning}", soft_wrap=True)
        if self._live is not None:
            self._live.start()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def print_line(self, text: str) -> None:
        self._rich.print(f"{self._format_clock()}  {text}", soft_wrap=True, markup=False)

    def show_news(self, news: m.RunNews) -> None:
        self._throughput.note_status(news.status)
        if (
            news.records
            and not self._rewards
            and (peak := news.records[0].metrics.get("memory/peak_gib")) is not None
        ):
            self.print_line(
                f"memory of a learner rank, measured after its first step: {format_bytes(peak * GIB)}"
            )
        self._metrics = news.records[-1].metrics if news.records else self._metrics
        self._rewards |= {
            record.step: record.metrics["reward/mean"]
            for record in news.records
            if "reward/mean" in record.metrics
        }
        for evaluation in news.evaluations:
            version = evaluation.result.version
            key = (evaluation.result.evaluation_set, version)
            if key not in self._evaluated and version >= self._first_step:
                self._evaluated.add(key)
                self.print_line(describe_entry(make_entry(evaluation)))
        if (num_skipped := news.status.skipped_evaluations) > self._num_skipped:
            self.print_line(
                f"{num_skipped - self._num_skipped} evaluations were given up, because a newer version was "
                "due before they had begun, or the learner went back (logs/buffer.log names them)"
            )
            self._num_skipped = num_skipped
        self._show_status(news.status)

    def _show_status(self, status: RunStatus) -> None:
        now, progress = time.monotonic(), (status.version, status.num_trained_steps)
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        if now - self._presence_at > LINE_EVERY_S and not status.ended:
            self._presence_at = now
            for line in self._presence.describe_changes(status, now):
                self.print_line(line)
        if self._live is not None:
            self._live.update(self._draw_picture(status))
            return
        still_s = max(status.standstill_s, now - self._progress_at)
        if now - self._last_line > (STILL_S if still_s > STILL_S else LINE_EVERY_S):
            self._last_line = now
            self.print_line(
                self._format_standstill(status, still_s) if still_s > STILL_S else self._format_line(status)
            )

    def print_what_stops(self, status: RunStatus) -> None:
        """Says, every few seconds, what a run that was told to stop waits for."""
        now = time.monotonic()
        if now - self._said_what_stops < STILL_S:
            return
        self._said_what_stops = now
        for name, role in status.roles.items():
            if name.startswith("learner"):
                took = self._metrics.get(TOOK.get(role.activity.partition(" ")[0], ""))
                last = f" (the last took {took:.1f} s)" if took is not None else ""
                silent = (
                    f", not heard of for {role.last_heard_s:.0f} s" if role.last_heard_s > SILENT_S else ""
                )
                self.print_line(
                    f"stopping: waiting for {name}: {role.activity} for {role.activity_s:.0f} s{last}{silent}"
                )

    def print_start_times(self, start_s: dict[str, float]) -> None:
        """Says how long the start has taken, in all and by its parts. `start_s` as in the summary."""
        parts = ", ".join(
            f"{what.replace('_', ' ')} {s:.1f}" for what, s in start_s.items() if what != "first_step"
        )
        self.print_line(f"first step {start_s['first_step']:.1f} s after the command ({parts})")

    def rewind_to_step(self, step: int) -> None:
        """Forgets steps from `step` on: the learner was lost, and trains them again."""
        self._num_restarts += 1
        self._rewards = {trained: reward for trained, reward in self._rewards.items() if trained < step}
        self._evaluated = {key for key in self._evaluated if key[1] < step}

    def note_buffer_restart(self) -> None:
        """Expects the generators that were there: they join nothing when the buffer comes back."""
        self._num_buffer_restarts += 1
        self._presence.expect_again()

    def print_conclusion(
        self, status: str, news: m.RunNews | None, evaluations: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Prints the last lines. `evaluations` as in the summary."""
        if news is not None:
            # So that `show_news` prints no line: the one that follows is the last.
            self._last_line = time.monotonic()
            self.show_news(news)
            self.print_line(self._format_line(news.status))
        for line in describe_change(evaluations):
            self.print_line(line)
        restarts = describe_restarts(learner=self._num_restarts, buffer=self._num_buffer_restarts)
        self._rich.print(
            f"{self._format_clock()}  {status}{restarts}. Summary, curves, timeline, journal, checkpoints, "
            "TensorBoard and logs: "
            f"{self._folder}",
            soft_wrap=True,
            markup=False,
        )
        if status == "interrupted":
            self._rich.print(
                f"           continue with run.resume={self._folder}", soft_wrap=True, markup=False
            )

    def _format_clock(self) -> str:
        return str(timedelta(seconds=int(time.monotonic() - self._began))).rjust(8)

    def _estimate_left(self, status: RunStatus) -> str:
        done = status.num_trained_steps - self._first_step
        if not done:
            return "?"
        return str(
            timedelta(
                seconds=int(status.elapsed_s / done * (self._config.run.steps - status.num_trained_steps))
            )
        )

    def _describe_admission(self, status: RunStatus) -> str:
        return (
            f", {status.admission_lag} admitted"
            if self._config.staleness.controller is Controller.ess
            else ""
        )

    def _format_line(self, status: RunStatus) -> str:
        if status.version < 0:
            return f"starting: {status.waiting_for}"
        failed = _describe_quarantine(status)
        if not self._rewards:
            return status.waiting_for + failed
        reward = _average_recent(list(self._rewards.values()))
        staleness, rates = status.staleness_histogram, self._throughput.measure(status)
        mean = sum(k * n for k, n in staleness.items()) / max(1, sum(staleness.values()))
        return (
            f"step {status.num_trained_steps}/{self._config.run.steps}  v{status.version}  reward "
            f"{reward:.3f}  "
            f"staleness {mean:.2f} (max {max(staleness, default=0)} of {self._config.max_versions}"
            f"{self._describe_admission(status)})  "
            f"tok/s {rates.generated:,.0f} generated {rates.trained:,.0f} trained  "
            f"idle learner {status.learner_idle_share:.0%} generators {status.generator_idle_share:.0%}  "
            f"left {self._estimate_left(status)}{failed}{_describe_silence(status)}"
        )

    def _format_standstill(self, status: RunStatus, still_s: float) -> str:
        """Says who waits for whom: all figures are as they were."""
        if status.version < 0:
            return self._format_line(status)
        return (
            f"step {status.num_trained_steps}/{self._config.run.steps}  v{status.version}  waiting for "
            f"{still_s:.0f} s: {status.waiting_for}{_describe_quarantine(status)}"
        )

    def _draw_picture(self, status: RunStatus) -> Panel:
        rewards, rates = list(self._rewards.values()), self._throughput.measure(status)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        rows = {
            "step": f"{status.num_trained_steps} of {self._config.run.steps}, version {status.version}, "
            f"{self._estimate_left(status)} left",
            "reward": f"{_average_recent(rewards):.3f}  {_draw_sparkline(rewards)}" if rewards else "–",
            "staleness": "  ".join(
                f"{k}: {share:.0%}" for k, share in _compute_shares(status.staleness_histogram).items()
            )
            + f"   (at most {self._config.max_versions}{self._describe_admission(status)})",
            "tokens/s": f"{rates.generated:,.0f} generated, {rates.trained:,.0f} trained",
            "idle": f"learner {status.learner_idle_share:.0%}, generators {status.generator_idle_share:.0%}",
            "tokens": _format_account(status.tokens),
            "groups": _format_account(status.groups),
            "weights": f"{status.weight_updates} updates, {status.weight_bytes / 1e6:,.1f} MB, "
            f"pause {status.pause_s_mean * 1e3:.1f} ms, {status.digest_checks} digest checks, "
            f"{status.digest_mismatches} mismatches",
            "generators": _list_some(
                f"{name} v{report.version}"
                if report.version >= 0
                else f"{name} {status.roles[name].activity}"
                for name, report in status.generators.items()
                if name in status.roles
            )
            or "not here yet",
            "doing": _list_some(f"{name} {role.activity}" for name, role in status.roles.items()) or "–",
            "waiting": status.waiting_for,
        }
        if status.quarantined:
            group, error = next(reversed(status.quarantined.items()))
            rows["quarantined"] = f"{status.num_quarantined} groups; last {group}: {error}"
        if status.refused_requests:
            rows["refused"] = (
                ", ".join(f"{n} × {reason}" for reason, n in status.refused_requests.items())
                + " (see logs/buffer.log)"
            )
        for name, value in rows.items():
            table.add_row(name, Text(value))
        table.add_row("", ProgressBar(total=self._config.run.steps, completed=status.num_trained_steps))
        return Panel(table, title=f"{self._folder.name} {self._format_clock().strip()}", title_align="left")


def _describe_quarantine(status: RunStatus) -> str:
    if not status.quarantined:
        return ""
    group, error = next(reversed(status.quarantined.items()))
    return f"  {status.num_quarantined} groups quarantined, the last ({group}) with {error}"


def _describe_silence(status: RunStatus) -> str:
    silent = sorted((role.last_heard_s, name) for name, role in status.roles.items())
    words = [f"{name} not heard of for {s:.0f} s" for s, name in silent if s > SILENT_S]
    return "".join(f"  {one}" for one in words[:MAX_NAMED])


def describe_restarts(**nums: int) -> str:
    """Returns words for the roles that were started again, with how often; empty where none was."""
    some = [f"{n} restart{'s' * (n > 1)} of the {role}" for role, n in nums.items() if n]
    return f" after {' and '.join(some)}" if some else ""


def _list_some(words: Iterable[str]) -> str:
    return name_some(list(words), "  ", MAX_SHOWN)


def _average_recent(rewards: list[float]) -> float:
    return sum(rewards[-5:]) / len(rewards[-5:])


def _draw_sparkline(values: list[float], width: int = 40) -> str:
    size = max(1, -(-len(values) // width))
    means = [sum(chunk) / len(chunk) for chunk in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    return "".join(BARS[int((v - low) / (high - low or 1) * (len(BARS) - 1))] for v in means)


def _compute_shares(histogram: dict[int, int]) -> dict[int, float]:
    total = sum(histogram.values()) or 1
    return {k: n / total for k, n in histogram.items()}


def _format_account(account: LedgerAccount) -> str:
    parts = {
        "trained": account.trained,
        "masked": account.masked,
        **account.rejected,
        "in flight": account.in_flight,
    }
    return f"{account.total:,} = " + " + ".join(f"{n:,} {name}" for name, n in parts.items() if n)
