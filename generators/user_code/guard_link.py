"""The generator's end of the socket to the guard, which is started here."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence

from generators.user_code.errors import UserCodeError
from generators.user_code.process_orders import (
    GuardStarted,
    Notice,
    Order,
    encode_order,
    receive_order,
)

_START = (
    "import os, sys\n"
    "if os.fork(): os._exit(0)\n"
    "import json\n"
    "sys.path[:] = json.loads(sys.argv[1])\n"
    "from generators.user_code.guard import main\n"
    "main(int(sys.argv[2]))\n"
)
"""The guard's program. It is no child of the generator for long, because Ray kills an actor's children before
they could clean up."""
_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "PYTHONHASHSEED": "0",
}
"""Workers share the host's cores, and threads of a library that is imported are lost when a worker is forked.
The order of a set of texts is the same in every process, so that a task which draws from one makes the same
prompt everywhere. What the generator's environment says goes before."""
_START_S = 120.0
"""Seconds that the guard may take to start: it imports little, from a disk that may be slow."""
_END_S = 30.0
"""Seconds that the guard may take to kill everything."""


class GuardLink:
    """Sends orders to the guard, and hands on what it tells. For one event loop."""

    def __init__(self, connection: socket.socket, take_notice: Callable[[Notice | None], None]) -> None:
        """`take_notice` is called with each message of the guard, and with None when the guard is gone."""
        self._connection, self._take_notice = connection, take_notice
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._receive_notices)
        self._started: asyncio.Future[bool] = self._loop.create_future()
        """True once the guard runs, False when it has ended before."""
        self._ended: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def open(cls, take_notice: Callable[[Notice | None], None]) -> "GuardLink":
        """Starts a guard. Raises UserCodeError when it does not start."""
        connection, guard_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        with guard_end:
            path = json.dumps([str(folder) for folder in sys.path])
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, path, str(guard_end.fileno()), "slipstream-guard"],
                pass_fds=[guard_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**_ENVIRONMENT, **os.environ},
                start_new_session=True,
            )
        link = cls(connection, take_notice)
        try:
            async with asyncio.timeout(_START_S):
                if not await link._started:
                    raise UserCodeError("the guard of user code has ended at once; its error is in the log")
        except BaseException as error:
            await link.close()
            if isinstance(error, TimeoutError):
                raise UserCodeError(f"the guard of user code has not started within {_START_S:g} s") from None
            raise
        finally:
            # The process that was started has forked the guard, and ended before the guard began.
            await asyncio.to_thread(process.wait)
        return link

    @property
    def is_open(self) -> bool:
        return not self._ended.done()

    def send_order(self, order: Order, descriptors: Sequence[int] = ()) -> None:
        """Sends the order, with copies of the descriptors. Raises ValueError for one that is too large."""
        body = encode_order(order)
        if self.is_open:
            self._unsent.append((body, [os.dup(descriptor) for descriptor in descriptors]))
            self._send_orders()

    async def close(self) -> None:
        """Closes the generator's end, and waits until the guard has killed everything."""
        if self.is_open:
            try:
                self._connection.shutdown(socket.SHUT_WR)
            except OSError:  # the guard is gone
                self._end()
        await asyncio.wait({self._ended}, timeout=_END_S)
        self._end()

    def _send_orders(self) -> None:
        while self._unsent:
            body, descriptors = self._unsent[0]
            try:
                socket.send_fds(self._connection, [body], descriptors)
            except BlockingIOError:
                self._loop.add_writer(self._connection, self._send_orders)
                return
            except OSError:
                self._end()
                return
            self._unsent.popleft()
            _close_descriptors(descriptors)
        self._loop.remove_writer(self._connection)

    def _receive_notices(self) -> None:
        while self.is_open:
            try:
                notice, _ = receive_order(self._connection)
            except BlockingIOError:
                return
            except OSError:
                notice = None
            if notice is None:
                self._end()
            elif isinstance(notice, GuardStarted):
                self._started.set_result(True)
            elif not isinstance(notice, Order):
                self._take_notice(notice)

    def _end(self) -> None:
        if not self.is_open:
            return
        self._ended.set_result(None)
        if not self._started.done():
            self._started.set_result(False)
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        for _, descriptors in self._unsent:
            _close_descriptors(descriptors)
        self._unsent.clear()
        self._take_notice(None)


def _close_descriptors(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
