"""Where Ray puts the roles: one reservation for all of them, as `role_placement.py` has divided the GPUs."""

from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from configs.schema import Config
from slipstream.cluster import stage_options
from slipstream.ray_waits import wait_for_results
from slipstream.role_failures import RoleFailed
from slipstream.role_placement import RolePlace, divide_gpus, read_wishes
from slipstream.roles import BufferRole, GeneratorRole, LearnerRole
from slipstream.stop_signals import StopSignals

PLACED_S = 60.0
"""Seconds that Ray may take to set aside what a run needs: another run may hold it."""


class RolePlaces:
    """Actor classes of the roles, each bound to the place that the division has given it."""

    def __init__(self, config: Config, signals: StopSignals, patience_s: float = PLACED_S) -> None:
        """Sets aside the processors and GPUs of all roles at once: no role can stay pending, and one that
        starts again finds its place free.

        Raises ValueError when the configuration asks for more than the node has, RoleFailed when it is not
        free within `patience_s`, and Interrupted.
        """
        num_gpus, here = count_gpus_by_node(), ray.get_runtime_context().get_node_id()
        self.division = divide_gpus(num_gpus, here, read_wishes(config))
        self._has_gpus = num_gpus[here] > 0
        self._max_restarts = config.generators.max_restarts
        # Bundles hold whole GPUs: of two bundles with fractions, Ray may put both on one GPU.
        self._bundles = list(self.division.bundles)
        bundles = [
            {"CPU": num_processes} | ({"GPU": len(gpus)} if gpus else {})
            for gpus, num_processes in self.division.bundles.items()
        ]
        on_this_node = [{"ray.io/node-id": here}] * len(bundles)
        self._group = placement_group(bundles, bundle_label_selector=on_this_node) if bundles else None
        if self._group is not None and not wait_for_results([self._group.ready()], 1, patience_s, signals):
            remove_placement_group(self._group)
            raise RoleFailed(self._describe_missing_place(bundles, patience_s))

    def buffer_class(self) -> Any:
        here = NodeAffinitySchedulingStrategy(self.division.node, soft=False)
        return ray.remote(max_concurrency=2, num_cpus=0)(BufferRole).options(scheduling_strategy=here)

    def learner_class(self, rank: int) -> Any:
        return ray.remote(LearnerRole).options(**self.actor_options("learner", self.division.ranks[rank]))

    def generator_class(self, number: int) -> Any:
        return ray.remote(GeneratorRole).options(
            max_restarts=self._max_restarts,
            max_task_retries=self._max_restarts,
            **self.actor_options("generator", self.division.engines[number]),
        )

    def actor_options(self, stage: str, place: RolePlace) -> dict[str, Any]:
        """Returns Ray's options for an actor at this place, forked from this stage of the nursery."""
        options = stage_options(stage)
        # Ray hides no GPU from an actor that has asked for none.
        if self._has_gpus and not place.gpus:
            variables = options.get("runtime_env", {}).get("env_vars", {})
            options = {"runtime_env": {"env_vars": variables | {"CUDA_VISIBLE_DEVICES": ""}}}
        return options | {
            "num_cpus": 1,
            "num_gpus": len(place.gpus) * place.share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundles.index(place.gpus)
            ),
        }

    def _describe_missing_place(self, bundles: list[dict[str, int]], patience_s: float) -> str:
        """Names the roles, the resources that they wait for, and how much of those is free."""
        free = ray._private.state.available_resources_per_node().get(self.division.node, {})
        names = [f"learner-{rank}" for rank in range(len(self.division.ranks))]
        names += [f"generator-{number}" for number in range(len(self.division.engines))]
        needs = [(kind, sum(bundle.get(kind, 0) for bundle in bundles)) for kind in ("CPU", "GPU")]
        waits = " and ".join(
            f"{number} {kind}s ({free.get(kind, 0):g} free)" for kind, number in needs if number
        )
        return (
            f"{', '.join(names)} must be placed within {patience_s:g} s, and wait for {waits} on the "
            "driver's node "
            f"{self.division.node}: something else in the Ray cluster holds what is not free"
        )


def count_gpus_by_node() -> dict[str, int]:
    return {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}
