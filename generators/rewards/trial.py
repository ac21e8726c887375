"""A trial of the reward before a run begins: each source's first row, with its right answer as the reply.

A function that returns a text, raises for the name of a data set, or never ends is refused here, before any
engine starts.
"""

import asyncio
from dataclasses import asdict
from typing import Any

from configs.schema import Config
from generators.data.rows import read_reference
from generators.data.sources import read_sources
from generators.environment import Row
from generators.score_checks import read_score, read_scores
from generators.user_code.errors import UserCodeError
from generators.user_code.pool import UserCodePool
from generators.user_code.user_worker import UserWorker
from generators.user_code.worker_limits import WorkerLimits

Limit = tuple[float, str]


def try_reward(config: Config, task: Any, split: str = "train", samples: int | None = None) -> None:
    """Rates a reply to the first row of each source in a worker process. `task` is that of `config`, which
    must be the task `dataset`. `samples`: replies to a prompt, where not those of training.

    Raises ValueError that names the key, the source and what the reward did.
    """
    asyncio.run(_try_sources(config, task, split, samples or config.learner.samples_per_prompt))


async def _try_sources(config: Config, task: Any, split: str, num_samples: int) -> None:
    reward, data = config.reward, asdict(config.data)
    key = "reward.parts" if reward.parts else "reward.function" if reward.function else "data.train"
    limit = config.episodes.score_timeout_s, "episodes.score_timeout_s"
    limits = WorkerLimits.from_config(config)
    try:
        pool = await UserCodePool.open(config.task.name, config.task_arguments, limits)
    except UserCodeError as error:
        raise ValueError(str(error)) from error
    try:
        has_groups = pool.description.has_group_scores
        for index, source in enumerate(read_sources(data, split) or read_sources(data, "train")):
            row = task.make_row(split, index, config.run.seed)
            reply = find_right_reply(row)
            worker = await pool.take_worker()
            try:
                samples = num_samples if has_groups else 0
                # Some functions work once in a process: they keep what belongs to their first call.
                for _ in range(2):
                    await _rate_reply(worker, [split, index, config.run.seed], row, reply, samples, limit)
            except (UserCodeError, ValueError) as error:
                raise ValueError(
                    f"{key} must give a reward for each reply, got for {reply[:80]!r} to the first "
                    f"{'training' if split == 'train' else 'held-out'} row of {source.name!r}: {error}"
                ) from error
            finally:
                pool.return_worker(worker)
    finally:
        await pool.close()


async def _rate_reply(
    worker: UserWorker, place: list[Any], row: Row, reply: str, samples: int, limit: Limit
) -> None:
    """`samples`: replies of a group; 0: groups are not rated beside one another."""
    score = read_score(await worker.call("score_response", [*place, reply], *limit))
    if samples:
        record = {
            "messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": reply}],
            "reward": score.reward,
            "components": score.components,
            "stop": "completed",
            "num_tokens": 1,
            "tokens": [0],
        }
        read_scores(await worker.call("score_group", [*place, [record] * samples], *limit), samples)


def find_right_reply(row: Row) -> str:
    """Returns a row's right answer as a reply; nothing where it has none that is a text or a number."""
    try:
        right = read_reference(row)
    except ValueError:
        return ""
    right = right[0] if isinstance(right, list) and right else right
    return str(right) if isinstance(right, str | int | float) else ""
