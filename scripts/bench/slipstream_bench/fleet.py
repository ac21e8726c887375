"""A buffer with many generators and a consumer, as processes, for `benchmark_buffer.py --fleet`.

    server: the real `BufferServer`, a process ◀─ TCP, two connections each ─▶ generators, 250 a process
                                              ◀─ TCP ─▶ consumer: takes batches and publishes, like a learner

The consumer is this process.
"""

import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from buffers import messages as m
from buffers.client import BufferClient, TakenBatch
from buffers.keys import KeyRole, make_keys
from buffers.run_status import RunStatus
from configs.load import load_config
from configs.schema import Config
from slipstream_bench.carried_groups import (
    SAMPLES,
    GroupSize,
    add_up_tokens,
    serve_buffer,
    spawn,
)
from slipstream_bench.fleet_generators import FleetCount, FleetWork, run_fleet

PER_PROCESS = 250
"""Generators of one process."""
PATIENCE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class FleetRow:
    """One row of the table: a fleet and its work."""

    num_generators: int
    num_tokens: int = 8192
    """Tokens of a sample. A group has 8 samples."""
    groups_per_step: int = 64
    offered: float | None = None
    """Tokens a second that all generators together offer. None: as many as the buffer takes."""
    durability: str = "os"
    lease_s: float = 15.0
    has_keys: bool = False

    @property
    def size(self) -> GroupSize:
        return GroupSize("fleet", self.num_tokens, 1, self.groups_per_step, 1)

    @property
    def tokens_per_group(self) -> int:
        return SAMPLES * self.num_tokens

    @property
    def groups_at_once(self) -> int:
        """Groups that a generator plays at a time: 16 of the whole fleet at least."""
        return max(1, 16 // self.num_generators)

    @property
    def play_s(self) -> float:
        at_once = self.num_generators * self.groups_at_once
        return 0.0 if self.offered is None else at_once * self.tokens_per_group / self.offered

    @property
    def name(self) -> str:
        pace = "all it takes" if self.offered is None else f"{self.offered / 1e6:g} M tokens/s"
        keys = ", keys" if self.has_keys else ""
        return f"{self.num_generators:,} × {self.num_tokens:,} tokens, {self.durability}{keys}: {pace}"


# ---- the processes


def make_config(row: FleetRow, address: str, keys: Path | None) -> Config:
    # A step waits for the last of its groups. Those of later steps are played meanwhile: with fewer,
    # generators would wait for leases, and all begin together.
    most = 3 * row.num_generators + 2 * row.groups_per_step
    if row.offered is None:
        # Unread submissions wait in memory, so fewer groups are under way where they are large.
        most = min(most, max(2 * row.groups_per_step, (1 << 30) // (13 * row.tokens_per_group)))
    return load_config(
        [
            f"generators.max_model_len={2 * row.num_tokens}",
            "generators.engine=simulated",
            "learner.engine=simulated",
            "eval.prompts=0",
            f"buffer.address={address}",
            f"learner.groups_per_step={row.groups_per_step}",
            f"learner.samples_per_prompt={SAMPLES}",
            "run.steps=100000000",
            "staleness.max_versions=1000000",
            f"buffer.max_groups={most}",
            f"buffer.lease_s={row.lease_s}",
            f"buffer.durability={row.durability}",
            "buffer.segment_mb=64",
            "buffer.retention=checkpoints",
            *([] if keys is None else [f"buffer.keys={keys}"]),
        ]
    )


def find_free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Fleet:
    """A buffer, its generators, and a consumer in this process. `close` ends all of them."""

    def __init__(self, row: FleetRow, folder: Path) -> None:
        """Returns once all generators have been welcomed."""
        folder.mkdir()
        self.row, self._folder = row, folder
        keys = folder / "keys" if row.has_keys else None
        if keys is not None:
            make_keys(keys, list(KeyRole))
        address = f"tcp://127.0.0.1:{find_free_port()}"
        self._config = make_config(row, address, keys)
        self._keys = None if keys is None else str(keys)
        self._processes: list[BaseProcess] = []
        self._orders: list[Connection] = []
        self.step = 0
        try:
            self.server = self._start_server()
            connect = partial(BufferClient, address, timeout_s=120.0, keys=self._keys)
            self.consumer, self.watcher = connect(role=KeyRole.learner), connect(role=KeyRole.operator)
            self.consumer.call(m.PublishVersion(version=0, manifest_locator="w"), m.PublishedVersion)
            self._start_generators(address)
            self.joined_s = self._wait_for_welcomes()
        except BaseException:
            self.close()
            raise

    def _start_process(self, function: Any, *arguments: Any) -> BaseProcess:
        process = spawn.Process(target=function, args=arguments, daemon=True)
        process.start()
        self._processes.append(process)
        return process

    def _start_server(self) -> psutil.Process:
        process = self._start_process(serve_buffer, self._config, self._folder / "journal")
        return psutil.Process(process.pid)

    def _start_generators(self, address: str) -> None:
        names = [f"generator-{number}" for number in range(self.row.num_generators)]
        # Two processes at least, so that one of them can be killed.
        per_process = min(PER_PROCESS, max(1, len(names) // 2))
        for first in range(0, len(names), per_process):
            work = FleetWork(
                address=address,
                keys=self._keys,
                size=self.row.size,
                names=names[first : first + per_process],
                groups_at_once=self.row.groups_at_once,
                play_s=self.row.play_s,
            )
            mine, theirs = spawn.Pipe()
            self._orders.append(mine)
            self._start_process(run_fleet, work, theirs)
            theirs.close()

    def order(self, order: str = "count", fleets: slice = slice(None)) -> FleetCount:
        """Sends an order to the processes of generators; returns the sum of their counts."""
        for pipe in self._orders[fleets]:
            pipe.send(order)
        total = FleetCount()
        for pipe in self._orders[fleets]:
            count: FleetCount = pipe.recv()
            total.num_joined += count.num_joined
            total.connected_at = min(total.connected_at, count.connected_at)
            total.num_accepted += count.num_accepted
            total.num_revoked += count.num_revoked
            for kind, latencies in count.latencies_s.items():
                total.latencies_s[kind] += latencies
        return total

    def _wait_for_welcomes(self) -> float:
        """Waits until all generators have joined; returns the seconds since the first of them connected."""
        began, connected = time.monotonic(), float("inf")
        while (num_joined := (count := self.order()).num_joined) < self.row.num_generators:
            assert time.monotonic() - began < PATIENCE_S, f"{num_joined} generators have joined"
            connected = min(connected, count.connected_at)
            time.sleep(0.01)
        return time.monotonic() - min(connected, count.connected_at)

    def train_step(self, wait_s: float = 0.5) -> bool:
        """Takes a batch if there is one, reads all of it, and publishes the next version."""
        taken = self.consumer.take_batch(self.step, wait_s=wait_s)
        if not isinstance(taken, TakenBatch):
            return False
        add_up_tokens(taken.table)
        num_trained = SAMPLES * (self.row.num_tokens - self.row.num_tokens // 4) * self.row.groups_per_step
        trained = m.ReportTrainedStep(
            step=self.step, num_trained=num_trained, idle_s=0.0, alive_s=1.0, metrics={"loss": 0.0}
        )
        self.consumer.call(trained, m.Acknowledged)
        self.step += 1
        self.consumer.call(m.PublishVersion(version=self.step, manifest_locator="w"), m.PublishedVersion)
        # A checkpoint lets the buffer delete old groups, so that the disk does not fill up.
        self.consumer.call(m.ReportCheckpoint(step=self.step, oldest=self.step), m.Acknowledged)
        return True

    def train_for(self, seconds: float) -> float:
        """Trains the steps that there are groups for; returns the longest time without one, in seconds."""
        trained_at = time.monotonic()
        until, longest_s = trained_at + seconds, 0.0
        while (left := until - time.monotonic()) > 0:
            is_trained = self.train_step(min(0.5, left))
            longest_s = max(longest_s, time.monotonic() - trained_at)
            trained_at = time.monotonic() if is_trained else trained_at
        return longest_s

    # ---- comings and goings

    def kill_server(self) -> None:
        """Kills the buffer and starts another one on its journal."""
        self.server.kill()
        self.server.wait()
        self.server = self._start_server()

    def kill_half(self) -> int:
        """Kills half of the generators' processes, without a word; returns how many generators they had."""
        half = len(self._orders) // 2
        dead, self._orders = self._orders[:half], self._orders[half:]
        for process in self._processes[1 : 1 + half]:
            process.kill()
        for pipe in dead:
            pipe.close()
        per_process = min(PER_PROCESS, max(1, self.row.num_generators // 2))
        return half * per_process

    def ask_status(self) -> RunStatus:
        return self.watcher.call(m.WatchRun(after=10**9, wait_s=0.0), m.RunNews).status

    def wait_for_roles(self, is_done: Callable[[RunStatus], bool]) -> float:
        """Trains on until the buffer's status is as wanted; returns the seconds."""
        began = time.monotonic()
        while not is_done(self.ask_status()):
            assert time.monotonic() - began < PATIENCE_S, "the buffer does not hear of its generators"
            self.train_step(wait_s=0.02)
        return time.monotonic() - began

    def close(self) -> None:
        for pipe in self._orders:
            pipe.close()
        for name in ("consumer", "watcher"):
            if (client := getattr(self, name, None)) is not None:
                client.close()
        # The server stands first and ends last.
        for process in reversed(self._processes):
            process.terminate()
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
