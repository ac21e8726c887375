"""The configuration: all sections under one root.

One file stands for each section, with every key, its default, its rule and its documentation; the yaml files
beside them only compose. `configs/setting.py` says how a key is declared, `configs/checks.py` holds the rules
across sections, and `configs/load.py` makes a checked `Config` from the command line. docs/configuration.md
lists all keys.
"""

from dataclasses import dataclass
from enum import StrEnum

from configs.addresses import host_of, is_loopback
from configs.algo import AlgoConfig
from configs.buffer import BufferConfig
from configs.cluster import ClusterConfig
from configs.episodes import EpisodesConfig
from configs.eval import EvalConfig
from configs.generators import GeneratorsConfig
from configs.learner import LearnerConfig
from configs.model import ModelConfig
from configs.placement import CriticPlace, PlacementConfig
from configs.run import RunConfig
from configs.sampling import SamplingConfig
from configs.setting import Section, section, setting
from configs.staleness import StalenessConfig
from configs.sync import SyncConfig
from configs.task import TaskConfig
from configs.transports import TransportUse

Mode = StrEnum("Mode", {"async": "async", "on_policy": "on_policy"})
"""Asynchronous training, or the synchronous baseline."""


class Role(StrEnum):
    """The part of a run that a command starts."""

    all = "all"
    """A whole run: buffer, learner and generators."""
    generators = "generators"
    """Generators only. They join the run whose buffer answers at `buffer.address`."""


@dataclass(kw_only=True, slots=True)
class Config(Section):
    """Everything that a run is told."""

    mode: Mode = setting(Mode["async"])
    """`async`, or `on_policy` for the synchronous baseline: the staleness bound is then 0, and the code is
    the same."""
    role: Role = setting(Role.all)
    """The part of a run that this command starts."""
    run: RunConfig = section(RunConfig)
    model: ModelConfig = section(ModelConfig)
    task: TaskConfig = section(TaskConfig)
    episodes: EpisodesConfig = section(EpisodesConfig)
    sampling: SamplingConfig = section(SamplingConfig)
    staleness: StalenessConfig = section(StalenessConfig)
    algo: AlgoConfig = section(AlgoConfig)
    buffer: BufferConfig = section(BufferConfig)
    generators: GeneratorsConfig = section(GeneratorsConfig)
    learner: LearnerConfig = section(LearnerConfig)
    placement: PlacementConfig = section(PlacementConfig)
    sync: SyncConfig = section(SyncConfig)
    eval: EvalConfig = section(EvalConfig)
    cluster: ClusterConfig = section(ClusterConfig)

    @property
    def max_versions(self) -> int:
        """The staleness bound S that is in force, in versions."""
        return 0 if self.mode is Mode.on_policy else self.staleness.max_versions

    @property
    def num_learner_ranks(self) -> int:
        """Processes of the learner: those of the policy, and a critic's own."""
        has_own = self.placement.critic is CriticPlace.own and self.algo.needs_critic
        return self.learner.ranks + (self.placement.critic_ranks if has_own else 0)

    @property
    def samples_per_group(self) -> int:
        """Responses that an engine makes for one prompt: the samples, and a greedy one where it is the
        baseline."""
        return self.learner.samples_per_prompt + self.algo.needs_greedy_response

    @property
    def max_episodes(self) -> int:
        """Episodes that one generator plays side by side."""
        return self.episodes.max_concurrent or self.generators.max_sequences

    @property
    def weights_address(self) -> str | None:
        """Address where the learner serves model weights to other hosts.

        None where all generators are on its host, or read a shared file system.
        """
        serves = self.sync.transport.row.serves_hosts
        is_reachable = self.sync.address is not None or not is_loopback(host_of(self.buffer.address))
        if serves is TransportUse.never or (serves is TransportUse.where_it_helps and not is_reachable):
            return None
        return self.sync.address or f"tcp://{host_of(self.buffer.address)}:0"

    @property
    def longest_row(self) -> int:
        """The most tokens that a trajectory can hold: a prompt that the engine takes, and the longest
        response."""
        return self.generators.max_model_len + self.sampling.max_tokens
