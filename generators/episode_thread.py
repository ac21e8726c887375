"""The thread beside the engine's loop in which episodes run, each of them a coroutine."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EpisodeThread:
    """An asyncio loop in a thread of its own. It is a daemon: it holds up no end of its process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="episodes")
        self._thread.start()

    def start_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine; returns a future that may also cancel it. Any thread may call this."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, last: Coroutine[Any, Any, None], wait_s: float = 5.0) -> None:
        """Cancels all coroutines, runs `last`, and ends the thread. Waits at most `wait_s`."""
        self.start_coroutine(self._end(last))
        self._thread.join(wait_s)

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        try:
            await last
        finally:
            self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()
