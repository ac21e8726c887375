"""The memory that each role of a run needs on each GPU and each host, by arithmetic, and what does not fit.

    rank of the learner    learners/memory.py
    engine                 generators/shared_gpu.py
    versions on a host     sync/kept_versions.py
    places                 role_placement.py, as for a run

The rest is here: what is no matter of the model (processes, the buffer), and the sums.
"""

import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from configs.generators import EngineKind
from configs.parity_probe import probe_lengths
from configs.placement import PlacementMode
from configs.schema import Config, Role
from configs.sizes import Sizes
from generators.shared_gpu import (
    BLOCK_TOKENS,
    MAX_BATCH_TOKENS,
    PAGE_TOKENS,
    TOKENS_PER_STEP,
    count_engine_parts,
    count_kv_token_bytes,
    count_kv_tokens,
)
from learners.layout_rules import find_layout_problems
from learners.memory import (
    GIB,
    STATE_BYTES,
    MemoryPlan,
    count_published_bytes,
    count_trained_parameters,
    describe_parts,
    format_bytes,
    plan_critic_rank,
    plan_policy_rank,
)
from slipstream.plan_hardware import Hardware
from slipstream.role_division import NodeRoom, RoleDivision, read_wishes
from slipstream.role_placement import ENGINE_MEMORY, divide_roles
from slipstream.turn_placement import divide_turns, takes_turns
from sync.kept_versions import count_kept_bytes

CUDA_BYTES = 2 * GIB
"""Memory of a GPU that a rank's process takes beside torch's: CUDA, NCCL's buffers, what lies between
blocks."""
ASLEEP_BYTES = 2 * GIB
"""The same of a role that has given the GPU to another (`placement.mode=colocated`)."""
PROCESS_BYTES = {True: 4 * GIB, False: GIB // 2}
"""Host memory of a process with libraries and buffers: with CUDA, and without."""
ROW_BYTES = 13
"""Bytes of a token in the buffer: its number, log-probability and version, and whether it was sampled."""
CPU_KV_BYTES = 64 << 20
"""KV of an engine on a CPU, where the configuration does not say."""
MANY_CPUS = 1 << 20
"""Processors of a host where they limit nothing: with GPUs, and in the Ray cluster of a single host."""
KEPT_ASLEEP = ("weights", "optimizer")
"""Parts of a rank that are in its host's memory while engines have the GPU. There are no gradients then."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    name: str
    hf: dict[str, Any]
    """Its Hugging Face configuration."""
    sizes: Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNeeds:
    """Needs of one process, or of one engine."""

    name: str
    host: int
    gpus: tuple[int, ...]
    """Numbers of the host's GPUs; empty on a CPU."""
    parts: dict[str, float]
    """Bytes on each of these GPUs."""
    least: float
    """Bytes that it cannot do without there: an engine's KV may be smaller."""
    available: float
    """Bytes that it may take there."""
    host_parts: dict[str, float]
    """Bytes in the host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """The KV cache of one engine."""

    bytes: float
    """On each GPU."""
    tokens: int
    sequences: int
    """Sequences of `generators.max_model_len` that fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The memory of a whole run."""

    hardware: Hardware
    roles: list[RoleNeeds] = field(default_factory=list)
    hosts: list[dict[str, float]] = field(default_factory=list)
    """Bytes in each host's memory by part; those in shared memory begin with `SHARED`."""
    shortages: list[str] = field(default_factory=list)
    """A sentence for each thing that does not fit, or cannot be."""
    kv: KvPlan | None = None
    version_bytes: int = 0
    checkpoint_bytes: int = 0
    shares: list[float] = field(default_factory=list)
    """The part of a version that each host's ranks publish."""
    fetching: list[int] = field(default_factory=list)
    """Hosts with engines that lack rows."""

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def has_learner(self) -> bool:
        return any(role.name.startswith("learner-") for role in self.roles)

    @property
    def has_engines(self) -> bool:
        return any(not role.name.startswith("learner-") for role in self.roles)

    @property
    def num_gpus(self) -> int:
        """GPUs that somebody is on."""
        return len({(role.host, gpu) for role in self.roles for gpu in role.gpus})


SHARED = "shared memory: "


def plan_run(config: Config, model: PlannedModel, hardware: Hardware) -> RunPlan:
    """Plans a run of this configuration on this hardware."""
    problems = find_layout_problems(config, model.hf)
    try:
        division = divide_hosts(config, hardware)
    except ValueError as error:
        return RunPlan(hardware=hardware, shortages=[*problems, str(error)])
    roles = list(_plan_ranks(config, model.sizes, division, hardware))
    engines, kv = _plan_engines(config, model.sizes, division, hardware)
    roles += engines
    if engines:
        on_gpu = any(engine.gpus for engine in engines)
        problems += filter(None, [find_kv_problem(config, model.sizes, on_gpu=on_gpu)])
    shares = _count_shares(config, division, hardware)
    busy = {int(place.node) for place in division.engines}
    version = count_published_bytes(config, model.sizes)
    at_home: list[list[RoleNeeds]] = [[] for _ in shares]
    for role in roles:
        at_home[role.host].append(role)
    hosts = [
        _sum_host(config, model.sizes, at_home[host], host, shares[host], host in busy, version)
        for host in range(hardware.hosts)
    ]
    shortages = problems + _find_gpu_shortages(roles, hardware)
    shortages += [one for number, parts in enumerate(hosts) for one in _check_host(number, parts, hardware)]
    return RunPlan(
        hardware=hardware,
        roles=roles,
        hosts=hosts,
        shortages=shortages,
        kv=kv,
        version_bytes=version,
        checkpoint_bytes=STATE_BYTES * count_trained_parameters(config, model.sizes),
        shares=shares,
        fetching=sorted(host for host in busy if shares[host] < 1.0),
    )


def divide_hosts(config: Config, hardware: Hardware) -> RoleDivision:
    """Places the roles. A node's name is its number. Raises ValueError for more than the hosts have."""
    cpus = MANY_CPUS if hardware.gpus or hardware.hosts == 1 else len(os.sched_getaffinity(0))
    nodes = [NodeRoom(str(number), cpus, hardware.gpus) for number in range(hardware.hosts)]
    generators = config.generators
    if generators.tensor_parallel > 1 and generators.gpus is None and hardware.gpus:
        config = dataclasses.replace(
            config, generators=dataclasses.replace(generators, gpus=float(generators.tensor_parallel))
        )
    wishes = read_wishes(config)
    return divide_turns(nodes, wishes) if takes_turns(wishes) else divide_roles(nodes, wishes)


def _plan_ranks(
    config: Config, sizes: Sizes, division: RoleDivision, hardware: Hardware
) -> Iterator[RoleNeeds]:
    limited = dataclasses.replace(
        config, learner=dataclasses.replace(config.learner, gpu_memory_fraction=division.rank_memory)
    )
    takes_turns = config.placement.mode is PlacementMode.colocated
    plans: dict[tuple[bool, bool], MemoryPlan] = {}
    for number, place in enumerate(division.ranks):
        cuda, is_policy = bool(place.gpus), number < config.learner.ranks
        if (cuda, is_policy) not in plans:
            plan = plan_policy_rank if is_policy else plan_critic_rank
            plans[(cuda, is_policy)] = plan(limited, sizes, cuda=cuda)
        planned = plans[(cuda, is_policy)]
        parts, host_parts = dict(planned.parts), dict(planned.host_parts)
        parts["published"] = parts.get("published", 0.0) if number == 0 else 0.0
        host_parts["process"] = float(PROCESS_BYTES[cuda])
        if not cuda:
            parts, host_parts = {}, parts | host_parts
        elif takes_turns and division.engines:
            host_parts["asleep"] = sum(parts.get(name, 0.0) for name in KEPT_ASLEEP)
        free = hardware.gpu_bytes - CUDA_BYTES - (ASLEEP_BYTES if takes_turns and division.engines else 0)
        yield RoleNeeds(
            name=f"learner-{number}",
            host=int(place.node),
            gpus=place.gpus,
            parts=parts,
            least=sum(parts.values()),
            available=min(free, (place.memory or 1.0) * hardware.gpu_bytes) if cuda else 0.0,
            host_parts=host_parts,
        )


def _plan_engines(
    config: Config, sizes: Sizes, division: RoleDivision, hardware: Hardware
) -> tuple[list[RoleNeeds], KvPlan | None]:
    """Returns the needs of all engines, and the KV cache of the one that has least."""
    tensor, takes_turns = config.generators.tensor_parallel, config.placement.mode is PlacementMode.colocated
    roles, caches = [], []
    names = division.names[len(division.ranks) :]
    for name, place in zip(names, division.engines, strict=True):
        if place.gpus:
            available = (place.memory or ENGINE_MEMORY) * hardware.gpu_bytes
            if takes_turns:
                available = min(available, hardware.gpu_bytes - ASLEEP_BYTES)
            parts = count_engine(config, sizes, on_gpu=True)
            host_parts = {"process": float(PROCESS_BYTES[True] * tensor)}
            if config.generators.kv_cache_mb is None:
                parts["KV cache"] = max(0.0, available - sum(parts.values()))
            if takes_turns:
                # Without updates in flight its requests go on with the same weights.
                host_parts["asleep"] = (not config.sync.in_flight) * tensor * parts["weights"]
            least = find_least_engine(config, sizes)
        else:
            available, least = 0.0, 0.0
            parts = count_engine(config, sizes, on_gpu=False)
            host_parts = {part: tensor * size for part, size in parts.items()}
            host_parts["process"] = float(PROCESS_BYTES[False] * tensor)
        caches.append(parts["KV cache"])
        roles.append(
            RoleNeeds(
                name=name,
                host=int(place.node),
                gpus=place.gpus,
                parts=parts if place.gpus else {},
                least=least,
                available=available,
                host_parts=host_parts,
            )
        )
    if not caches:
        return roles, None
    token_bytes = count_kv_token_bytes(sizes, config.model.dtype.num_bytes, tensor)
    block_tokens = _find_block_tokens(config, on_gpu=bool(division.engines[0].gpus))
    tokens = count_kv_tokens(min(caches), token_bytes, block_tokens)
    return roles, KvPlan(
        bytes=min(caches), tokens=tokens, sequences=tokens // config.generators.max_model_len
    )


def count_engine(config: Config, sizes: Sizes, *, on_gpu: bool) -> dict[str, float]:
    """Returns the bytes of an engine on each GPU, or in each of its processes, by part. On a GPU its KV is 0
    where the configuration does not say."""
    generators = config.generators
    parts = count_engine_parts(
        sizes,
        element_bytes=config.model.dtype.num_bytes,
        max_sequences=_count_sequences(config),
        tokens_per_step=_count_step_tokens(config),
        ranks=generators.tensor_parallel,
    )
    if not on_gpu:
        # Engines on a CPU use the snapshot's own memory, unless kernels pack the experts or ranks divide it.
        parts["overhead"] = 0.0
        parts["weights"] *= generators.tensor_parallel > 1 or sizes.num_experts > 0
    given = 0 if on_gpu else CPU_KV_BYTES
    if generators.kv_cache_mb is not None:
        given = generators.kv_cache_mb << 20
    return parts | {"KV cache": float(given)}


def find_least_engine(config: Config, sizes: Sizes) -> float:
    """Returns the bytes that an engine needs on each GPU, with KV for one sequence or as much as is told."""
    parts = count_engine(config, sizes, on_gpu=True)
    longest = _count_longest_kv(config, sizes, on_gpu=True)
    return sum(parts.values()) - parts["KV cache"] + max(parts["KV cache"], longest)


def _count_sequences(config: Config) -> int:
    """Returns the sequences that an engine has room for: the parity probe's lie beside the rollouts."""
    return config.generators.max_sequences + len(probe_lengths(config))


def _count_step_tokens(config: Config) -> int:
    """Returns the tokens that an engine computes in one step at most."""
    generators = config.generators
    if generators.engine is EngineKind.transformers:
        return max(MAX_BATCH_TOKENS, generators.max_model_len) + _count_sequences(config)
    return max(TOKENS_PER_STEP, _count_sequences(config))


def _find_block_tokens(config: Config, *, on_gpu: bool) -> int:
    """Returns the tokens of a block of an engine's KV."""
    is_transformers = config.generators.engine is EngineKind.transformers
    return PAGE_TOKENS["cuda" if on_gpu else "cpu"] if is_transformers else BLOCK_TOKENS


def _count_longest_kv(config: Config, sizes: Sizes, *, on_gpu: bool) -> float:
    """Returns the KV on each GPU of one sequence of `generators.max_model_len`: engines refuse less."""
    token_bytes = count_kv_token_bytes(sizes, config.model.dtype.num_bytes, config.generators.tensor_parallel)
    block_tokens = _find_block_tokens(config, on_gpu=on_gpu)
    blocks = -(-config.generators.max_model_len // block_tokens)
    return float(blocks * block_tokens * token_bytes)


def count_least_kv_mb(config: Config, sizes: Sizes, *, on_gpu: bool) -> int:
    """Returns the smallest `generators.kv_cache_mb` that engines take."""
    return math.ceil(_count_longest_kv(config, sizes, on_gpu=on_gpu) / 2**20)


def find_kv_problem(config: Config, sizes: Sizes, *, on_gpu: bool) -> str | None:
    """Returns a sentence where the KV cache that is told, or a CPU's usual one, holds no whole sequence."""
    told = config.generators.kv_cache_mb
    if told is None and on_gpu:
        return None
    longest = _count_longest_kv(config, sizes, on_gpu=on_gpu)
    if count_engine(config, sizes, on_gpu=on_gpu)["KV cache"] >= longest:
        return None
    return (
        f"generators.kv_cache_mb must be at least {count_least_kv_mb(config, sizes, on_gpu=on_gpu)} (a "
        f"sequence of generators.max_model_len={config.generators.max_model_len}), got "
        f"{CPU_KV_BYTES >> 20 if told is None else told}"
    )


def _count_shares(config: Config, division: RoleDivision, hardware: Hardware) -> list[float]:
    """Returns the part of a version's rows that the ranks of each host publish."""
    shares = [0.0] * hardware.hosts
    policy = division.ranks[: config.learner.ranks]
    for place in policy:
        shares[int(place.node)] += 1 / len(policy)
    return [min(1.0, share) if share < 1 - 1e-9 else 1.0 for share in shares]


def _sum_host(
    config: Config,
    sizes: Sizes,
    roles: list[RoleNeeds],
    host: int,
    share: float,
    has_engines: bool,
    version: int,
) -> dict[str, float]:
    """Returns the bytes in one host's memory by part."""
    parts: dict[str, float] = {}
    for role in roles:
        kind = role.name.rpartition("-")[0]
        for name, size in role.host_parts.items():
            if size:
                parts[f"{kind}: {name}"] = parts.get(f"{kind}: {name}", 0.0) + size
    kept = count_kept_bytes(
        config,
        version,
        config.model.dtype.num_bytes * sizes.published,
        share=share,
        has_engines=has_engines,
    )
    parts |= {f"{SHARED}{name}": size for name, size in kept.items() if size}
    if host == 0 and config.role is Role.all:
        parts["buffer: groups"] = float(_count_buffer_bytes(config))
        parts["buffer and driver: processes"] = float(2 * PROCESS_BYTES[False])
    return parts


def _count_buffer_bytes(config: Config) -> int:
    """Returns the bytes of the groups that the staleness bound lets be out, at their longest."""
    groups = (config.max_versions + 1) * config.learner.groups_per_step
    return groups * config.samples_per_group * config.generators.max_model_len * ROW_BYTES


def _find_gpu_shortages(roles: list[RoleNeeds], hardware: Hardware) -> list[str]:
    """Returns a sentence for the first role of each kind that has no room on a GPU."""
    found: dict[str, str] = {}
    for role in roles:
        kind = role.name.rpartition("-")[0]
        if role.gpus and role.least > role.available and kind not in found:
            numbers = " and ".join(map(str, role.gpus))
            least = role.parts | (
                {"KV cache": role.least - sum(role.parts.values()) + role.parts["KV cache"]}
                if "KV cache" in role.parts
                else {}
            )
            found[kind] = (
                f"{role.name} must fit into {format_bytes(role.available)} of GPU {numbers} of host "
                f"{role.host}, which has {format_bytes(hardware.gpu_bytes)}, got {describe_parts(least)}"
            )
    return list(found.values())


def _check_host(number: int, parts: dict[str, float], hardware: Hardware) -> list[str]:
    """Returns a sentence where the host's memory, or the part of it that may be shared, is too small."""
    total = sum(parts.values())
    shared = {name.removeprefix(SHARED): size for name, size in parts.items() if name.startswith(SHARED)}
    found = []
    if total > hardware.host_bytes:
        found.append(
            f"the roles of host {number} must fit into its {format_bytes(hardware.host_bytes)} of memory, "
            f"got {describe_parts(parts)}"
        )
    if sum(shared.values()) > hardware.shared_bytes:
        found.append(
            f"the versions that host {number} keeps must fit into {format_bytes(hardware.shared_bytes)} of "
            f"shared memory, got {describe_parts(shared)}"
        )
    return found
