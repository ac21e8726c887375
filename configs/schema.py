"""The configuration: every field, its default and the rule it obeys.

The dataclasses are the schema and hold the defaults; the yaml files beside them only compose. Checks stand in three
places, each once: names and types by OmegaConf, one part by its own `problems()`, across parts by `Config.problems()`.
`load` collects all of them into one `ValueError`. Nothing adjusts a user's number silently.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from configs.algorithms import Advantage, AlgoConfig, Proximal
from configs.learner import CriticPlace, LearnerConfig, LearnerKind, LoraPublish, PlacementConfig
from configs.rules import gpu_share, positive, within_one

LARGE_RATE = 1e-4
"""Above it a learning rate is told of, unless it is for the tiny model or for adapters."""

Mode = StrEnum("Mode", {"async": "async", "on_policy": "on_policy"})
"""`on_policy` is the synchronous baseline: S = 0, whatever `staleness.max_versions` says; same code."""


class Role(StrEnum):
    all = "all"
    """A whole run: buffer, learner and generators."""
    generators = "generators"
    """Only generators, which join the run whose buffer answers at `buffer.address`."""


class OnLate(StrEnum):
    wait = "wait"
    mask = "mask"
    cancel = "cancel"


class Controller(StrEnum):
    fixed = "fixed"
    ess = "ess"


class Durability(StrEnum):
    fsync = "fsync"
    os = "os"
    none = "none"


class Retention(StrEnum):
    all = "all"
    checkpoints = "checkpoints"


class EngineKind(StrEnum):
    vllm = "vllm"
    simulated = "simulated"


class KvCache(StrEnum):
    keep = "keep"
    recompute = "recompute"


class Transport(StrEnum):
    auto = "auto"
    shared_memory = "shared_memory"
    tcp = "tcp"
    disk = "disk"
    nccl = "nccl"
    cuda_ipc = "cuda_ipc"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(kw_only=True, slots=True)
class RunConfig:
    name: str | None = None
    """Name of the run; its folder is `<outputs>/<name>`. None: task, algorithm and the time of day."""
    outputs: str = "outputs"
    """Folder that holds the runs."""
    overwrite: bool = False
    """Start anew in a folder that already holds a run (the old one is deleted)."""
    resume: str | None = None
    """Folder of a run to continue from its newest checkpoint, or from the beginning where it has none; the run goes on in that folder."""
    steps: int = 320
    """Steps to train: each consumes `groups_per_step` groups and publishes one new version."""
    seed: int = 0
    """Seeds the prompt order, every sampled trajectory and the learner."""

    def problems(self) -> list[str]:
        found = positive(**{"run.steps": self.steps})
        if self.name is not None and (not self.name or "/" in self.name or self.name.startswith(".")):
            found.append(f"run.name must be a plain folder name, got {self.name!r}")
        if self.seed < 0:
            found.append(f"run.seed must be >= 0, got {self.seed}")
        if self.overwrite and self.resume is not None:
            found.append(
                f"run.overwrite must be false when run.resume is set, got true with run.resume={self.resume}"
            )
        return found


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = "tiny"
    """A Hugging Face causal-LM folder, or `tiny`: the small Qwen3 that the project makes for the task, and caches."""
    dtype: Dtype = Dtype.float32
    """What generators compute in and weights travel in. The learner keeps float32 master weights."""


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    name: str = "sorting"
    """A file of `generators/tasks/`, or `module:Class` for a task of your own."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the task's class."""
    size: int | None = None
    """Training prompts in the task, walked through in epochs, each in an order of its own. None: what the task says of
    itself (`num_prompts`), or no end."""

    def problems(self) -> list[str]:
        return positive(**{"task.size": self.size})


@dataclass(kw_only=True, slots=True)
class StalenessConfig:
    max_versions: int = 2
    """S: no token is trained that was sampled more than S versions before the one that trains it."""
    on_late: OnLate = OnLate.wait
    """What happens when a rollout takes longer than S steps allow: `wait`, `mask` or `cancel`."""
    straggler_timeout_s: float | None = None
    """`cancel` only: a group that has held a step this long is aborted and refilled."""
    controller: Controller = Controller.fixed
    """What admits new groups: the bound S alone, or (`ess`) a lag of at most S that follows the effective sample size."""
    ess_target: float = 0.9
    """`ess` only: where the effective sample size of the tokens' π_θ / μ falls below this, groups are admitted less early."""

    def problems(self) -> list[str]:
        found = positive(**{"staleness.straggler_timeout_s": self.straggler_timeout_s})
        if not 0 < self.ess_target < 1:
            found.append(
                f"staleness.ess_target must be in (0, 1) (0.9 is the default), got {self.ess_target}"
            )
        if self.max_versions < 0:
            found.append(f"staleness.max_versions must be >= 0, got {self.max_versions}")
        if (self.on_late is OnLate.cancel) != (self.straggler_timeout_s is not None):
            found.append(
                "staleness.straggler_timeout_s must be set exactly when staleness.on_late=cancel, "
                f"got {self.straggler_timeout_s} with on_late={self.on_late}"
            )
        return found


@dataclass(kw_only=True, slots=True)
class BufferConfig:
    address: str = "tcp://127.0.0.1:0"
    """Where the buffer listens (port 0: any free one) or, for `role=generators`, where it answers."""
    durability: Durability = Durability.os
    """When a group is acknowledged: on disk (`fsync`), in the kernel (`os`), or in memory (`none`)."""
    lease_s: float = 30.0
    """A lease that is not renewed for this long expires and is given out again."""
    max_attempts: int = 3
    """A group that fails this often is quarantined with its error, and the run goes on."""
    max_quarantined: int = 100
    """Groups quarantined in a row, with none accepted between, at which the run ends: then it is not the prompts."""
    segment_mb: int = 64
    """A journal segment is closed at this size."""
    retention: Retention = Retention.all
    """`all` keeps every segment, for queries and replay; `checkpoints` deletes those that no kept checkpoint needs."""
    max_uses: int = 1
    """How often a group may be trained; must divide `learner.groups_per_step`. Above 1, fewer fresh groups are made."""
    sampler: str = "fifo"
    """Which complete groups a step trains: `fifo`, `freshest`, `prioritized`, `reward_balanced`, or `module:Class`."""
    sampler_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the sampler's class."""
    max_groups: int | None = None
    """Groups held (leased, or complete and not used up) at which leasing pauses. What the step at hand needs is leased all
    the same. None: only the staleness bound limits them, to (S + 1) steps."""
    max_tokens: int | None = None
    """The same in sampled tokens."""
    max_bytes: int | None = None
    """The same in bytes of complete groups."""
    metrics_port: int | None = None
    """Port on the loopback interface where Prometheus finds the buffer's metrics; None: nowhere."""
    keys: str | None = None
    """Folder of CURVE keys (`scripts/keys.sh` makes one): all sockets of the buffer are then encrypted, and open to those
    keys only. Needed when `buffer.address` is not on the loopback interface."""
    stalled_s: float = 600.0
    """A role whose heartbeats say that it has stood still for this long counts as stalled. Others get the leases of such a generator;
    the watchdog does not wait for such a learner. Must be longer than an engine takes to load a version, a learner to load its
    model, and one microbatch to be trained."""
    watchdog_s: float = 120.0
    """When nothing moves and no role is at work (in a step, a load, a publication, a checkpoint) for this long, the buffer says who
    waits for whom; after twice as long the run ends."""

    def problems(self) -> list[str]:
        found = positive(
            **{
                "buffer.lease_s": self.lease_s,
                "buffer.max_attempts": self.max_attempts,
                "buffer.max_quarantined": self.max_quarantined,
                "buffer.segment_mb": self.segment_mb,
                "buffer.stalled_s": self.stalled_s,
                "buffer.watchdog_s": self.watchdog_s,
                "buffer.max_uses": self.max_uses,
                "buffer.max_groups": self.max_groups,
                "buffer.max_tokens": self.max_tokens,
                "buffer.max_bytes": self.max_bytes,
                "buffer.metrics_port": self.metrics_port,
            }
        )
        if self.address.startswith("ipc://") and len(self.address) > len("ipc://"):
            return found
        return found + address_problems(
            "buffer.address", self.address, self.keys, "tcp://HOST:PORT or ipc://PATH"
        )


def address_problems(field: str, address: str, keys: str | None, form: str = "tcp://HOST:PORT") -> list[str]:
    scheme, _, host = address.partition("://")
    host, _, port = host.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        return [f"{field} must read {form}, got {address!r}"]
    if not is_loopback(host) and keys is None:
        return [
            f"buffer.keys must name a folder of keys when {field} is beyond the loopback interface (make one with "
            f"`scripts/keys.sh FOLDER`), got none with {address!r}"
        ]
    return []


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0] if address.startswith("tcp://") else "127.0.0.1"


def names_no_host(address: str) -> bool:
    return address.startswith(("tcp://0.0.0.0:", "tcp://*:"))


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    temperature: float = 1.0
    """Behaviour log-probabilities are those after temperature."""
    max_tokens: int = 16
    """Longest response, in tokens."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    accept_truncation_bias: bool = False
    """Truncated sampling (top_p < 1, top_k > 0, min_p > 0) changes the support of the behaviour policy, which no
    importance weight repairs. It is refused unless this is true."""

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def problems(self) -> list[str]:
        found = positive(
            **{
                "sampling.temperature": self.temperature,
                "sampling.max_tokens": self.max_tokens,
                "sampling.top_p": self.top_p,
            }
        )
        if self.is_truncated and not self.accept_truncation_bias:
            found.append(
                "sampling.top_p, top_k and min_p must be 1, -1 and 0 unless sampling.accept_truncation_bias=true, "
                f"got {self.top_p}, {self.top_k} and {self.min_p}"
            )
        return found


@dataclass(kw_only=True, slots=True)
class SimulatedConfig:
    """The simulated engine and learner: they keep time like real ones and use no CPU. For benchmarks of overlap."""

    tokens_per_s: float = 100.0
    """Decoding rate of one sequence."""
    slots: int = 16
    """Sequences that one engine decodes at a time."""
    mean_tokens: float = 100.0
    """Mean response length; lengths are lognormal, truncated at 8 × the mean."""
    cv: float = 0.5
    """Coefficient of variation of the response length."""
    train_tokens_per_s: float = 3200.0
    """Sampled tokens that the simulated learner trains a second."""

    def problems(self) -> list[str]:
        found = positive(
            **{
                "generators.simulated.tokens_per_s": self.tokens_per_s,
                "generators.simulated.slots": self.slots,
                "generators.simulated.mean_tokens": self.mean_tokens,
                "generators.simulated.train_tokens_per_s": self.train_tokens_per_s,
            }
        )
        if not (math.isfinite(self.cv) and self.cv >= 0):
            found.append(f"generators.simulated.cv must be >= 0, got {self.cv}")
        return found


@dataclass(kw_only=True, slots=True)
class GeneratorsConfig:
    count: int = 2
    """Generators that this command starts. Others may join a run at any time (`role=generators`)."""
    engine: EngineKind = EngineKind.vllm
    max_sequences: int = 256
    """Sequences in flight in one engine."""
    max_model_len: int = 64
    """Longest prompt + response that an engine takes, in tokens."""
    kv_cache_mb: int | None = None
    """KV cache of one engine. None: 64 on a CPU; on a GPU what its part of the memory leaves."""
    prefix_cache: bool = False
    """Reuse the KV of shared prompts; salted with the version, so that no request reads another version's KV."""
    max_restarts: int = 5
    """How often one generator may crash and be started again before the run stops."""
    gpus: float | None = None
    """GPUs of one engine; None divides what the driver's host has between generators and learner (docs/learner.md); 0: the CPU."""
    gpu_memory_fraction: float | None = None
    """Share of its GPU's memory that an engine may take. None: 0.9, or an even part of it where others share the GPU."""
    score_threads: int = 1
    """Threads of one generator that score, beside the engine. Above 1, the task's `score_response` must bear to run several times at once."""
    score_timeout_s: float = 30.0
    """How long one call of the task's `score_response` may take; then its group fails and another thread takes the place of the one that hangs."""
    simulated: SimulatedConfig = field(default_factory=SimulatedConfig)

    def problems(self) -> list[str]:
        return (
            positive(
                **{
                    "generators.max_sequences": self.max_sequences,
                    "generators.max_model_len": self.max_model_len,
                    "generators.kv_cache_mb": self.kv_cache_mb,
                    "generators.gpu_memory_fraction": self.gpu_memory_fraction,
                    "generators.score_threads": self.score_threads,
                    "generators.score_timeout_s": self.score_timeout_s,
                }
            )
            + within_one(**{"generators.gpu_memory_fraction": self.gpu_memory_fraction})
            + gpu_share("generators.gpus", self.gpus, most=1024)
            + ([] if self.count >= 0 else [f"generators.count must be >= 0, got {self.count}"])
            + self.simulated.problems()
        )


@dataclass(kw_only=True, slots=True)
class SyncConfig:
    transport: Transport = Transport.auto
    """How weights come to the generators. `auto`: through the learner's memory on its host (and its GPU, where an engine shares
    it), over `tcp` elsewhere. `disk`: through `sync.folder`, for hosts that share a file system; in the
    end it is a model folder. `nccl`: from GPU to GPU."""
    address: str | None = None
    """Where the learner serves weights to other hosts, which connect to it, so it names the host (port 0: any free one). None: the
    host of `buffer.address`, any free port."""
    relays: bool = True
    """Hosts hand on the weights that they have fetched, so that the learner's own link carries a few copies only."""
    folder: str | None = None
    """`disk` only: the shared folder. None: `<outputs>/<name>/weights`."""
    bucket_mb: int = 64
    """Weights that the learner gathers from its ranks at a time: what publishing needs of memory beside the snapshot."""
    in_flight: bool = True
    """Load new weights between two engine steps, requests kept. If false, an engine runs dry first."""
    kv_cache: KvCache = KvCache.keep
    """What becomes of the KV of running requests at an update: kept, or computed again under the new weights."""

    def problems(self) -> list[str]:
        found = positive(**{"sync.bucket_mb": self.bucket_mb})
        if self.folder is not None and self.transport is not Transport.disk:
            found.append(
                f"sync.folder must be set only when sync.transport=disk, got {self.folder!r} with {self.transport}"
            )
        if self.address is not None and names_no_host(self.address):
            found.append(f"sync.address must name a host (it is told to others), got {self.address!r}")
        return found


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    every: int = 0
    """Steps between evaluations on held-out prompts; 0: only before the first step and after the last."""
    prompts: int = 512
    """Held-out prompts of one evaluation, one sample each at the run's temperature; 0 switches evaluation off."""

    def problems(self) -> list[str]:
        return [
            f"eval.{name} must be >= 0, got {value}"
            for name, value in (("every", self.every), ("prompts", self.prompts))
            if value < 0
        ]


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    address: str | None = None
    """Ray cluster to join (`auto` or host:port); None starts one inside this run and stops it with the run."""


@dataclass(kw_only=True, slots=True)
class Config:
    mode: Mode = Mode["async"]
    role: Role = Role.all
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    generators: GeneratorsConfig = field(default_factory=GeneratorsConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def num_learner_ranks(self) -> int:
        """Processes of the learner: those of the policy, and a critic's own."""
        own = self.placement.critic is CriticPlace.own and self.algo.advantage.needs_critic
        return self.learner.ranks + (self.placement.critic_ranks if own else 0)

    @property
    def weights_address(self) -> str | None:
        """Where the learner serves weights; None where all generators are on its host, or read a shared file system."""
        match self.sync.transport:
            case Transport.tcp | Transport.nccl:
                beyond = True
            case Transport.auto:
                beyond = self.sync.address is not None or not is_loopback(_host(self.buffer.address))
            case _:
                beyond = False
        if not beyond:
            return None
        return self.sync.address or f"tcp://{_host(self.buffer.address)}:0"

    @property
    def longest_row(self) -> int:
        """The most tokens that a trajectory can hold: a prompt that the engine takes, and the longest response."""
        return self.generators.max_model_len + self.sampling.max_tokens

    @property
    def bound(self) -> int:
        """S: the staleness bound in force."""
        return 0 if self.mode is Mode.on_policy else self.staleness.max_versions

    def warnings(self) -> list[str]:
        """What is allowed and may surprise, one sentence each."""
        algo, learner, found = self.algo, self.learner, []
        is_real = learner.engine is not LearnerKind.simulated and not Path(self.model.path).name.startswith(
            "tiny"
        )
        if is_real and learner.lora.rank is None and learner.lr > LARGE_RATE:
            found.append(
                f"learner.lr={learner.lr:g} is a rate for the tiny model, far above what whole pretrained models bear (1e-6 to 1e-5 is usual)"
            )
        if (
            algo.surrogate in ("ppo", "gspo")
            and algo.proximal is Proximal.recompute
            and learner.minibatches == 1
        ):
            found.append(
                f"learner.minibatches=1: the clip of algo.surrogate={algo.surrogate} never acts, for it begins where the policy is "
                "(4 in presets; algo=dppo acts in the first update)"
            )
        return found + self._staleness_warnings()

    def _staleness_warnings(self) -> list[str]:
        algo = self.algo
        if self.bound <= algo.tolerates:
            return []
        if not algo.is_corrected:
            return [
                f"algo.accept_uncorrected=true: tokens up to {self.bound} versions old are trained with no correction"
            ]
        if self.staleness.controller is Controller.ess:
            return []
        return [
            f"staleness.max_versions={self.bound} is beyond {algo.tolerates}, up to which this kind of loss has been shown to hold "
            "(algo=m2po is made for more; watch offpolicy/ess_token, or let staleness.controller=ess do so)"
        ]

    def problems(self) -> list[str]:
        """Every rule that is broken, one sentence each: first those of the parts, then those across parts."""
        parts = (
            self.run,
            self.task,
            self.sampling,
            self.staleness,
            self.algo,
            self.buffer,
            self.generators,
            self.learner,
            self.placement,
        )
        found = [problem for part in (*parts, self.sync, self.eval) for problem in part.problems()]
        return found or self._across()  # rules across parts speak of parts that are right by themselves

    def _across(self) -> list[str]:
        gen, learner, algo = self.generators, self.learner, self.algo
        rules = [
            (
                self.sampling.max_tokens >= gen.max_model_len,
                "sampling.max_tokens must be below generators.max_model_len (the engine holds prompt and response), "
                f"got {self.sampling.max_tokens} and {gen.max_model_len}",
            ),
            (
                learner.moe.router_replay and gen.prefix_cache,
                "generators.prefix_cache must be false with learner.moe.router_replay (what comes from the cache is not routed), got true",
            ),
            (
                gen.max_sequences < learner.samples_per_prompt + (algo.advantage is Advantage.remax),
                f"generators.max_sequences must be at least {learner.samples_per_prompt + (algo.advantage is Advantage.remax)} "
                "(an engine makes whole groups of learner.samples_per_prompt; remax adds a greedy response), got "
                f"{gen.max_sequences} with samples_per_prompt={learner.samples_per_prompt}",
            ),
            (
                self.bound > 0 and not algo.is_corrected and not algo.accept_uncorrected,
                "the loss must weigh tokens for having been sampled by an older policy when staleness.max_versions > 0, or it "
                "diverges on them (algo.correction=token_tis with algo.proximal=recompute works, or algo.surrogate=cispo with "
                "algo.proximal=behavior; algo.accept_uncorrected=true is for studies of what it does), got "
                f"algo.surrogate={algo.surrogate}, algo.correction={algo.correction} and algo.proximal={algo.proximal} with "
                f"staleness.max_versions={self.bound}",
            ),
            (
                learner.groups_per_step * learner.samples_per_prompt
                < learner.num_shares * learner.minibatches,
                "learner.groups_per_step × learner.samples_per_prompt must be at least learner.minibatches × the shares of a batch "
                f"({learner.num_shares} with these learner.ranks: each trains a sequence or more), got {learner.groups_per_step} × "
                f"{learner.samples_per_prompt} and {learner.minibatches} × {learner.num_shares}",
            ),
            (
                self.placement.critic is CriticPlace.own and not algo.advantage.needs_critic,
                "placement.critic must be with_actor where the algorithm has no critic (algo=ppo, vapo and vtrace have one), got own "
                f"with algo.advantage={algo.advantage}",
            ),
            (
                learner.lora.rank is not None
                and learner.lora.publish is LoraPublish.adapter
                and self.sync.transport in (Transport.nccl, Transport.cuda_ipc),
                "sync.transport must be auto, shared_memory, tcp or disk when learner.lora.publish=adapter (generators merge on their "
                f"host), got {self.sync.transport}",
            ),
            (
                self.staleness.on_late is OnLate.mask and not self.sync.in_flight,
                "sync.in_flight must be true when staleness.on_late=mask (an overtaken group has no fresh tokens without "
                "in-flight updates), got false",
            ),
            (
                self.buffer.max_uses > 0 and learner.groups_per_step % self.buffer.max_uses != 0,
                "buffer.max_uses must divide learner.groups_per_step, "
                f"got {self.buffer.max_uses} and {learner.groups_per_step}",
            ),
            *(
                (True, problem)
                for problem in address_problems(
                    "sync.address", self.sync.address or "tcp://127.0.0.1:0", self.buffer.keys
                )
            ),
            (
                self.sync.address is None
                and names_no_host(self.buffer.address)
                and self.sync.transport in (Transport.auto, Transport.tcp, Transport.nccl),
                "sync.address must be set when buffer.address names no host (it is told to others), got none with "
                f"{self.buffer.address}",
            ),
            (
                self.bound == 0 and (self.buffer.max_uses > 1 or self.buffer.sampler != "fifo"),
                "buffer.max_uses must be 1 and buffer.sampler fifo when staleness.max_versions = 0 (only the groups of the "
                f"step itself are within the bound), got {self.buffer.max_uses} and {self.buffer.sampler}",
            ),
            (
                learner.samples_per_prompt < 2 and algo.dynamic_sampling,
                "learner.samples_per_prompt must be at least 2 when algo.dynamic_sampling=true (the rewards of a group of one are "
                f"always equal: none would be trained), got {learner.samples_per_prompt}",
            ),
            (
                learner.samples_per_prompt < 2 and algo.advantage.needs_group,
                f"learner.samples_per_prompt must be at least 2 for algo.advantage={algo.advantage} (it compares the "
                f"samples of a prompt; reinforce_pp, remax, gae and vtrace do not), got {learner.samples_per_prompt}",
            ),
            (
                learner.engine is LearnerKind.simulated
                and (algo.advantage.needs_critic or algo.needs_reference),
                "learner.engine must be fsdp or megatron where a critic or a reference policy is needed (algo=grpo without a KL penalty needs "
                f"neither), got {learner.engine} with algo.advantage={algo.advantage}, algo.kl.loss_coef={algo.kl.loss_coef} and "
                f"algo.kl.reward_coef={algo.kl.reward_coef}",
            ),
            (
                learner.engine is LearnerKind.simulated and learner.ranks > 1,
                "learner.ranks must be 1 with learner.engine=simulated (its ranks know nothing of each other, and each would write "
                f"checkpoints), got {learner.ranks}",
            ),
            (
                (gen.engine is EngineKind.simulated) != (learner.engine is LearnerKind.simulated),
                "generators.engine and learner.engine must both be simulated or neither, "
                f"got {gen.engine} and {learner.engine}",
            ),
            (
                self.role is Role.generators and (gen.count < 1 or self.buffer.address.endswith(":0")),
                "role=generators must name the buffer to join and at least one generator, "
                f"got buffer.address={self.buffer.address} and generators.count={gen.count}",
            ),
        ]
        return [problem for broken, problem in rules if broken]
