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
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from buffers import messages as m
from buffers.client import BufferClient
from buffers.heartbeat import HeartbeatThread
from buffers.keys import KeyRole
from buffers.watchdog import Stuck
from configs.load import to_yaml
from configs.schema import Config
from learners.memory import explain_shortage
from slipstream.cluster import stage
from slipstream.ray_waits import wait_for
from slipstream.role_placement import Placement, divide, wishes
from slipstream.stop_signals import StopSignals
from sync.folders import leave_all_folders


class Role:
    """What all roles share. The constructor runs first in the new process."""

    def __init__(self, name: str, logs: Path, driver_pid: int, own_cluster: bool) -> None:
        raylet = psutil.Process(int(os.environ["RAY_RAYLET_PID"]))
        die_with(driver_pid, raylet if own_cluster else None)
        logs.mkdir(parents=True, exist_ok=True)
        file = os.open(logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file, stream.fileno())
        logging.basicConfig(
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
            force=True,
        )

    def pid(self) -> int:
        return os.getpid()


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
        leave_all_folders()
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
    except (
        ValueError
    ) as error:  # told in one sentence: as a class that the driver can make again, whatever it was
        logging.getLogger("slipstream").exception("this role ends")
        raise ValueError(str(error)) from None
    except Exception:
        logging.getLogger("slipstream").exception("this role ends")
        raise


DEVICE_ERRORS = ("CUDA error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "NCCL error", "Triton Error [CUDA]")
"""What libraries other than torch write into a RuntimeError when the GPU has failed."""


def is_device_error(error: RuntimeError) -> bool:
    """Has the GPU failed, and not the code? In this process nothing runs on it any more. Too little memory is another matter: the next
    life would have no more."""
    import torch  # every process that has a device has imported it

    text = str(error)
    known = isinstance(error, torch.AcceleratorError | torch.distributed.DistBackendError)
    return (known or any(mark in text for mark in DEVICE_ERRORS)) and "out of memory" not in text


@contextlib.contextmanager
def ending_with_its_device() -> Iterator[None]:
    """A process whose GPU has failed dies: Ray starts another in its place, as long as `max_restarts` lasts, and no exception would
    make it do that."""
    try:
        yield
    except RuntimeError as error:
        if not is_device_error(error):
            raise
        logging.shutdown()
        os._exit(1)


@contextlib.contextmanager
def named_shortage_of_engine() -> Iterator[None]:
    """Says in one sentence, as a ValueError, that an engine's GPU has too little memory, whenever that is found."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        text = str(error).partition("\n")[0]
        raise ValueError(
            "an engine must fit into its GPU (a smaller generators.gpu_memory_fraction leaves more beside the cache, and generators.max_sequences "
            f"and max_model_len make less of it necessary), got: {text}"
        ) from error


@contextlib.contextmanager
def heartbeat(client: BufferClient, name: str) -> Iterator[HeartbeatThread]:
    """The buffer hears of a rank of the learner. One that ends well says farewell; one that fails is heard of no more."""
    heart = HeartbeatThread(client, partial(m.RoleHeartbeat, role=name), "loading the model")
    try:
        yield heart
    except BaseException:
        heart.close()
        raise
    heart.close(m.RoleHeartbeat(role=name, activity="leaving", ended=True))


class BufferRole(Role):
    def start(self, config: Config, folder: Path, resume_step: int | None) -> str:
        """Binds the buffer; returns its address."""
        from buffers.server import BufferServer

        self.server = BufferServer(config, folder, config_text=to_yaml(config), resume_step=resume_step)
        return self.server.address

    def run(self) -> None:
        with logged():
            self.server.run()

    def stop(self) -> None:
        self.server.stop()


class GeneratorRole(Role):
    def run(self, address: str, name: str, seed: int, keys: str | None, place: Placement) -> None:
        from generators.joining import join_run

        with ending_with_its_device(), logged(), named_shortage_of_engine():
            # Kept: an engine that is let go of computes for two seconds.
            self.generator = join_run(address, name, seed, keys, place.memory, place.is_shared)
            self.generator.run()


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
    def run(
        self, config: Config, folder: Path, address: str, rank: int, rendezvous: str, resume_step: int | None
    ) -> Failure | None:
        """None when it has ended well."""
        try:
            with logged():
                client = BufferClient(address, keys=config.buffer.keys, role=KeyRole.learner)
                with heartbeat(client.another(), f"learner-{rank}") as heart:
                    from learners.learner import (
                        start,
                    )  # after the first heartbeat: importing torch takes seconds

                    with explain_shortage(config):
                        start(config, folder, client, rank, rendezvous, resume_step, say=heart.say).run()
        except Exception as error:
            at = (
                time.time()
            )  # before the others can notice: connections are open until this function has ended
            report = (
                f": {error}" if isinstance(error, ValueError) else f" has failed:\n{traceback.format_exc()}"
            )
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


PLACED_S = 60.0
"""How long Ray may take to set aside what a run needs: another run may hold it."""


class Places:
    """Actor classes of the roles, each with the place that the division has given it."""

    def __init__(self, config: Config, signals: StopSignals, patience_s: float = PLACED_S) -> None:
        """Sets aside, at once for all roles, the processors and GPUs that they need: none of them can stay pending, and a role that
        starts again finds its place free. Bundles hold whole GPUs, because Ray may put two fractions on one GPU. Raises ValueError
        when the configuration asks for more than the node has, RoleFailed when it is not free within `patience_s`."""
        gpus, here = gpus_by_node(), ray.get_runtime_context().get_node_id()
        self.division, self._has_gpus = divide(gpus, here, wishes(config)), gpus[here] > 0
        self._restarts = config.generators.max_restarts
        self._bundles = list(self.division.bundles)
        bundles = [
            {"CPU": number} | ({"GPU": len(taken)} if taken else {})
            for taken, number in self.division.bundles.items()
        ]
        on_this_node = [{"ray.io/node-id": here}] * len(bundles)
        self._group = placement_group(bundles, bundle_label_selector=on_this_node) if bundles else None
        if self._group is not None and not wait_for([self._group.ready()], 1, patience_s, signals):
            remove_placement_group(self._group)
            raise RoleFailed(self._unplaced(bundles, patience_s))

    def buffer(self) -> Any:
        here = NodeAffinitySchedulingStrategy(self.division.node, soft=False)
        return ray.remote(max_concurrency=2, num_cpus=0)(BufferRole).options(scheduling_strategy=here)

    def learner(self, rank: int) -> Any:
        return ray.remote(LearnerRole).options(**self.options("learner", self.division.ranks[rank]))

    def generator(self, number: int) -> Any:
        return ray.remote(GeneratorRole).options(
            max_restarts=self._restarts,
            max_task_retries=self._restarts,
            **self.options("generator", self.division.engines[number]),
        )

    def options(self, name: str, place: Placement) -> dict[str, Any]:
        """What Ray is asked for, for an actor of this stage of the nursery."""
        options = stage(name)
        if self._has_gpus and not place.gpus:  # Ray hides no GPU from an actor that has asked for none
            variables = options.get("runtime_env", {}).get("env_vars", {})
            options = {"runtime_env": {"env_vars": variables | {"CUDA_VISIBLE_DEVICES": ""}}}
        return options | {
            "num_cpus": 1,
            "num_gpus": len(place.gpus) * place.share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundles.index(place.gpus)
            ),
        }

    def _unplaced(self, bundles: list[dict[str, int]], patience_s: float) -> str:
        """Names the roles, what they wait for, and what is free of it."""
        free = ray._private.state.available_resources_per_node().get(self.division.node, {})
        names = [f"learner-{rank}" for rank in range(len(self.division.ranks))]
        names += [f"generator-{number}" for number in range(len(self.division.engines))]
        needs = [(kind, sum(bundle.get(kind, 0) for bundle in bundles)) for kind in ("CPU", "GPU")]
        waits = " and ".join(
            f"{number} {kind}s ({free.get(kind, 0):g} free)" for kind, number in needs if number
        )
        return (
            f"{', '.join(names)} must be placed within {patience_s:g} s, and wait for {waits} on the driver's node "
            f"{self.division.node}: something else in the Ray cluster holds what is not free"
        )


def gpus_by_node() -> dict[str, int]:
    return {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}
