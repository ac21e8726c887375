"""The configuration: all sections under one root.

One file stands for each section, with every key, its default, its rule and its documentation; the yaml files
beside them only compose. `configs/setting.py` says how a key is declared, `configs/checks.py` holds the rules
across sections, and `configs/load.py` makes a checked `Config` from the command line. docs/configuration.md
lists all keys.
"""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from configs.addresses import host_of, is_loopback
from configs.algo import AlgoConfig
from configs.buffer import BufferConfig
from configs.cluster import ClusterConfig
from configs.curriculum import CurriculumConfig
from configs.data import DataConfig
from configs.episodes import EpisodesConfig
from configs.eval import EvalConfig, EvalSetConfig
from configs.generators import GeneratorsConfig
from configs.learner import LearnerConfig
from configs.model import ModelConfig
from configs.placement import CriticPlace, PlacementConfig
from configs.reward import RewardConfig
from configs.run import RunConfig
from configs.sampling import SamplingConfig
from configs.setting import Section, section, setting
from configs.staleness import StalenessConfig
from configs.sync import SyncConfig
from configs.task import TaskConfig
from configs.tracking import TrackingConfig
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
    data: DataConfig = section(DataConfig)
    reward: RewardConfig = section(RewardConfig)
    curriculum: CurriculumConfig = section(CurriculumConfig)
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
    tracking: TrackingConfig = section(TrackingConfig)
    cluster: ClusterConfig = section(ClusterConfig)

    @property
    def task_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the task's class: `task.args`, and for `dataset` its two sections."""
        sections = {"data": asdict(self.data), "reward": asdict(self.reward)}
        return {**(sections if self.task.name == "dataset" else {}), **self.task.args}

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

    def for_evaluation(self, one: EvalSetConfig) -> "Config":
        """Returns the configuration by which prompts of an evaluation set are made, answered and scored."""
        rows = {key: getattr(one, key) for key in ("form", "prompt", "answer", "system_prompt", "prepared")}
        has_reward = one.reward.function is not None or one.reward.parts or not one.has_files
        return replace(
            self,
            task=TaskConfig(name=one.task, args=one.args),
            data=DataConfig(eval=one.data, chat_template_kwargs=one.chat_template_kwargs, **rows),
            reward=one.reward if has_reward else self.reward,
            sampling=replace(self.sampling, max_tokens=one.max_tokens or self.sampling.max_tokens),
            # Each gateway of a generator needs a port of its own.
            episodes=replace(self.episodes, gateway=replace(self.episodes.gateway, port=0)),
        )

    @property
    def engine_names(self) -> list[str]:
        """Names of the engines that a command starts: those that train, then those that evaluate."""
        return [f"generator-{number}" for number in range(self.generators.count)] + [
            f"evaluator-{number}" for number in range(self.eval.generators)
        ]

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
