"""The task's code leaves processes behind: by forks without end, in sessions of their own, under a killed
guard."""

import asyncio
import time
from typing import Any

import psutil
from runs import is_alive
from worker_pools import run_with_pool

from generators.user_code.pool import UserCodePool
from generators.user_code.worker_process import MAX_CHILDREN, NICENESS

LONG_S = 120.0
"""A deadline that no test reaches."""


async def score(worker: Any, response: str) -> Any:
    return await worker.call("score_response", ["train", 0, 0, response], LONG_S, "a.setting")


def find_guard(worker: Any) -> psutil.Process:
    guard = psutil.Process(worker.pid).parent()
    assert guard is not None and guard.name() == "slip-guard"
    return guard


def test_a_bomb_whose_children_start_sessions_is_gone_when_its_worker_is_killed() -> None:
    async def play(pool: UserCodePool) -> None:
        worker, other = await asyncio.gather(pool.take_worker(), pool.take_worker())
        guard, process = find_guard(worker), psutil.Process(worker.pid)
        await score(worker, "bomb 40")
        deadline = time.monotonic() + LONG_S
        while len({one.pid for one in process.children(recursive=True)}) < 30:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await worker.kill()
        left = {one.pid for one in guard.children(recursive=True)} - {other.pid}
        assert len(left) == 1, "the template"
        assert (await score(other, "four"))["reward"] == 4.0

    run_with_pool(play)


def test_a_guard_that_is_killed_leaves_no_child_of_a_worker() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        guard = find_guard(worker)
        keeper = guard.parent()
        assert keeper is not None and keeper.name() == "slip-keeper"
        for attack in ("leave_children", "forget_child", "bomb 10"):
            await score(worker, attack)
        await asyncio.sleep(0.1)
        below = guard.children(recursive=True)
        assert len(below) >= 6
        guard.kill()
        deadline = time.monotonic() + LONG_S
        # Whatever the bomb has started meanwhile is below the keeper, which ends when nothing is left.
        while left := [one for one in (keeper, guard, *below) if is_alive(one)]:
            assert time.monotonic() < deadline, left
            await asyncio.sleep(0.01)
        assert (await score(await pool.take_worker(), "four"))["reward"] == 4.0

    run_with_pool(play)


def test_a_worker_gives_way_to_the_generator() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        await score(worker, "four")
        ours = psutil.Process().nice()
        assert find_guard(worker).nice() == ours
        assert psutil.Process(worker.pid).nice() == min(19, ours + NICENESS)

    run_with_pool(play)


def test_scores_that_forget_a_process_each_cost_a_worker_now_and_then_and_no_call() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        guard, pids, most = find_guard(worker), set[int](), 0
        pool.return_worker(worker)
        for _ in range(3 * MAX_CHILDREN):
            worker = await pool.take_worker()
            answer = await score(worker, "forget_child")
            pids.add(answer["components"]["pid"])
            pool.return_worker(worker)
            most = max(most, len(guard.children(recursive=True)))
        assert len(pids) == 3 and pool.counts.deaths == 0
        assert most <= 2 * MAX_CHILDREN + 5, "one worker is being killed, and another one has taken its place"

    run_with_pool(play)
