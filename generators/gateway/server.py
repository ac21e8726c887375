"""Serves the gateway over HTTP from the episode thread's loop, and gives each episode its key."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from configs.schema import Config
from generators.gateway.application import GatewayApp
from generators.gateway.connection import BoundedConnection
from generators.gateway.session import GatewaySession, SessionRules
from generators.group import Player
from generators.rendering.renderer import Renderer
from generators.user_code.worker_limits import WorkerLimits, claim_connections

MAX_HEADERS = 64 << 10
"""Bytes of a request's first line and headers."""
BACKLOG = 2048
"""Connections that may wait to be taken."""
KEEP_ALIVE_S = 120.0
"""Seconds that an idle connection stays open. Clients drop theirs earlier, so none sends into a connection
that is being closed."""


class Gateway:
    """All methods are for the loop that `open` is called in."""

    def __init__(self, config: Config, renderer: Renderer, tokenizer: Any) -> None:
        self._settings = config.episodes.gateway
        self._num_episodes = config.max_episodes
        self._num_workers = WorkerLimits.from_config(config).max_workers
        self._rules = SessionRules(
            renderer=renderer,
            tokenizer=tokenizer,
            sampling=config.sampling,
            max_turns=config.episodes.max_turns,
            max_model_len=config.generators.max_model_len,
            parses_calls=config.episodes.tool_parser is not None,
            parses_reasoning=config.episodes.reasoning_parser is not None,
        )
        self._sessions: dict[str, GatewaySession] = {}
        """By key."""
        self.application = GatewayApp(
            self._rules, self._sessions.get, config.model.path, self._settings.max_body_mb << 20
        )
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port = 0

    @property
    def root_url(self) -> str:
        """Where agents find the gateway. OpenAI's routes are below `/v1`."""
        host = self._settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    async def open(self) -> None:
        """Raises ValueError for an address that cannot be listened at."""
        max_connections = claim_connections(self._num_episodes, self._num_workers)
        listener = open_listener(self._settings.host, self._settings.port)
        self._port = listener.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.application,
                # h11 bounds the headers, which the faster httptools does not.
                http=BoundedConnection,
                h11_max_incomplete_event_size=MAX_HEADERS,
                ws="none",
                lifespan="off",
                log_config=None,
                # Strangers may send what is no HTTP: nothing is logged about that.
                log_level="error",
                backlog=BACKLOG,
                limit_concurrency=max_connections + 1,
                proxy_headers=False,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(KEEP_ALIVE_S),
            )
        )
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.001)

    @contextlib.asynccontextmanager
    async def open_session(self, player: Player) -> AsyncIterator[tuple[str, GatewaySession]]:
        """Gives an episode a key, which opens nothing once the episode has ended."""
        key, session = secrets.token_urlsafe(32), GatewaySession(player, self._rules)
        self._sessions[key] = session
        try:
            yield key, session
        finally:
            del self._sessions[key]
            await session.close()

    async def close(self) -> None:
        """Closes all connections, the busy ones too."""
        if self._server is None or self._serving is None:
            return
        for session in list(self._sessions.values()):
            await session.close()
        self._server.should_exit = self._server.force_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def open_listener(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            # Two sockets may be bound to one port until one of them listens.
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ValueError(
            f"episodes.gateway.host and port must be an address of this host that is free, got {host} and "
            f"{port}: {error}"
        ) from error
    listener.setblocking(False)
    return listener
