"""One connection to the gateway: HTTP by uvicorn, with bounds that uvicorn lacks."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0
"""Seconds that a new connection may take for the head of its first request."""


class BoundedConnection(H11Protocol):
    """Closes itself where there are too many, and where the head of a request does not come in time.

    Whoever reaches the port may connect, and each connection holds an open file of the generator's.
    `limit_concurrency` of uvicorn's configuration is one more than the connections that may be open.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        assert self.limit_concurrency is not None, "the gateway sets it"
        if len(self.connections) >= self.limit_concurrency:
            transport.abort()
            return
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        waiting = self.timeout_keep_alive_task
        super().data_received(data)
        is_answering = self.cycle is not None and not self.cycle.response_complete
        # A head that comes byte by byte has no longer than one that comes at once.
        if waiting is not None and self.timeout_keep_alive_task is None and not is_answering:
            self.timeout_keep_alive_task = self.loop.call_at(waiting.when(), self.timeout_keep_alive_handler)
