"""The Ray cluster of a run: one of its own, without what only a cluster for many needs, or the one at `cluster.address`."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.schema import Config
from generators import tasks
from slipstream import agent, newborn
from slipstream.nursery import FOLDER, Stage, nursery

WORKER = Path(newborn.__file__)
AGENT = Path(agent.__file__)
DASHBOARD_AGENT, OTHER_AGENT = "--dashboard_agent_command=", "--runtime_env_agent_command="
"""Arguments of a raylet."""
HAS_NVIDIA = Path("/dev/nvidiactl")
LATE_IN_VLLM = [
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.registry",
]
"""What an engine imports when it is made."""


def import_ahead(config: Config) -> AbstractContextManager[None]:
    """Begins to import what the roles need. Not for another cluster's workers, nor beside GPUs: a device that was looked at before
    a fork cannot be used after it. Who starts many runs may have a nursery for all of them: then it is used as it is."""
    if config.cluster.address is not None or HAS_NVIDIA.exists() or FOLDER in os.environ:
        return nullcontext()
    return nursery(nursery_stages(config))


def nursery_stages(config: Config) -> dict[str, Stage]:
    """The stages of a nursery, with the imports that a run needs."""
    learner = ["learners.startup", "buffers.client"]
    match config.learner.engine:
        case LearnerKind.fsdp:
            learner += [
                "learners.fsdp",
                "transformers.models.auto.modeling_auto",
                "transformers.models.auto.tokenization_auto",
            ]
        case LearnerKind.megatron:
            learner += ["learners.megatron.engine"]
    generator = ["generators.joining"]
    match config.generators.engine:
        case EngineKind.simulated:
            generator += ["generators.simulated_engine"]
        case EngineKind.vllm:
            generator += ["generators.vllm_engine", *LATE_IN_VLLM]
            if (
                Path(tasks.__path__[0]) / f"{config.task.name}.py"
            ).is_file():  # of another nobody knows what it starts
                generator += [f"generators.tasks.{config.task.name}"]
    worker = ["ray._private.workers.default_worker", "slipstream.roles"]
    return {
        "buffer": Stage(["buffers.server"], worker),
        "learner": Stage(learner, worker),
        "generator": Stage([], [*worker, *generator]),
    }


def stage_options(name: str) -> dict[str, Any]:
    """Option of an actor that is forked from this stage of the nursery, where there is one."""
    return {"runtime_env": {"env_vars": {newborn.STAGE: name}}} if FOLDER in os.environ else {}


@contextmanager
def run_cluster(config: Config) -> Iterator[None]:
    """A Ray cluster inside this run, or the one at `cluster.address`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_prestart_worker_first_driver", "0"
    )  # our roles are actors: idle workers only cost start-up
    num_roles = 1 + config.num_learner_ranks + config.generators.count
    os.environ.setdefault(
        "RAY_worker_maximum_startup_concurrency", str(num_roles)
    )  # a generator must not hold up the learner
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's default is 15: whatever else this machine computes would starve the run, whose heartbeats then stop.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    node: Any = None if config.cluster.address else start_node(num_roles)
    try:
        with keep_sigterm_handler():
            ray.init(
                address=config.cluster.address or node.gcs_address, log_to_driver=False, logging_level="ERROR"
            )
        yield
    finally:
        ray.shutdown()
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=True)


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Undoes what `ray.init` does to SIGTERM: a Python handler that raises SystemExit inside Ray's calls, installed first, and a
    compiled one that aborts the process, installed last. Python does not see the second, so it is replaced in any case."""
    from ray._private import utils

    handler, install_handler = signal.getsignal(signal.SIGTERM), utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = install_handler
        signal.signal(signal.SIGTERM, handler)


def start_node(num_cpus: int, num_gpus: int | None = None, address: str | None = None) -> Any:
    """A node with so many processors and GPUs (None: those that there are), of the cluster at `address` or of a new one. It is what
    `ray.init(address="local")` starts, less the dashboard and its agent, the log monitor and the autoscaler's monitor: 5 s of a
    processor, and none of them has anything to do here."""
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class QuietNode(Node):
        def start_api_server(self, **options: Any) -> None:
            pass

        def start_raylet(self, *arguments: Any, **options: Any) -> None:
            own = f"{sys.executable} -S {AGENT} {self._session_dir} {self._node_id}"
            start = services.start_ray_process

            def start_quietly(command: list[str], *others: Any, **more: Any) -> Any:
                for place, part in enumerate(command):
                    if part.startswith(DASHBOARD_AGENT):
                        command[place] = f"{DASHBOARD_AGENT}{own}"
                    elif part.startswith(OTHER_AGENT):
                        command[place] = f"{OTHER_AGENT}{own} {part.removeprefix(OTHER_AGENT)}"
                return start(command, *others, **more)

            services.start_ray_process = start_quietly
            try:
                super().start_raylet(*arguments, **options)
            finally:
                services.start_ray_process = start

    return QuietNode(
        RayParams(
            num_cpus=num_cpus, num_gpus=num_gpus, object_store_memory=80 << 20, include_dashboard=False,
            include_log_monitor=False, no_monitor=True, gcs_address=address,
            setup_worker_path=str(WORKER) if FOLDER in os.environ else None,
        ),
        head=address is None, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=address is None,
    )  # fmt: skip
