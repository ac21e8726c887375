"""Prepares evaluation sets before anything starts: their rows, and the numbers of prompts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from configs.data import make_absolute
from configs.eval import HELD_OUT, PROMPT_KEYS, EvalConfig, EvalSetConfig
from configs.generators import EngineKind
from configs.load import find_named_sets, find_said_keys
from configs.schema import Config
from generators.data.prepare import count_repeats, prepare_data
from generators.data.run_data import bring_rows, make_limit
from generators.rewards.composition import make_reward
from generators.rewards.functions import place_functions
from generators.rewards.trial import try_reward
from generators.tasks import load_task
from generators.tasks.dataset import TaskReward
from generators.user_code.task_kinds import read_num_prompts
from slipstream.data_report import DataProgress


def prepare_eval_sets(config: Config, raise_if_stopped: Callable[[], None]) -> EvalConfig:
    """Returns the sets with their rows, and with the numbers of their prompts.

    Raises ValueError for a set whose task cannot be made, or has no end of held-out prompts.
    """
    prepared = {}
    for name, one in config.eval.sets.items():
        # A simulated engine makes no prompts.
        if config.generators.engine is not EngineKind.simulated:
            try:
                one = _prepare_set(config, name, raise_if_stopped)
            except ValueError as error:
                raise ValueError(f"eval.sets.{name} cannot be played: {error}") from error
        if one.num_prompts is None:
            raise ValueError(
                f"eval.sets.{name}.prompts must be a number, because the task {one.task} does not say how "
                "many held-out prompts it has, got null"
            )
        prepared[name] = one
    return dataclasses.replace(config.eval, sets=prepared)


def try_set_rewards(config: Config) -> None:
    """Rates a reply to the first row of each set. Raises ValueError for a reward that cannot."""
    for name, one in config.eval.sets.items():
        by_set = config.for_evaluation(one)
        if one.task == "dataset" and config.generators.engine is not EngineKind.simulated:
            try:
                try_reward(by_set, load_task(one.task, by_set.task_arguments), "eval", one.samples)
            except ValueError as error:
                raise ValueError(f"eval.sets.{name} cannot be played: {error}") from error


def forget_rows(config: Config, overrides: Sequence[str]) -> Config:
    """Returns a run's configuration without the record of the rows that overrides say otherwise: these are
    prepared anew."""
    if any(key.startswith("data.") for key in find_said_keys(overrides)):
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, prepared=[]))
    named = find_named_sets(overrides)
    sets = dict(config.eval.sets)
    for name in sets.keys() & named.keys():
        if named[name] & {*PROMPT_KEYS, "benchmark"}:
            sets[name] = dataclasses.replace(sets[name], prepared=[], size=None)
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, sets=sets))


def prepare_held_out(config: Config, raise_if_stopped: Callable[[], None]) -> Config:
    """Returns the configuration with the held-out rows of its own `data`, and without those that are trained
    where the two are apart.

    Raises ValueError for rows that cannot be had.
    """
    if config.task.name != "dataset" or config.generators.engine is EngineKind.simulated:
        return config
    data, split = config.data, "train" if config.data.eval is None else "eval"
    data = dataclasses.replace(
        data,
        train=make_absolute(data.train) if split == "train" else None,
        eval=make_absolute(data.eval),
        prepared=[record for record in data.prepared if record["split"] == split],
    )
    config = dataclasses.replace(config, data=data)
    if data.prepared:
        bring_rows(config)
        return config
    with DataProgress(raise_if_stopped) as progress:
        records = prepare_data(asdict(data), make_limit(config), progress)
    _report_rows(HELD_OUT, records, config)
    return dataclasses.replace(config, data=dataclasses.replace(data, prepared=records))


def _prepare_set(config: Config, name: str, raise_if_stopped: Callable[[], None]) -> EvalSetConfig:
    one = config.eval.sets[name]
    one = dataclasses.replace(one, data=make_absolute(one.data), reward=place_functions(one.reward))
    by_set = config.for_evaluation(one)
    if one.task == "dataset":
        if one.data is None:
            raise ValueError("data must name its rows (a file, a folder or sources), got null")
        make_reward(asdict(by_set.reward), further={"task": TaskReward({})})
        if one.prepared:
            bring_rows(by_set)
        else:
            with DataProgress(raise_if_stopped) as progress:
                records = prepare_data(asdict(by_set.data), make_limit(by_set), progress)
            _report_rows(name, records, config)
            one = dataclasses.replace(one, prepared=records)
            by_set = config.for_evaluation(one)
    if one.size is not None:
        return one
    task = load_task(by_set.task.name, by_set.task_arguments)
    return dataclasses.replace(one, size=read_num_prompts(task, "num_eval_prompts"))


def _report_rows(name: str, records: Sequence[Mapping[str, Any]], config: Config) -> None:
    """Says how many rows the set has, and how many of them are trained too."""
    taken = sum(record["num_held_out" if record["split"] == "train" else "num_taken"] for record in records)
    too_long = sum(record["num_too_long"] for record in records)
    left_out = f", {too_long:,} are too long and left out" if too_long else ""
    print(f"evaluation set {name}: {taken:,} prompt{'s' * (taken != 1)}{left_out}", flush=True)
    trained = [record for record in config.data.prepared if record["split"] == "train"]
    _, num_shared = count_repeats([*trained, *records])
    if num_shared:
        print(
            f"warning: {num_shared:,} prompts of the evaluation set {name} are prompts of data.train too, so "
            "their scores are not those of new questions",
            flush=True,
        )
