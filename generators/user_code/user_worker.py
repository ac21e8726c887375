"""A worker process as the generator sees it: it answers calls until it is killed."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from generators.user_code.errors import CallFailed, WorkerDied
from generators.user_code.method_calls import (
    HEADER_BYTES,
    MethodAnswer,
    MethodCall,
    MethodError,
    decode_answer,
    encode_frame,
    parse_header,
)
from generators.user_code.output_pipe import OutputPipe
from generators.user_code.process_control import describe_status
from generators.user_code.worker_limits import WorkerLimits

_KILL_S = 30.0
"""Seconds that a kill may take. The kernel ends a process late when a disk or a driver holds it."""
_GONE_S = 10.0
"""Seconds between the end of a worker's socket and the word that the worker has ended."""


class UserWorker:
    """One worker. States: idle ⇄ in a call ─▶ killed ─▶ ended. One call at a time."""

    def __init__(
        self,
        connection: socket.socket,
        output: OutputPipe,
        order_kill: Callable[["UserWorker"], None],
        limits: WorkerLimits,
    ) -> None:
        """`order_kill` asks the guard to kill it; `mark_ended` is called when it is gone."""
        self.pid: int | None = None
        """None until it is forked."""
        self._connection, self._output, self._order_kill = connection, output, order_kill
        self._limits = limits
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0
        self._is_killed = self.is_busy = False
        self._ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    async def open_streams(self) -> None:
        self._connection.setblocking(False)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)

    @property
    def is_alive(self) -> bool:
        return not self._is_killed and not self._ended.done()

    async def call(self, method: str, arguments: list[Any], deadline_s: float, setting: str) -> Any:
        """Calls a method of `TaskHost`, and returns its value, in JSON's types and unchecked.

        Raises CallFailed when the method raises. Past the deadline, which `setting` names, the worker is
        killed with all its children, and WorkerDied says so; it is raised for every other death too. A call
        that is cancelled kills the worker.
        """
        assert not self.is_busy, "one call at a time"
        if not self.is_alive:
            raise WorkerDied(f"{method} could not be called, because its worker has ended")
        self._number += 1
        try:
            frame = encode_frame(MethodCall(self._number, method, arguments))
        except ValueError as error:
            raise CallFailed(f"{method} failed: {error}") from error
        self.is_busy = True
        self._output.begin_call()
        try:
            answer = await self._exchange(frame, method, deadline_s, setting)
        except BaseException:
            # A call may also be cancelled while the end of its worker is still being explained.
            self.begin_kill()
            raise
        finally:
            self.is_busy = False
        if isinstance(answer, MethodError):
            detail = f"{answer.detail}\n{self._output.show_end()}".strip()
            if answer.is_out_of_memory:  # what it holds may fail every further call
                await self.kill()
                raise WorkerDied(
                    f"{method} must allocate at most {self._limits.memory_mb} MB "
                    f"(episodes.worker_memory_mb), got {answer.error}; its worker was killed",
                    detail,
                )
            raise CallFailed(f"{method} failed: {answer.error}", detail)
        if answer.is_spent:
            self.begin_kill()
        return answer.value

    async def _exchange(self, frame: bytes, method: str, deadline_s: float, setting: str) -> MethodAnswer:
        """Sends a call, and returns its answer. Raises WorkerDied once the worker is gone."""
        assert self._writer is not None, "it has been started"
        try:
            async with asyncio.timeout(deadline_s):
                self._writer.write(frame)
                await self._writer.drain()
                return await self._read_answer()
        except TimeoutError:
            await self.kill()
            raise self._make_death(
                f"{method} must take at most {deadline_s:g} s ({setting}), got no end; its worker was killed"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise self._make_death(await self._explain_end(method)) from None
        except ValueError as error:  # a broken frame
            await self.kill()
            raise self._make_death(f"{method} broke its worker's socket: {error}") from None

    async def kill(self) -> None:
        """Kills the worker and all its descendants, and waits until they are gone."""
        self.begin_kill()
        await asyncio.wait({self._ended}, timeout=_KILL_S)

    def mark_ended(self, status: int | None) -> None:
        """Lets go of the worker, which is gone. `status` is None when nobody knows how it ended."""
        if not self._ended.done():
            self._ended.set_result(status)
            self._output.close()
            if self._writer is None:
                self._connection.close()
            else:
                self._writer.transport.abort()

    def begin_kill(self) -> None:
        """Kills the worker, and does not wait."""
        if self.is_alive:
            self._is_killed = True
            self._order_kill(self)

    async def _read_answer(self) -> MethodAnswer:
        body = await self._reader.readexactly(parse_header(await self._reader.readexactly(HEADER_BYTES)))
        answer = decode_answer(body)
        if answer.number != self._number:
            raise ValueError(f"an answer must be to call {self._number}, got one to call {answer.number}")
        return answer

    async def _explain_end(self, method: str) -> str:
        """Says why the worker has closed its socket, once that is known."""
        await asyncio.wait({self._ended}, timeout=_GONE_S)
        was_closed = not self._ended.done()
        await self.kill()
        if self._output.is_beyond_limit:
            return (
                f"{method} must print at most {self._limits.output_mb} MB (episodes.worker_output_mb), got "
                "more; its worker was killed"
            )
        if was_closed:
            return f"{method} has closed its worker's socket; the worker was killed"
        status = self._ended.result()
        how = "has ended" if status is None else describe_status(status)
        return f"{method} must return, got no answer: its worker {how}"

    def _make_death(self, sentence: str) -> WorkerDied:
        return WorkerDied(sentence, self._output.show_end())
