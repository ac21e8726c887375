"""A task's code runs in worker processes, and answers the generator's calls in plain values."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from generators.user_code.errors import CallFailed, TaskRefused
from generators.user_code.pool import UserCodePool, WorkerLimits


def run_with_pool(
    play: Callable[[UserCodePool], Coroutine[Any, Any, None]],
    target: str = "misbehaving:Misbehaving",
    args: dict[str, Any] | None = None,
    **limits: Any,
) -> None:
    async def run() -> None:
        pool = await UserCodePool.open(target, args or {}, WorkerLimits(**limits))
        try:
            await play(pool)
        finally:
            await pool.close()

    asyncio.run(run())


def test_a_task_of_one_turn_makes_prompts_and_scores_responses() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        assert await worker.call("make_prompt", ["train", 3, 0], 60, "s") == {"text": "train 3 0"}
        score = await worker.call("score_response", ["train", 3, 0, "four"], 60, "s")
        assert score == {"reward": 4.0, "components": {"pid": float(worker.pid)}}
        assert pool.description.kind == "one_turn" and pool.description.name == "misbehaving"

    run_with_pool(play)


def test_an_environment_keeps_its_state_in_its_worker_and_its_methods_may_be_async() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        first = await worker.call("reset", ["train", 3, 0, 5], 60, "s")
        assert first["messages"] == [{"role": "user", "content": "3 5"}] and not first["done"]
        turns = [await worker.call("step", [{"content": "x"}], 60, "s") for _ in range(2)]
        assert turns[0]["messages"][0]["content"] == "x 1" and turns[1]["done"] and turns[1]["reward"] == 2.0
        await worker.call("close", [], 60, "s")
        with pytest.raises(CallFailed, match="step must follow reset"):
            await worker.call("step", [{"content": "x"}], 60, "s")

    run_with_pool(play, "misbehaving:Counting", {"limit": 2})


@pytest.mark.parametrize(
    ("target", "args", "error"),
    [
        ("misbehaving:Incomplete", {}, "got 'misbehaving:Incomplete' without `make_environment`"),
        ("misbehaving:Nothing", {}, "task.name must name a class that can be imported"),
        ("nowhere:Task", {}, "task.name must name a class that can be imported, got 'nowhere:Task'"),
        ("nothing", {}, "task.name must be one of .*got 'nothing'"),
        ("misbehaving:Counting", {"limit": 0}, "task.args must suit misbehaving:Counting, .*limit must be"),
        ("misbehaving:Misbehaving", {"stop": 1}, "task.args must suit misbehaving:Misbehaving, got"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_the_setting_and_the_rule(
    target: str, args: dict[str, Any], error: str
) -> None:
    with pytest.raises(TaskRefused, match=error):
        asyncio.run(UserCodePool.open(target, args, WorkerLimits()))
