"""The Ray cluster of a run: one of its own, without the parts that only a cluster for many needs, or the one
at `cluster.address`."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.schema import Config
from generators import tasks
from slipstream import agent, newborn
from slipstream.nursery import FOLDER, Stage, run_nursery
from slipstream.role_logs import ray_log

START_S = 120.0
"""Seconds that Ray's own processes may take to start, each."""
LOOK_S = 0.02
"""Seconds after which they are looked at again."""
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
"""Modules that an engine imports when it is made."""

_own_node: Any = None
"""The node of the cluster that `run_cluster` has started, while its block lasts."""


def import_ahead(config: Config) -> AbstractContextManager[None]:
    """Starts to import the modules of the roles, in a nursery that lives as long as the block.

    There is none for another cluster's workers, nor beside GPUs: a device that was looked at before a fork
    cannot be used after it. A caller that starts many runs may have one nursery for all of them; then that
    one is used.
    """
    if config.cluster.address is not None or HAS_NVIDIA.exists() or FOLDER in os.environ:
        return nullcontext()
    return run_nursery(nursery_stages(config))


def nursery_stages(config: Config) -> dict[str, Stage]:
    """Returns the stages of a nursery, with the modules that a run needs."""
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
        case EngineKind.transformers:
            generator += [
                "generators.transformers_engine",
                "transformers.models.auto.modeling_auto",
                "transformers.models.auto.tokenization_auto",
            ]
        case EngineKind.vllm:
            generator += ["generators.vllm_engine", *LATE_IN_VLLM]
    is_own_task = (Path(tasks.__path__[0]) / f"{config.task.name}.py").is_file()
    # Only a task of ours: nobody knows which threads the import of another one starts.
    if config.generators.engine is not EngineKind.simulated and is_own_task:
        generator += [f"generators.tasks.{config.task.name}"]
    worker = ["ray._private.workers.default_worker", "slipstream.roles"]
    return {
        "buffer": Stage(["buffers.server"], worker),
        "learner": Stage(learner, worker),
        "generator": Stage([], [*worker, *generator]),
    }


def stage_options(name: str) -> dict[str, Any]:
    """Returns Ray's option that forks an actor from this stage of the nursery; none where there is no
    nursery."""
    return {"runtime_env": {"env_vars": {newborn.STAGE: name}}} if FOLDER in os.environ else {}


@contextmanager
def run_cluster(config: Config) -> Iterator[None]:
    """Starts a Ray cluster for the block, or joins the one at `cluster.address`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The roles are actors: idle workers only cost time at the start.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    num_roles = 1 + config.num_learner_ranks + len(config.engine_names)
    # A generator that starts must not hold up the learner.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(num_roles))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's default is 15: any other program would starve the run, whose heartbeats then stop.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray
    from ray._private import ray_constants, worker

    # Ray executes whatever is sent to its ports. Those of a cluster of our own are for this host alone: else
    # Ray takes the address by which the host reaches the network, and listens on every interface.
    ray_constants.ENABLE_RAY_CLUSTER = config.cluster.address is not None
    # Ray counts a processor for each role, and for each rank of an engine. As many more may join as the host
    # has (`scripts/scale.sh`).
    further_ranks = len(config.engine_names) * (config.generators.tensor_parallel - 1)
    room = num_roles + further_ranks + (os.cpu_count() or 1)
    # A busy host needs longer than Ray's 30 s.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", f"{START_S:.0f}")
    global _own_node
    node: Any = None if config.cluster.address else start_node(room)
    _own_node = node
    try:
        worker.print_to_stdstream = log_words_of_ray
        with keep_sigterm_handler():
            ray.init(
                address=config.cluster.address or node.gcs_address, log_to_driver=False, logging_level="ERROR"
            )
        yield
    finally:
        # Without its control processes, Ray would wait for them for a minute, and then abort this process.
        if not list_dead_processes():
            ray.shutdown()
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=True)
        _own_node = None


def log_words_of_ray(printed: Mapping[str, Any], ignore_prefix: bool) -> None:
    """Takes Ray's errors: a node that is lost costs a page of the compiled code's stack, where the run has a
    sentence of its own."""
    ray_log.info("%s", "\n".join(printed["lines"]))


def has_own_cluster() -> bool:
    return _own_node is not None


def list_dead_processes() -> list[str]:
    """Returns the names of Ray's own processes that have died, of those that this process has started."""
    return [] if _own_node is None else [name for name, _ in _own_node.dead_processes()]


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Keeps this process's SIGTERM handler while `ray.init` runs.

    Ray first installs a Python handler, which raises SystemExit inside Ray's calls, and last a compiled one,
    which aborts the process. Python does not see the second, so the handler is installed again in any
    case.
    """
    from ray._private import utils

    handler, install_handler = signal.getsignal(signal.SIGTERM), utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = install_handler
        signal.signal(signal.SIGTERM, handler)


def start_node(
    num_cpus: int, num_gpus: int | None = None, address: str | None = None, **parameters: Any
) -> Any:
    """Starts a node of the cluster at `address`, or of a new one, and returns it. `num_gpus` of None means
    all there are; `parameters` are more of Ray's own.

    It is the node that `ray.init(address="local")` starts, less the dashboard and its agent, the log monitor
    and the autoscaler's monitor: they cost 5 s of a processor, and none of them has anything to do here.

    Raises RoleFailed where it does not start within `START_S`.
    """
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._private.state import GlobalState

    from slipstream.role_failures import RoleFailed

    class QuietNode(Node):
        def start_api_server(self, **options: Any) -> None:
            pass

        def start_ray_processes(self) -> None:
            super().start_ray_processes()
            dead, deadline = list[str](), time.monotonic() + START_S
            state = GlobalState()
            state._initialize_global_state(services._get_gcs_client_options(self.gcs_address))
            # Ray itself waits for 30 s, and does not see that its raylet has died.
            while not dead and time.monotonic() < deadline:
                if any(node["NodeID"] == self._node_id for node in state.node_table()):
                    return
                time.sleep(LOOK_S)
                dead = [name for name, _ in self.dead_processes()]
            self.kill_all_processes(check_alive=False, allow_graceful=False)
            why = f"its {' and '.join(dead)} has died" if dead else "it has not"
            raise RoleFailed(f"Ray must start on this host within {START_S:.0f} s, and {why}")

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
            setup_worker_path=str(WORKER) if FOLDER in os.environ else None, **parameters,
        ),
        head=address is None, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=address is None,
    )  # fmt: skip
