"""The roles as Ray actors: a process each, with its own log file, that never outlives the driver."""

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from buffers import messages as m
from buffers.client import BufferClient
from buffers.heartbeat import HeartbeatThread
from buffers.keys import KeyRole
from buffers.parcels import PARCELS
from buffers.timeline import Timeline
from configs.load import to_yaml
from configs.schema import Config
from learners.memory import explain_shortage
from slipstream.role_division import RolePlace
from slipstream.role_failures import (
    RankFailure,
    describe_failure,
    die_of_device_error,
    explain_engine_shortage,
)
from slipstream.role_logs import log_into_file, log_what_ends_role
from sync.folders import leave_all_folders

if TYPE_CHECKING:
    from generators.worker import Generator

log = logging.getLogger("slipstream")

REFRESH_S = 1.0
"""Seconds after which the watch over the driver looks again which processes there are to end with it."""
LEAVING_S = 0.5
"""Seconds that all roles have to leave their shared folders before one of them kills Ray's processes."""


class RoleProcess:
    """The start of every role's process. The constructor runs before anything else there."""

    def __init__(self, name: str, logs: Path, driver_pid: int | None, own_cluster: bool) -> None:
        """`driver_pid` is None on another node than the driver's: the role ends with its node's raylet there,
        which ends it when the driver has ended.

        Set `own_cluster` when the driver has started the Ray cluster, so that the cluster ends with it."""
        raylet = psutil.Process(int(os.environ["RAY_RAYLET_PID"]))
        end_with_driver(driver_pid, raylet, own_cluster)
        self._run_folder = logs.parent
        log_into_file(logs / f"{name}.log")

    def get_pid(self) -> int:
        return os.getpid()

    def get_devices(self) -> str:
        """Returns the names of the GPUs that Ray lets this process see."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def end_with_driver(driver_pid: int | None, raylet: psutil.Process, own_cluster: bool) -> None:
    """Ends this process as soon as the driver has ended, if it is on this host, or the raylet has: a worker
    that the nursery has forked would outlive it.

    With it end the raylet that the driver has started, and all its children: Ray's agents outlive a killed
    driver for long.
    """
    pids = [raylet.pid] if driver_pid is None else [driver_pid, raylet.pid]
    watched = [os.pidfd_open(pid) for pid in pids]

    def wait_for_end() -> None:
        others: list[psutil.Process] = []
        ended = False
        # Again and again: an agent may start after this role, and the raylet may end before it.
        while not ended:
            with contextlib.suppress(psutil.NoSuchProcess):
                others = [raylet, *raylet.children()] if own_cluster else others
            ended = bool(select.select(watched, [], [], REFRESH_S)[0])
        leave_all_folders()
        time.sleep(LEAVING_S)
        for process in others:
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True, name="driver-watch").start()


@contextlib.contextmanager
def send_heartbeats(client: BufferClient, name: str, run: Path) -> Iterator[HeartbeatThread]:
    """Tells the buffer, and the timeline in the run's folder, what a rank of the learner does. A rank that
    ends well says farewell; one that fails falls silent."""
    compose = partial(m.RoleHeartbeat, role=name)
    heart = HeartbeatThread(client, compose, "loading the model", timeline=Timeline(run, name))
    try:
        yield heart
    except BaseException:
        heart.close()
        raise
    heart.close(m.RoleHeartbeat(role=name, activity="leaving", ended=True))


class BufferRole(RoleProcess):
    def start(self, config: Config, folder: Path, resume_step: int | None, address: str) -> str:
        """Binds the buffer of the run in `folder`, at this address; returns it with its port."""
        from buffers.server import BufferServer

        self.server = BufferServer(
            config,
            folder / "journal",
            address=address,
            config_text=to_yaml(config),
            parcels=folder / PARCELS,
            resume_step=resume_step,
        )
        return self.server.address

    def run(self) -> None:
        with log_what_ends_role():
            self.server.run()

    def stop(self) -> None:
        self.server.stop()


class ToldToLeave(BaseException):
    """Raised in a generator's process that is told to leave before it generates. Not an `Exception`: no
    library that starts an engine may end it."""


class GeneratorRole(RoleProcess):
    """SIGTERM asks its generator to leave, whoever sends it."""

    def __init__(
        self,
        name: str,
        logs: Path,
        driver_pid: int | None,
        own_cluster: bool,
        grace_s: float,
        patience_s: float,
    ) -> None:
        """`grace_s`: seconds that it has then for the groups that it has begun. `patience_s`: seconds that it
        waits for a silent buffer when it joins."""
        super().__init__(name, logs, driver_pid, own_cluster)
        self._grace_s, self._patience_s, self._joins = grace_s, patience_s, False
        self._is_leaving = False
        # An attribute, because the destructor of an engine computes for two seconds.
        self._generator: Generator | None = None
        # In the place of Ray's, which ends the process.
        signal.signal(signal.SIGTERM, self._note_sigterm)
        # `scripts/cluster/node.sh` blocks it in all of Ray's processes.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def run(
        self, address: str, name: str, seed: int, keys: str | None, place: RolePlace, evaluates: bool
    ) -> bool:
        """Generates until the run ends. Returns True when it has left before, because of a SIGTERM."""
        try:
            with die_of_device_error(), log_what_ends_role(), explain_engine_shortage():
                self._join_run(address, name, seed, keys, place, evaluates)
                assert self._generator is not None, "it has joined"
                has_left = self._generator.run()
        except ToldToLeave:
            has_left = True
        if has_left:
            log.info("%s has left: SIGTERM", name)
        return has_left

    def _join_run(
        self, address: str, name: str, seed: int, keys: str | None, place: RolePlace, evaluates: bool
    ) -> None:
        """Raises ToldToLeave."""
        self._joins = True
        if self._is_leaving:
            raise ToldToLeave
        if place.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = place.devices
        # It imports the engine.
        from generators.joining import join_run

        self._generator = join_run(
            address,
            name,
            seed,
            keys,
            place.memory,
            place.is_shared,
            evaluates=evaluates,
            patience_s=self._patience_s,
            turns_of=self._run_folder if place.takes_turns else None,
            on_gpus=bool(place.gpus),
            tensor_parallel=place.processors,
            timeline=Timeline(self._run_folder, name),
        )
        self._joins = False
        if self._is_leaving:  # a library, or a destructor, has swallowed what the signal raised
            self._generator.leave_within(self._grace_s)

    def _note_sigterm(self, number: int, frame: FrameType | None) -> None:
        """The first one counts: the driver hands on a signal that a scheduler may have sent to all
        processes."""
        if self._is_leaving:
            return
        self._is_leaving = True
        if self._generator is not None:
            self._generator.leave_within(self._grace_s)
        elif self._joins:
            raise ToldToLeave


class LearnerRole(RoleProcess):
    def run(
        self, config: Config, folder: Path, address: str, rank: int, rendezvous: str, resume_step: int | None
    ) -> RankFailure | None:
        """Trains until the run ends. Returns None when it has ended well.

        A failure is returned, not raised: the driver weighs the failures of all ranks before it decides
        (`supervisor.py`).
        """
        try:
            with log_what_ends_role():
                # A buffer that has died is started again: nothing is lost by waiting for it.
                patience_s = config.buffer.reconnect_s
                client = BufferClient(
                    address, timeout_s=patience_s, keys=config.buffer.keys, role=KeyRole.learner
                )
                with send_heartbeats(client.open_another(), f"learner-{rank}", folder) as heart:
                    # After the first heartbeat: importing torch takes seconds.
                    from generators.run_files import bring_model
                    from learners.rank_hosts import reads_weights
                    from learners.startup import start_learner

                    if not reads_weights(config, rank):
                        bring_model(config, client, partial(_say_loading, heart))
                    with explain_shortage(config):
                        start_learner(
                            config,
                            folder,
                            client,
                            rank,
                            rendezvous,
                            resume_step,
                            say=heart.set_activity,
                            timeline=heart.timeline,
                        ).run()
        except Exception as error:
            return describe_failure(error)
        return None


def _say_loading(heart: HeartbeatThread, activity: str, moved: bool) -> None:
    """Says what a rank does before it loads the model."""
    heart.set_activity(f"loading: {activity}", moved)
