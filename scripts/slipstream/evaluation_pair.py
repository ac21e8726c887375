"""Evaluates two models with the same settings, and says whether the second is better.

Each is evaluated by a process of its own, one after the other, or not at all where its results are there. The
difference is paired: both have answered the same prompts, and what makes a prompt hard cancels.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from buffers.evaluated_samples import read_samples
from buffers.evaluation_statistics import bootstrap_interval, compare_means, find_mean
from generators.user_code.process_control import die_with_parent
from slipstream.stop_signals import KILLED, Interrupted, StopSignals

LOOK_S = 0.1


def compare_targets(
    models: Sequence[str], overrides: Sequence[str], settings_of: Path | None, signals: StopSignals
) -> tuple[dict[str, Any], int]:
    """Returns the comparison and the exit status. The comparison is empty where one could not be evaluated.

    Both have the settings of the first run among them.
    """
    runs = [Path(model) for model in models if (Path(model) / "config.yaml").is_file()]
    settings = settings_of or (runs[0] if runs else None)
    common = [*overrides, "--json", *(["--settings-of", str(settings)] if settings is not None else [])]
    reports, worst = [], 0
    for model in models:
        command = [sys.executable, "-P", "-m", "slipstream.evaluate", model, *common]
        text, status = run_to_end(command, signals)
        if not text or status == KILLED:
            return {}, status
        reports.append(json.loads(text))
        worst = max(worst, status)
    return compare_reports(*reports), worst


def run_to_end(command: Sequence[str], signals: StopSignals) -> tuple[str, int]:
    """Runs a command, hands on the user's signals, and returns its output and exit status."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=die_with_parent
    ) as process:
        was_told = False
        while True:
            try:
                text, _ = process.communicate(timeout=LOOK_S)
                return text, KILLED if process.returncode < 0 else process.returncode
            except subprocess.TimeoutExpired:
                if signals.received is not None and not was_told:
                    process.send_signal(signal.SIGINT)
                    was_told = True
            try:
                signals.raise_if_hurried()
            except Interrupted:
                process.send_signal(signal.SIGINT)


def compare_reports(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both reports and the difference in each set that both have, over the prompts that both have
    answered."""
    others = {result["set"]: result for result in second["results"]}
    differences, left_out = [], {}
    for one in first["results"]:
        other = others.get(one["set"])
        if other is None or one["prompts_digest"] != other["prompts_digest"]:
            left_out[one["set"]] = "the two were asked other prompts, or scored in another way"
            continue
        answers = [
            read_samples(Path(report["folder"]) / result["samples_folder"])
            for report, result in ((first, one), (second, other))
        ]
        # An earlier evaluation may have asked more prompts than are wanted now.
        wanted = range(min(one["wanted"], other["wanted"]))
        common = [index for index in wanted if all(index in known for known in answers)]
        if not common:
            left_out[one["set"]] = "no prompt was answered by both"
            continue
        first_means, second_means = (
            np.array([known[index].mean_reward for index in common]) for known in answers
        )
        difference, interval = compare_means(first_means, second_means)
        differences.append(
            {
                "set": one["set"],
                "prompts": len(common),
                "a": find_mean(first_means),
                "a_ci95": bootstrap_interval(first_means),
                "b": find_mean(second_means),
                "b_ci95": bootstrap_interval(second_means),
                "difference": difference,
                "ci95": interval,
            }
        )
    return {"models": [dict(first), dict(second)], "differences": differences, "left_out": left_out}
