"""The buffer as the driver sees it: a process that is started again at its address when it dies.

    start ──▶ it serves ──▶ it ends with an error, which another life would meet again: the run ends
      ▲           │
      └───────────┘ its process dies: the next one recovers what the journal holds

Everybody else goes on: clients connect again by themselves, and send again what has no answer
(`buffers.client`). A death after `buffer.max_restarts` restarts ends the run.
"""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import ray

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, RefusedByBuffer
from buffers.keys import KeyRole
from buffers.message_fields import WireRecord
from configs.addresses import host_of, is_tcp_address
from configs.schema import Config
from slipstream.answers import FirstAnswers
from slipstream.ray_waits import is_ready, wait_for_results
from slipstream.role_failures import RoleDied, RoleFailed, get_result
from slipstream.role_logs import read_log_end
from slipstream.stop_signals import StopSignals

R = TypeVar("R", bound=WireRecord)

ANSWER_S = 2.0
"""Seconds that the buffer may take for an answer before the driver looks after the other roles again."""
LOOK_EVERY_S = 0.25
"""Seconds after which the driver looks again whether the buffer lives, while it waits for an answer."""


class BufferKeeper:
    """Keeps the buffer's process, and the driver's conversation with it."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        make_actor: Callable[[], Any],
        answers: FirstAnswers,
        signals: StopSignals,
        say: Callable[[str], None],
        note_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the process. `make_actor` starts one, as an actor of the class `BufferRole`. `folder` is the
        run's. `note_restart` is called when another process is to take the place of a dead one."""
        self._config, self._folder, self._make_actor = config, folder, make_actor
        self._answers, self._signals, self._say, self._note_restart = answers, signals, say, note_restart
        self.address, self._port = reserve_port(config.buffer.address)
        """Address of the buffer in all its lives, and the socket that keeps its port."""
        self.num_restarts = 0
        self._stop_reason: str | None = None
        self._actor: Any = None
        self._end: Any = None
        """Result of `BufferRole.run`."""
        self._make_process()

    def _read_log_end(self, name: str) -> str:
        return read_log_end(name, self._folder / "logs")

    def _make_process(self) -> None:
        self._actor = self._make_actor()
        self._answers.expect_answer("buffer", self._actor)

    def start(self, resume_step: int | None) -> None:
        """Waits until the buffer has recovered and listens. Raises RoleFailed, Interrupted."""
        self._start_process(resume_step)
        keys = self._config.buffer.keys
        self.client = BufferClient(self.address, timeout_s=ANSWER_S, keys=keys, role=KeyRole.operator)

    def _start_process(self, resume_step: int | None) -> None:
        self.address = self._answers.wait_for_result(
            self._actor.start.remote(self._config, self._folder, resume_step, self.address),
            lambda ref: get_result(ref, "buffer", self._read_log_end),
        )
        self._end = self._actor.run.remote()

    # ---- while the run lasts

    def check_process(self) -> bool:
        """Starts the buffer again if its process has died; returns whether it had.

        Raises RoleFailed when it has ended otherwise, or has died too often, and Interrupted.
        """
        if not is_ready(self._end):
            return False
        try:
            get_result(self._end, "buffer", self._read_log_end)
        except RoleDied as death:
            self._start_again(death)
            return True
        raise RoleFailed("buffer ended before the learner did")

    def _start_again(self, death: RoleDied) -> None:
        began, most = time.monotonic(), self._config.buffer.max_restarts
        while True:
            if self.num_restarts >= most:
                raise death
            self.num_restarts += 1
            self._say(
                f"buffer has died: it starts again at {self.address} (restart {self.num_restarts} of {most})"
            )
            self._note_restart()
            # Ray may only have lost touch with it. One that lives keeps the journal locked.
            ray.kill(self._actor)
            self._make_process()
            try:
                self._start_process(None)
                break
            except RoleDied as another:
                death = another
        if self._stop_reason is not None:
            self.stop_run(self._stop_reason)
        self._say(f"the buffer answers again, after {time.monotonic() - began:.1f} s")

    def call(self, request: m.Request, expect: type[R]) -> R:
        """Sends a request once and returns its answer, whichever life of the buffer gives it.

        Raises BufferGone when the buffer has been silent for `buffer.reconnect_s`, RefusedByBuffer,
        RoleFailed and Interrupted.
        """
        number = self.client.send_request(request)
        while True:
            self.check_process()
            with self._signals.interruptible():
                for answer in self.client.receive_answers(LOOK_EVERY_S):
                    if answer.number != number:
                        continue
                    if isinstance(answer.reply, m.RefusedRequest):
                        raise RefusedByBuffer(answer.reply.reason)
                    assert isinstance(answer.reply, expect), answer.reply
                    return answer.reply
            if (silent_s := self.client.silent_s) > self._config.buffer.reconnect_s:
                raise BufferGone(f"the buffer at {self.address} has been silent for {silent_s:.0f} s")

    def stop_run(self, reason: str) -> None:
        """Tells the buffer that the run is to stop. A later life of the buffer hears it too."""
        self._stop_reason = self._stop_reason or reason
        self.client.send_request(m.StopRun(reason=reason))

    # ---- the end

    def has_ended(self) -> bool:
        """True when the process has ended, well or not, and was not started again."""
        return is_ready(self._end)

    def stop(self, wait_s: float) -> None:
        """Ends the process, and waits for that up to `wait_s`. Raises Interrupted."""
        self._actor.stop.remote()
        wait_for_results([self._end], 1, wait_s, self._signals)

    def close(self) -> None:
        self.client.close()
        if self._port is not None:
            self._port.close()


def reserve_port(address: str) -> tuple[str, socket.socket | None]:
    """Returns an address with its port (port 0: a free one), and a socket that keeps the port for one buffer
    after the other; None where this host cannot keep it.

    The socket is bound and does not listen. Linux lets a server with SO_REUSEADDR, as ZeroMQ's are, listen
    beside it, and gives the port to nobody else: while the buffer is away, a client that tries to reach it
    could else get this very port for its own end, and meet itself.
    """
    if not is_tcp_address(address):
        return address, None
    host, port = host_of(address), int(address.rpartition(":")[2])
    kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        kept.bind(("" if host == "*" else host, port))
    except OSError:  # the buffer says what is wrong with its address
        kept.close()
        return address, None
    return f"tcp://{host}:{kept.getsockname()[1]}", kept
