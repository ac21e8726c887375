"""The roles as Ray actors: a process each, with its own log file, that never outlives the driver."""

import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from buffers import messages as m
from buffers.buffer import Stuck
from buffers.client import BufferClient
from buffers.heartbeat import HeartbeatThread
from buffers.keys import KeyRole
from configs import load as configs
from configs.schema import Config
from sync.folders import abandon


class Role:
    """What all roles share. The constructor runs first in the new process."""

    def __init__(self, name: str, logs: Path, driver_pid: int, own_cluster: bool) -> None:
        raylet = psutil.Process(os.getppid())
        die_with(driver_pid, raylet if own_cluster else None)
        logs.mkdir(parents=True, exist_ok=True)
        file = os.open(logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file, stream.fileno())
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
        )


REFRESH_S = 1.0
"""How often the watch over the driver looks which processes there are to end with it."""


def die_with(pid: int, raylet: psutil.Process | None) -> None:
    """Ends this process as soon as the process `pid` (on this host) has ended, however it ended; and with it the raylet that
    the driver has started, and all of its children: Ray's agents outlive a killed driver for long.
    """
    watched = os.pidfd_open(pid)

    def wait() -> None:
        others: list[psutil.Process] = []
        ended = False
        while not ended:  # again and again: an agent may start after this role, and the raylet end before it
            with contextlib.suppress(psutil.NoSuchProcess):
                others = others if raylet is None else [raylet, *raylet.children()]
            ended = bool(select.select([watched], [], [], REFRESH_S)[0])
        abandon()
        time.sleep(0.5)  # the others do the same, before they are killed
        for process in others:
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="death-watch").start()


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """The traceback of what ends a role stands in its log too: the driver may show its message alone."""
    try:
        yield
    except ValueError as error:  # told in one sentence: as a class that the driver can make again, whatever it was
        logging.getLogger("slipstream").exception("this role ends")
        raise ValueError(str(error)) from None
    except Exception:
        logging.getLogger("slipstream").exception("this role ends")
        raise


@contextlib.contextmanager
def heartbeat(client: BufferClient, name: str) -> Iterator[HeartbeatThread]:
    """The buffer hears of a rank of the learner. One that ends well says farewell; one that fails is heard of no more."""
    heart = HeartbeatThread(client, partial(m.Alive, role=name), "loading the model")
    try:
        yield heart
    except BaseException:
        heart.close()
        raise
    heart.close(m.Alive(role=name, activity="leaving", ended=True))


class BufferRole(Role):
    def start(self, config: Config, folder: Path, resume_step: int | None) -> str:
        """Binds the buffer; returns its address."""
        from buffers.server import BufferServer

        self.server = BufferServer(config, folder, config_text=configs.to_yaml(config), resume_step=resume_step)
        return self.server.address

    def run(self) -> None:
        with logged():
            self.server.run()

    def stop(self) -> None:
        self.server.stop()


class GeneratorRole(Role):
    def run(self, address: str, name: str, seed: int, keys: str | None) -> None:
        from generators.worker import join

        with logged():
            join(address, name, seed, keys).run()


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank of the learner has raised."""

    error: str
    """In a line."""
    report: str
    """What follows the rank's name where it is told: all there is to know."""
    final: bool
    """Whether another life would raise it again: what the user or the code has caused."""
    at: float
    """Unix time in seconds."""


class LearnerRole(Role):
    def pid(self) -> int:
        return os.getpid()

    def run(
        self, config: Config, folder: Path, address: str, rank: int, rendezvous: str, resume_step: int | None
    ) -> Failure | None:
        """None when it has ended well."""
        try:
            with logged():
                client = BufferClient(address, keys=config.buffer.keys, role=KeyRole.learner)
                with heartbeat(client.another(), f"learner-{rank}") as heart:
                    from learners.learner import start  # after the first heartbeat: importing torch takes seconds

                    start(config, folder, client, rank, rendezvous, resume_step, say=heart.say).run()
        except Exception as error:
            at = time.time()  # before the others can notice: connections are open until this function has ended
            report = f": {error}" if isinstance(error, ValueError) else f" has failed:\n{traceback.format_exc()}"
            final = not isinstance(error, RuntimeError | OSError)
            line = f"{type(error).__name__}: {error}".partition("\n")[0]
            return Failure(line, report, final, at)
        return None


class RoleFailed(RuntimeError):
    """A role has ended that should not have."""


def result(ref: Any, name: str, logs: Path) -> Any:
    """What the role's method has returned. Raises RoleFailed, with the traceback or the end of the log."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ValueError | Stuck):
            raise RoleFailed(f"{name}: {error.cause}") from error
        raise RoleFailed(f"{name} has failed:\n{error}") from error
    except ray.exceptions.RayError as error:
        raise RoleFailed(died(name, logs)) from error


def died(name: str, logs: Path) -> str:
    path = logs / f"{name}.log"
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    return f"{name} has died. The end of its log:\n{''.join(lines[-30:])}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Places:
    """Each role's actor class, with the resources it is given."""

    buffer: Any
    learner: Any
    generator: Any


def place(config: Config, num_gpus: float) -> Places:
    """Divides the GPUs of the cluster: what the configuration does not say is shared out evenly.

    With fewer GPUs than processes, all share them by fraction (see `gpu_memory_fraction`); with none, all run on the CPU.
    Everything stays on the driver's host: sockets beyond it are not authenticated yet. Raises ValueError when more is
    asked for than there is.
    """
    ranks, engines = config.num_learner_ranks, config.generators.count
    even = min(1.0, num_gpus / max(1, ranks + engines)) if num_gpus else 0.0
    per_rank = even if config.learner.gpus is None else config.learner.gpus
    per_engine = even if config.generators.gpus is None else config.generators.gpus
    if ranks * per_rank + engines * per_engine > num_gpus + 1e-6:
        raise ValueError(
            f"learner.ranks × learner.gpus + generators.count × generators.gpus must be at most {num_gpus} (the GPUs "
            f"found), got {ranks} × {per_rank} + {engines} × {per_engine}"
        )
    if (
        0 < per_engine < 1
        and 0 < per_rank < 1
        and config.generators.gpu_memory_fraction + config.learner.gpu_memory_fraction > 1
    ):
        raise ValueError(
            "generators.gpu_memory_fraction + learner.gpu_memory_fraction must be at most 1 where they share a GPU, got "
            f"{config.generators.gpu_memory_fraction} + {config.learner.gpu_memory_fraction}"
        )
    here = {"scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)}
    restarts = config.generators.max_restarts
    return Places(
        buffer=ray.remote(max_concurrency=2, num_cpus=0)(BufferRole).options(**here),
        learner=ray.remote(num_cpus=1)(LearnerRole).options(num_gpus=per_rank, **here),
        generator=ray.remote(num_cpus=1)(GeneratorRole).options(
            num_gpus=per_engine, max_restarts=restarts, max_task_retries=restarts, **here
        ),
    )
