"""Shows an evaluation: bars while it goes on, and a table of its results."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from buffers.evaluation_statistics import PromptSamples
from slipstream.evaluated_sets import SoloSet

SHOWN_ERRORS = 5
QUIET_S = 30.0
"""Seconds between two lines where nobody watches a terminal."""


class SetProgress(Progress):
    """A bar for each set: prompts, the mean reward so far, tokens a second, and the time that remains."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._means: list[float] = []
        self._num_tokens = self._num_failed = 0
        self._began_at = self._told_at = 0.0

    @contextmanager
    def follow_set(self, chosen: SoloSet, known: Mapping[int, PromptSamples]) -> Iterator[None]:
        """Shows a set while it is played. `known` are the samples that it has already."""
        self._means = [prompt.mean_reward for prompt in known.values()]
        self._num_tokens = self._num_failed = 0
        self._began_at = self._told_at = time.monotonic()
        self._bar = self.add_task(chosen.name, total=chosen.num_prompts, completed=len(self._means), told="")
        yield

    def note_prompt(self, prompt: PromptSamples) -> None:
        self._means.append(prompt.mean_reward)
        self._num_tokens += prompt.num_tokens
        self._tell()

    def note_failure(self) -> None:
        self._num_failed += 1
        self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        mean = f"avg {fmean(self._means):.3f}  " if self._means else ""
        failed = f"{self._num_failed} failed  " if self._num_failed else ""
        told = f"{mean}{failed}{self._num_tokens / max(1e-9, now - self._began_at):,.0f} tokens/s"
        done = len(self._means) + self._num_failed
        self.update(self._bar, completed=done, told=told)
        if not self.console.is_terminal and now - self._told_at > QUIET_S:
            self._told_at = now
            task = self.tasks[self._bar]
            left = "" if task.time_remaining is None else f"  about {task.time_remaining:.0f} s left"
            self.console.print(f"{task.description}: {done}/{task.total:.0f}  {told}{left}", highlight=False)


def make_table(report: Mapping[str, Any]) -> Group:
    """Returns the table of a report, with the failed prompts below."""
    table = Table(title=name_model(report), title_justify="left")
    for column in ("set", "figure", "95 % interval", "prompts", "tokens", "cut off"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("set", "figure") else "right")
    for result in report["results"]:
        each = result["samples"] / max(1, result["prompts"])
        is_whole = result["prompts"] == result["wanted"]
        done = f"{result['prompts']}" + ("" if is_whole else f" of {result['wanted']}")
        table.add_row(
            result["set"],
            "avg",
            show_interval(result["avg"], result["avg_ci95"]),
            f"{done} × {each:.3g}",
            "–" if result["tokens"] is None else f"{result['tokens']:.0f}",
            "–" if result["truncated"] is None else f"{100 * result['truncated']:.0f} %",
        )
        for k, value in result["pass"].items():
            # With rewards of 0 and 1, pass@1 is the average.
            if (k, value) != ("1", result["avg"]):
                table.add_row("", f"pass@{k}", show_interval(value, result["pass_ci95"].get(k)))
    return Group(table, *list_failures(report), Text(f"results and samples: {report['folder']}"))


def list_failures(report: Mapping[str, Any]) -> Iterator[Text]:
    """Yields lines that count and name the prompts that could not be played."""
    for result in report["results"]:
        errors = list(result["errors"].items())
        if errors:
            words = (
                "1 prompt failed and counts"
                if len(errors) == 1
                else f"{len(errors)} prompts failed and count"
            )
            yield Text(f"{result['set']}: {words} nowhere (evaluate.log says more)", style="yellow")
        yield from (Text(f"  prompt {index}: {error}") for index, error in errors[:SHOWN_ERRORS])


def make_comparison(compared: Mapping[str, Any]) -> Group:
    """Returns the table of two reports side by side."""
    first, second = compared["models"]
    table = Table(title=f"A: {name_model(first)}\nB: {name_model(second)}", title_justify="left")
    for column in ("set", "A", "B", "B − A", "prompts"):
        table.add_column(column, no_wrap=True, justify="left" if column == "set" else "right")
    for one in compared["differences"]:
        difference = show_interval(one["difference"], one["ci95"], sign="+")
        averages = [show_interval(one[side], None) for side in ("a", "b")]
        table.add_row(one["set"], *averages, difference, str(one["prompts"]))
    lines = [Text(f"{name} is not compared: {reason}") for name, reason in compared["left_out"].items()]
    return Group(table, *list_failures(first), *list_failures(second), *lines)


def name_model(report: Mapping[str, Any]) -> str:
    step = "" if report["step"] is None else f", step {report['step']}"
    return f"{report['model']}{step} ({report['digest'][:8]})"


def show_interval(value: float | None, interval: list[float] | None, sign: str = "") -> str:
    if value is None:
        return "–"
    ends = "" if interval is None else f" [{interval[0]:{sign}.3f}, {interval[1]:{sign}.3f}]"
    return f"{value:{sign}.3f}{ends}"
