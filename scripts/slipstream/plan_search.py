"""Finds the layout that fits and is nearest to one that does not: with the cheapest changes, then the fewest
GPUs.

It looks at a bounded set: numbers of ranks (of a critic of its own too), FSDP with or without sequence
parallelism, activation checkpointing and offloading, Megatron with tensor, pipeline and expert parallelism,
smaller microbatches, and engines that are fewer or have more GPUs each. Every proposal has been planned and
checked as a whole.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.checks import find_config_problems
from configs.learner import Attention, LearnerKind
from configs.parallel import Accumulate, FsdpConfig, MegatronConfig
from configs.placement import PlacementMode
from configs.schema import Config, Role
from configs.setting import show_value
from configs.sizes import Sizes
from learners.layout_rules import find_layout_problems
from learners.memory import (
    count_published_bytes,
    describe_parts,
    format_bytes,
    plan_critic_rank,
    plan_policy_rank,
)
from slipstream.plan_hardware import Hardware
from slipstream.plan_layout import (
    CUDA_BYTES,
    PROCESS_BYTES,
    PlannedModel,
    count_least_kv_mb,
    find_kv_problem,
    find_least_engine,
    plan_run,
)
from slipstream.role_placement import ENGINE_MEMORY
from sync.kept_versions import count_kept_bytes

COSTS = {
    "learner.tokens_per_microbatch": 1,
    "learner.activation_checkpointing": 1,
    "learner.ranks": 1,
    "placement.critic_ranks": 1,
    "learner.fsdp.accumulate": 1,
    "learner.fsdp.replicas": 1,
    "learner.fsdp.sequence_parallel": 2,
    "learner.engine": 3,
    "learner.megatron.tensor_parallel": 1,
    "learner.megatron.pipeline_parallel": 1,
    "learner.megatron.expert_parallel": 1,
    "learner.fsdp.cpu_offload": 6,
    "generators.tensor_parallel": 1,
    "generators.count": 1,
    "generators.kv_cache_mb": 1,
}
"""Costs of changed keys: the cheap ones are tried first. Others follow from these, and cost nothing."""
LEAST_TOKENS = 1024
"""Smallest microbatch that is proposed."""
PARALLEL = (1, 2, 4, 8, 16)
"""Sizes of tensor and pipeline parallelism."""
HALVES_OF_HOSTS = 32
"""Halves of hosts up to which each number of them is tried."""
MOST_HOSTS, MOST_CPU_HOSTS = 256, 32
"""Hosts up to which a layout is looked for: with GPUs, and without."""
MOST_TRIALS = 60
"""Whole plans that are made in one search."""

Changes = dict[str, Any]
"""Value by key, of keys that are changed."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout that fits."""

    overrides: list[str]
    """The words to type beside those that were typed."""
    hosts: int
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """Changes to one side, the learner or the engines."""

    changes: Changes
    gpus: int
    order: int
    """Among candidates that are equal otherwise: the first is preferred."""

    @property
    def cost(self) -> int:
        return sum(COSTS.get(key, 0) for key in self.changes)


def propose_layout(config: Config, model: PlannedModel, hardware: Hardware) -> Proposal | None:
    """Returns the nearest layout that fits this hardware, or else one that fits the fewest such hosts; None
    where none does."""
    search = _Search(config, model, hardware)
    if (found := search.find_nearest(hardware.hosts)) is not None:
        return found
    too_few, hosts = hardware.hosts, hardware.hosts
    most = MOST_HOSTS if hardware.gpus else MOST_CPU_HOSTS
    if config.placement.mode is PlacementMode.colocated:
        most = 1
    while hosts < most:
        hosts = min(most, 2 * hosts)
        if (found := search.find_nearest(hosts)) is not None:
            break
        too_few = hosts
    else:
        return None
    while hosts - too_few > 1:
        middle = (too_few + hosts) // 2
        nearer = search.find_nearest(middle)
        too_few, hosts, found = (middle, hosts, found) if nearer is None else (too_few, middle, nearer)
    return found


def describe_least(config: Config, model: PlannedModel, hardware: Hardware) -> str:
    """Returns what a rank, or an engine, needs at least, however many hosts there are."""
    many = dataclasses.replace(hardware, hosts=MOST_HOSTS)
    words = []
    if config.role is Role.all:
        ranks = [
            plan_policy_rank(apply_changes(config, one.changes), model.sizes, cuda=True).parts
            for one in list_learner_changes(config, model, many)
        ]
        least = describe_parts(min(ranks, key=lambda parts: sum(parts.values())))
        words.append(f"a rank of the learner needs at least {least}, and {format_bytes(CUDA_BYTES)} for CUDA")
    engines = [
        find_least_engine(apply_changes(config, one.changes), model.sizes)
        for one in list_engine_changes(config, model)
        if one.changes.get("generators.tensor_parallel", config.generators.tensor_parallel) <= hardware.gpus
    ]
    if engines and config.engine_names:
        fetched = format_bytes(count_fetched(config, model.sizes))
        words.append(
            f"an engine needs at least {format_bytes(min(engines))}, and on a host without ranks {fetched} "
            f"of shared memory (--shared-memory is {format_bytes(hardware.shared_bytes)})"
        )
    return "; ".join(words)


def count_fetched(config: Config, sizes: Sizes) -> float:
    """Returns the bytes of versions that a host with engines and without ranks keeps in shared memory."""
    model = config.model.dtype.num_bytes * sizes.published
    version = count_published_bytes(config, sizes)
    return sum(count_kept_bytes(config, version, model, share=0.0, has_engines=True).values())


def apply_changes(config: Config, changes: Changes) -> Config:
    """Returns the configuration with other values of these keys."""
    for key, value in changes.items():
        config = _replace_key(config, key.split("."), value)
    return config


def _replace_key(section: Any, names: list[str], value: Any) -> Any:
    inner = value if len(names) == 1 else _replace_key(getattr(section, names[0]), names[1:], value)
    return dataclasses.replace(section, **{names[0]: inner})


class _Search:
    """Looks for a layout on one, two or more hosts of one kind, and remembers which sides fit by
    themselves."""

    def __init__(self, config: Config, model: PlannedModel, hardware: Hardware) -> None:
        self._config, self._model, self._hardware = config, model, hardware
        self._fitting: dict[tuple[bool, str], bool] = {}

    def find_nearest(self, hosts: int) -> Proposal | None:
        """Returns the nearest layout on so many hosts."""
        hardware = dataclasses.replace(self._hardware, hosts=hosts)
        engines = [
            one
            for one in list_engine_changes(self._config, self._model)
            if self._fits_alone(one, is_learner=False)
        ]
        learners: dict[int, list[Candidate]] = {}
        for one in list_learner_changes(self._config, self._model, hardware):
            learners.setdefault(one.cost, []).append(one)
        costs = sorted({cost + engine.cost for cost in learners for engine in engines})
        trials = 0
        for total in costs:
            pairs = [
                (learner, engine)
                for engine in engines
                for learner in learners.get(total - engine.cost, ())
                if self._has_gpus(learner, engine, hardware)
            ]
            pairs.sort(key=lambda pair: (pair[0].gpus + pair[1].gpus, pair[0].order + pair[1].order))
            for learner, engine in pairs:
                if not self._fits_alone(learner, is_learner=True):
                    continue
                trials += 1
                if trials > MOST_TRIALS:
                    return None
                if (found := self._try_changes(learner.changes | engine.changes, hardware)) is not None:
                    return found
        return None

    def _try_changes(self, changes: Changes, hardware: Hardware) -> Proposal | None:
        config = apply_changes(self._config, changes)
        plan = plan_run(config, self._model, hardware)
        # The configuration's own rules come last, because asking them takes longest.
        if not plan.fits or find_config_problems(config):
            return None
        overrides = [f"{key}={show_value(value)}" for key, value in changes.items()]
        return Proposal(overrides, hardware.hosts, plan.num_gpus)

    def _has_gpus(self, learner: Candidate, engine: Candidate, hardware: Hardware) -> bool:
        """Tells whether so many whole GPUs are there. Engines of one GPU may share it."""
        if not hardware.gpus:
            return True
        tensor = engine.changes.get("generators.tensor_parallel", self._config.generators.tensor_parallel)
        shares = tensor == 1 or self._config.placement.mode is PlacementMode.colocated
        return learner.gpus + (0 if shares else engine.gpus) <= hardware.num_gpus

    def _fits_alone(self, candidate: Candidate, *, is_learner: bool) -> bool:
        """Tells whether the side has room where it is alone: most have not, and need no whole plan."""
        key = (is_learner, str(candidate.changes))
        if key not in self._fitting:
            config = apply_changes(self._config, candidate.changes)
            self._fitting[key] = self._fits_learner(config) if is_learner else self._fits_engine(config)
        return self._fitting[key]

    def _fits_learner(self, config: Config) -> bool:
        """Tells whether a rank fits an empty GPU, and as many as one host has fit an empty host."""
        if config.role is not Role.all:
            return True
        cuda = self._hardware.gpus > 0 and config.learner.gpus != 0
        plan, hardware = plan_policy_rank(config, self._model.sizes, cuda=cuda), self._hardware
        has_own_critic = config.num_learner_ranks > config.learner.ranks
        if cuda and has_own_critic:
            critic = plan_critic_rank(config, self._model.sizes, cuda=True)
            if critic.total_bytes > hardware.gpu_bytes - CUDA_BYTES:
                return False
        if not cuda:
            return plan.host_bytes + plan.total_bytes <= hardware.host_bytes
        if plan.total_bytes > hardware.gpu_bytes - CUDA_BYTES:
            return False
        # Ranks fill one host after the other.
        here, ranks = min(config.learner.ranks, hardware.gpus), config.learner.ranks
        version = count_published_bytes(config, self._model.sizes)
        kept = sum(count_kept_bytes(config, version, 0, share=here / ranks, has_engines=False).values())
        held = here * (plan.host_bytes + PROCESS_BYTES[True]) + kept
        return kept <= hardware.shared_bytes and held <= hardware.host_bytes

    def _fits_engine(self, config: Config) -> bool:
        """Tells whether an engine fits empty GPUs, with KV for one sequence."""
        if not config.engine_names:
            return True
        on_gpu = self._hardware.gpus > 0 and config.generators.gpus != 0
        if find_kv_problem(config, self._model.sizes, on_gpu=on_gpu) is not None:
            return False
        if on_gpu and config.generators.tensor_parallel > self._hardware.gpus:
            return False
        takes_host = config.generators.tensor_parallel == self._hardware.gpus > 1
        is_alone = takes_host and config.placement.mode is PlacementMode.apart and config.role is Role.all
        # No rank has room on such a host, so all of a version is fetched.
        if is_alone and count_fetched(config, self._model.sizes) > self._hardware.shared_bytes:
            return False
        share = config.generators.gpu_memory_fraction or ENGINE_MEMORY
        return not on_gpu or find_least_engine(config, self._model.sizes) <= share * self._hardware.gpu_bytes


# ---- the candidates


def list_engine_changes(config: Config, model: PlannedModel) -> Iterator[Candidate]:
    """Yields what may be changed in the engines: their number, and the GPUs of each."""
    generators = config.generators
    if not config.engine_names:
        yield Candidate({}, 0, 0)
        return
    counts = [generators.count]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    least_mb = [count_least_kv_mb(config, model.sizes, on_gpu=on_gpu) for on_gpu in (True, False)]
    caches = list(dict.fromkeys([generators.kv_cache_mb, None, *least_mb]))
    if config.role is not Role.all:  # it is the run's
        caches = caches[:1]
    tensors = sorted(
        {generators.tensor_parallel, *PARALLEL}, key=lambda one: (one < generators.tensor_parallel, one)
    )
    for tensor, (order, count), cache in itertools.product(tensors, enumerate(counts), caches):
        changes = _keep_changes(
            config,
            {
                "generators.tensor_parallel": tensor,
                "generators.count": count,
                "generators.kv_cache_mb": cache,
            },
        )
        changes = {key: value for key, value in changes.items() if key != "generators.gpus"}
        if tensor != generators.tensor_parallel and generators.gpus is not None:
            changes["generators.gpus"] = float(tensor)
        yield Candidate(changes, tensor * (count + config.eval.generators), order)


def list_learner_changes(config: Config, model: PlannedModel, hardware: Hardware) -> Iterator[Candidate]:
    """Yields what may be changed in the learner, where this command starts one."""
    if config.role is not Role.all:
        yield Candidate({}, 0, 0)
        return
    learner = config.learner
    tokens = [learner.tokens_per_microbatch]
    while tokens[-1] // 2 >= max(LEAST_TOKENS, config.generators.max_model_len):
        tokens.append(tokens[-1] // 2)
    checkpointing = [True] if learner.activation_checkpointing else [False, True]
    layouts = [*_list_fsdp_layouts(config), *_list_megatron_layouts(config, model, hardware)]
    if config.run.resume is not None:  # its checkpoints are this engine's
        layouts = [layout for layout in layouts if layout["learner.engine"] is learner.engine]
    for (order, budget), checkpoints, layout, (ranks, own) in itertools.product(
        enumerate(tokens), checkpointing, layouts, _list_ranks_of_both(config, hardware)
    ):
        # A critic's own ranks are laid out as the policy's.
        if not _divides_ranks(layout, ranks) or not _divides_ranks(layout, own):
            continue
        changes = _keep_changes(
            config,
            {
                "learner.ranks": ranks,
                "placement.critic_ranks": own or config.placement.critic_ranks,
                **layout,
                "learner.activation_checkpointing": checkpoints,
                "learner.tokens_per_microbatch": budget,
            },
        )
        yield Candidate(changes, ranks + own, order)


def _list_ranks_of_both(config: Config, hardware: Hardware) -> list[tuple[int, int]]:
    """Returns the numbers of ranks to try, each with the ranks of a critic of its own: those that were typed,
    or as many as the policy's; 0 without such a critic."""
    own = config.num_learner_ranks - config.learner.ranks
    return [
        (ranks, others)
        for ranks in _list_ranks(config, hardware)
        for others in (sorted({own, ranks}) if own else [0])
    ]


def _list_ranks(config: Config, hardware: Hardware) -> list[int]:
    """Returns the numbers of ranks to try: powers of two, three times these, and halves of hosts."""
    given = config.learner.ranks
    most = hardware.num_gpus if hardware.gpus else max(given, 2 * hardware.hosts)
    powers = [2**power for power in range(14)]
    halves = range(0, HALVES_OF_HOSTS * max(1, hardware.gpus // 2), max(1, hardware.gpus // 2))
    found = {number for number in (*powers, *(3 * power for power in powers), *halves) if number <= most}
    return sorted((found | {given}) - {0})


def _list_fsdp_layouts(config: Config) -> Iterator[Changes]:
    given = config.learner.fsdp if config.learner.engine is LearnerKind.fsdp else FsdpConfig()
    for replicas, sequence, offloads, accumulate in itertools.product(
        sorted({given.replicas, 1}),
        [given.sequence_parallel] + [one for one in PARALLEL if one > given.sequence_parallel],
        [True] if given.cpu_offload else [False, True],
        {given.accumulate, Accumulate.reduce},
    ):
        yield {
            "learner.engine": LearnerKind.fsdp,
            **{f"learner.megatron.{one.name}": one.default for one in dataclasses.fields(MegatronConfig)},
            "learner.fsdp.replicas": replicas,
            "learner.fsdp.sequence_parallel": sequence,
            "learner.fsdp.cpu_offload": offloads,
            "learner.fsdp.accumulate": accumulate,
        }


def _list_megatron_layouts(config: Config, model: PlannedModel, hardware: Hardware) -> Iterator[Changes]:
    """Yields the divisions of a model that its sizes allow; none where adapters are trained."""
    learner = config.learner
    if learner.lora.rank is not None or not hardware.gpus:
        return
    given = learner.megatron if learner.engine is LearnerKind.megatron else MegatronConfig()
    experts = model.sizes.num_experts
    dealt = [1] if not experts else [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if experts % size == 0]
    resets = {f"learner.fsdp.{one.name}": one.default for one in dataclasses.fields(FsdpConfig)}
    for tensor, pipeline, expert in itertools.product(
        sorted({given.tensor_parallel, *PARALLEL[:4]}),
        sorted({given.pipeline_parallel, *PARALLEL}),
        sorted({given.expert_parallel, *dealt}),
    ):
        layout: Changes = {
            "learner.engine": LearnerKind.megatron,
            **resets,
            "learner.attention": Attention.auto,
            "learner.megatron.tensor_parallel": tensor,
            "learner.megatron.pipeline_parallel": pipeline,
            "learner.megatron.expert_parallel": expert,
        }
        if not find_layout_problems(apply_changes(config, layout), model.hf):
            yield layout


def _divides_ranks(layout: Changes, ranks: int) -> bool:
    if layout["learner.engine"] is LearnerKind.fsdp:
        return (
            ranks % layout["learner.fsdp.replicas"] == 0
            and ranks % layout["learner.fsdp.sequence_parallel"] == 0
        )
    sizes = [layout[f"learner.megatron.{name}_parallel"] for name in ("tensor", "pipeline", "expert")]
    return ranks % (sizes[0] * sizes[1] * sizes[2]) == 0


def _keep_changes(config: Config, values: Changes) -> Changes:
    """Returns the values that differ from the configuration's."""
    found = {}
    for key, value in values.items():
        held: Any = config
        for name in key.split("."):
            held = getattr(held, name)
        if held != value:
            found[key] = value
    return found
