"""Generators that join a run which another command has started, on this host or another
(`role=generators`)."""

import os
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, KeysRefused, RefusedByBuffer
from buffers.run_status import RunStatus
from configs.schema import Config
from slipstream.answers import FirstAnswers
from slipstream.cluster import run_cluster
from slipstream.ray_waits import wait_for_results
from slipstream.role_failures import RoleFailed, get_result
from slipstream.role_logs import show_stacks_of_driver
from slipstream.role_places import RolePlaces
from slipstream.stop_signals import KILLED, StopSignals

LOOK_EVERY_S = 1.0


class GeneratorFleet:
    """The generators of one command, from their start until they leave the run."""

    def __init__(self, config: Config, signals: StopSignals) -> None:
        self._config, self._signals = config, signals
        name = f"{socket.gethostname()}-{os.getpid()}"
        self._names = [f"{name}-{number}" for number in range(config.generators.count)]
        self._logs = Path(config.run.outputs).resolve() / f"fleet-{name}" / "logs"
        self._answers = FirstAnswers(partial(print, flush=True), signals)

    def drive(self) -> int:
        """Consumes the buffer's news; produces lines about generators that have joined.

        Waits for the generators. Ends when the run does, or when the user asks for it; returns the exit
        status. Raises ValueError when no buffer answers at `buffer.address`, and Interrupted.
        """
        address = self._config.buffer.address
        client = BufferClient(address, timeout_s=10.0, keys=self._config.buffer.keys)
        try:
            status = self._fetch_status(client)
        except (BufferGone, RefusedByBuffer) as error:
            raise ValueError(f"buffer.address must be a running buffer's, got {address}: {error}") from error
        print(
            f"{address} is at step {status.num_trained_steps}; starting {len(self._names)} generators",
            flush=True,
        )
        show_stacks_of_driver(self._logs)
        try:
            with run_cluster(self._config):
                return self._watch_generators(client, self._launch_generators())
        except (RoleFailed, KeysRefused, RefusedByBuffer) as error:
            print(f"{error}\nLogs: {self._logs}", file=sys.stderr)
            return 1
        finally:
            # The generators have ended with their cluster: others may take their leases at once.
            with suppress(BufferGone):
                for name in self._names:
                    client.send_request(m.LeaveRun(generator=name))
            client.close()

    def _launch_generators(self) -> dict[Any, str]:
        """Returns the result of each generator's `run` -> its name."""
        places, ends = RolePlaces(self._config, self._signals), {}
        for number, name in enumerate(self._names):
            seed, place = xxhash.xxh32_intdigest(name.encode()), places.division.engines[number]
            role = places.generator_class(number).remote(
                name, self._logs, os.getpid(), self._config.cluster.address is None
            )
            self._answers.expect_answer(name, role)
            end = role.run.remote(self._config.buffer.address, name, seed, self._config.buffer.keys, place)
            ends[end] = name
        return ends

    def _watch_generators(self, client: BufferClient, ends: dict[Any, str]) -> int:
        """Returns the exit status once all generators have ended, or the user has asked to stop."""
        joined: set[str] = set()
        while ends and not self._signals.received:
            ended = wait_for_results(list(ends), 1, LOOK_EVERY_S, self._signals)
            self._answers.check_silent_roles()
            for end in ended:
                get_result(end, ends.pop(end), self._logs)
            try:
                status = self._fetch_status(client)
            except BufferGone:
                # The run is over, or its host is gone: the generators find out by themselves, and say which.
                continue
            for name in self._names:
                if name not in joined and name in status.generators and status.generators[name].version >= 0:
                    joined.add(name)
                    print(f"{name} generates with version {status.generators[name].version}", flush=True)
        print("the run is over" if not ends else f"{self._signals.received}: the generators have left")
        return KILLED if ends else 0

    def _fetch_status(self, client: BufferClient) -> RunStatus:
        """Asks for the status alone: no step comes after `sys.maxsize`."""
        with self._signals.interruptible():
            return client.call(m.WatchRun(after=sys.maxsize, wait_s=0.0), m.RunNews).status
