"""Runs a test's coroutine with a pool of worker processes, which is closed after it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from generators.user_code.pool import UserCodePool
from generators.user_code.worker_limits import WorkerLimits


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
