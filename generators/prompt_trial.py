"""A trial of a task's sources before a run begins: the first prompt of each, for each split.

Settings that leave no question to hold out, or that take longer than a draw may, are refused here. In the run
every such prompt would fail by itself.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from configs.schema import Config
from generators.data.sources import read_sources as read_row_sources
from generators.plain_values import show_value
from generators.tasks import load_task
from generators.user_code.errors import UserCodeError
from generators.user_code.pool import UserCodePool
from generators.user_code.task_kinds import read_sources
from generators.user_code.worker_limits import WorkerLimits


@dataclass(frozen=True, slots=True)
class TriedTask:
    """A task whose sources are drawn from, and the key that names its arguments."""

    key: str
    name: str
    args: Mapping[str, Any]
    splits: Sequence[str]


def try_prompts(config: Config) -> None:
    """Draws from each source of the run's task, and from the tasks that `data` names as sources.

    Raises ValueError that names the key, the source and its settings.
    """
    for tried in list_tasks(config):
        task = load_task(tried.name, tried.args)
        names = [source.name for source in read_sources(task)]
        if names and hasattr(task, "make_prompt"):
            asyncio.run(_try_sources(config, tried, names))


def list_tasks(config: Config) -> Iterator[TriedTask]:
    """Yields the run's task, or the tasks that `data` names, with the splits that are drawn from."""
    splits = ("train", "eval") if config.eval.prompts else ("train",)
    if config.task.name != "dataset":
        yield TriedTask("task.args", config.task.name, config.task_arguments, splits)
        return
    data = asdict(config.data)
    train, held_out = (read_row_sources(data, split) for split in ("train", "eval"))
    parts = (
        [("train", train, ("train",)), ("eval", held_out, splits[1:])]
        if held_out
        else [("train", train, splits)]
    )
    for key, sources, some in parts:
        for source in sources:
            if source.task is not None and some:
                yield TriedTask(f"the args of {source.name!r} in data.{key}", source.task, source.args, some)


async def _try_sources(config: Config, tried: TriedTask, names: Sequence[str]) -> None:
    limit = config.episodes.reset_timeout_s, "episodes.reset_timeout_s"
    try:
        pool = await UserCodePool.open(tried.name, tried.args, WorkerLimits.from_config(config))
    except UserCodeError as error:
        raise ValueError(str(error)) from error
    try:
        for split in tried.splits:
            for index, name in enumerate(names):
                worker = await pool.take_worker()
                try:
                    await worker.call("make_prompt", [split, index, config.run.seed], *limit)
                except UserCodeError as error:
                    raise ValueError(
                        f"{tried.key} must leave each source a prompt for {split}, got "
                        f"{show_value(dict(tried.args))} with none of {name!r}: {error}"
                    ) from error
                finally:
                    pool.return_worker(worker)
    finally:
        await pool.close()
