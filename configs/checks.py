"""The rules across sections, and the warnings of a configuration that is allowed and may surprise."""

from pathlib import Path

from configs.addresses import is_beyond_loopback, names_no_host
from configs.corrections import Proximal
from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.parallel import LoraPublish
from configs.placement import CriticPlace, PlacementMode
from configs.schema import Config, Role
from configs.setting import Condition, find_problems
from configs.staleness import Controller, OnLate
from configs.transports import Transport, TransportUse

LARGE_LEARNING_RATE = 1e-4
"""A learning rate above it brings a warning, unless it is for the tiny model or for adapters."""


def find_config_problems(config: Config) -> list[str]:
    """Returns a sentence for each rule that the configuration breaks.

    Rules across sections are asked only when every section keeps its own: they speak of sections that are
    right by themselves.
    """
    groups = (
        _engine_conditions,
        _critic_conditions,
        _transformers_conditions,
        _batch_conditions,
        _staleness_conditions,
        _address_conditions,
        _turn_conditions,
    )
    return find_problems(config) or [
        condition.problem for group in groups for condition in group(config) if not condition.holds
    ]


def _engine_conditions(config: Config) -> list[Condition]:
    """Returns the rules that engines, roles and models suit each other."""
    generators, learner, algo = config.generators, config.learner, config.algo
    is_simulated = learner.engine is LearnerKind.simulated
    return [
        Condition(
            (generators.engine is EngineKind.simulated) == is_simulated,
            "generators.engine and learner.engine",
            "both be simulated or neither",
            f"{generators.engine} and {learner.engine}",
        ),
        Condition(
            not is_simulated or not (algo.needs_critic or algo.needs_reference),
            "learner.engine",
            "be fsdp or megatron where a critic or a reference policy is needed (algo=grpo without a KL "
            "penalty needs neither)",
            f"{learner.engine} with algo.advantage={algo.advantage}, algo.kl.loss_coef={algo.kl.loss_coef} "
            f"and algo.kl.reward_coef={algo.kl.reward_coef}",
        ),
        Condition(
            not is_simulated or learner.ranks == 1,
            "learner.ranks",
            "be 1 with learner.engine=simulated (its ranks know nothing of each other, and each would "
            "write checkpoints)",
            learner.ranks,
        ),
        Condition(
            (config.data.max_prompt_tokens or 0) < generators.max_model_len,
            "data.max_prompt_tokens",
            "be below generators.max_model_len (the engine holds prompt and response)",
            f"{config.data.max_prompt_tokens} and {generators.max_model_len}",
        ),
        Condition(
            config.task.name != "dataset" or config.data.train is not None,
            "data.train",
            "name rows to train on (a file, a folder or sources) where task.name=dataset",
            None,
        ),
        Condition(
            config.placement.critic is CriticPlace.with_actor or algo.needs_critic,
            "placement.critic",
            "be with_actor where the algorithm has no critic (algo=ppo, vapo and vtrace have one)",
            f"own with algo.advantage={algo.advantage}",
        ),
        Condition(
            not (learner.moe.router_replay and generators.prefix_cache),
            "generators.prefix_cache",
            "be false with learner.moe.router_replay (tokens from the cache are not routed)",
            True,
        ),
        Condition(
            learner.lora.rank is None
            or learner.lora.publish is LoraPublish.merged
            or config.sync.transport.row.carries_adapters,
            "sync.transport",
            f"be one of {', '.join(one for one in Transport if one.row.carries_adapters)} when "
            "learner.lora.publish=adapter (generators merge on their host)",
            config.sync.transport,
        ),
        Condition(
            config.eval.generators == 0 or config.sync.transport.row.brings_older,
            "sync.transport",
            f"be one of {', '.join(one for one in Transport if one.row.brings_older)} when "
            "eval.generators is above 0 (an evaluation may need a version that is not the newest any more)",
            config.sync.transport,
        ),
        Condition(
            generators.tensor_parallel == 1 or config.sync.transport.row.feeds_ranks,
            "sync.transport",
            f"be one of {', '.join(one for one in Transport if one.row.feeds_ranks)} when "
            "generators.tensor_parallel is above 1 (each rank attests its part by the verified file on its "
            "host)",
            config.sync.transport,
        ),
        Condition(
            config.role is Role.all
            or (len(config.engine_names) > 0 and not config.buffer.address.endswith(":0")),
            "role=generators",
            "name the buffer to join and at least one generator",
            f"buffer.address={config.buffer.address}, generators.count={generators.count} and "
            f"eval.generators={config.eval.generators}",
        ),
    ]


def _critic_conditions(config: Config) -> list[Condition]:
    """Returns the rules for the ranks of a critic of its own, which are laid out as the policy's are."""
    if config.placement.critic is not CriticPlace.own:
        return []
    ranks, fsdp, megatron = config.placement.critic_ranks, config.learner.fsdp, config.learner.megatron
    sizes = {
        "learner.fsdp.replicas": fsdp.replicas,
        "learner.fsdp.sequence_parallel": fsdp.sequence_parallel,
        "learner.megatron.tensor_parallel × pipeline_parallel × context_parallel": megatron.ranks_per_share,
        "learner.megatron.tensor_parallel × pipeline_parallel × expert_parallel": (
            megatron.num_pieces * megatron.expert_parallel
        ),
    }
    return [
        Condition(
            ranks % size == 0,
            "placement.critic_ranks",
            f"be a multiple of {name} (a critic's ranks are laid out as the policy's)",
            f"{ranks} and {size}",
        )
        for name, size in sizes.items()
    ]


def _transformers_conditions(config: Config) -> list[Condition]:
    """Returns the rules for what transformers' engine lacks and vLLM has."""
    generators, transport = config.generators, config.sync.transport
    if generators.engine is not EngineKind.transformers:
        return []
    without_vllm = [one for one in Transport if one is Transport.auto or one.row.vllm_engine is None]
    return [
        Condition(
            not generators.prefix_cache,
            "generators.prefix_cache",
            "be false with generators.engine=transformers (it finds KV by tokens alone, and could take that "
            "of another version)",
            True,
        ),
        Condition(
            not config.learner.moe.router_replay,
            "learner.moe.router_replay",
            "be false with generators.engine=transformers (it records no experts)",
            True,
        ),
        Condition(
            transport in without_vllm,
            "sync.transport",
            f"be one of {', '.join(without_vllm)} with generators.engine=transformers (the others go through "
            "vLLM's transfer engines)",
            transport,
        ),
        Condition(
            config.placement.mode is PlacementMode.apart,
            "placement.mode",
            "be apart with generators.engine=transformers (its engine gives no GPU away)",
            config.placement.mode,
        ),
    ]


def _batch_conditions(config: Config) -> list[Condition]:
    """Returns the rules that prompts, groups and batches fit the engines, the ranks and the algorithm."""
    generators, learner, algo = config.generators, config.learner, config.algo
    return [
        Condition(
            config.sampling.max_tokens < generators.max_model_len,
            "sampling.max_tokens",
            "be below generators.max_model_len (the engine holds prompt and response)",
            f"{config.sampling.max_tokens} and {generators.max_model_len}",
        ),
        *[
            Condition(
                one.max_tokens is None or one.max_tokens < generators.max_model_len,
                f"eval.sets.{name}.max_tokens",
                "be below generators.max_model_len (the engine holds prompt and response)",
                f"{one.max_tokens} and {generators.max_model_len}",
            )
            for name, one in config.eval.sets.items()
        ],
        Condition(
            generators.max_sequences >= config.samples_per_group,
            "generators.max_sequences",
            f"be at least {config.samples_per_group} (an engine makes whole groups of "
            "learner.samples_per_prompt; remax adds a greedy response)",
            f"{generators.max_sequences} with samples_per_prompt={learner.samples_per_prompt}",
        ),
        Condition(
            config.episodes.max_concurrent is None
            or config.episodes.max_concurrent >= config.samples_per_group,
            "episodes.max_concurrent",
            f"be at least {config.samples_per_group} (a generator plays whole groups of "
            "learner.samples_per_prompt; remax adds a greedy response)",
            f"{config.episodes.max_concurrent} with samples_per_prompt={learner.samples_per_prompt}",
        ),
        Condition(
            learner.groups_per_step * learner.samples_per_prompt >= learner.num_shares * learner.minibatches,
            "learner.groups_per_step × learner.samples_per_prompt",
            f"be at least learner.minibatches × the shares of a batch ({learner.num_shares} with these "
            "learner.ranks: each trains a sequence or more)",
            f"{learner.groups_per_step} × {learner.samples_per_prompt} and {learner.minibatches} × "
            f"{learner.num_shares}",
        ),
        Condition(
            learner.samples_per_prompt > 1 or not algo.dynamic_sampling,
            "learner.samples_per_prompt",
            "be at least 2 when algo.dynamic_sampling=true (the rewards of a group of one are always "
            "equal: none would be trained)",
            learner.samples_per_prompt,
        ),
        Condition(
            learner.samples_per_prompt > 1 or not algo.advantage.needs_groups,
            "learner.samples_per_prompt",
            f"be at least 2 for algo.advantage={algo.advantage} (it compares the samples of a prompt; "
            "reinforce_pp, remax, gae and vtrace do not)",
            learner.samples_per_prompt,
        ),
        Condition(
            learner.groups_per_step % config.buffer.max_uses == 0,
            "buffer.max_uses",
            "divide learner.groups_per_step",
            f"{config.buffer.max_uses} and {learner.groups_per_step}",
        ),
    ]


def _staleness_conditions(config: Config) -> list[Condition]:
    """Returns the rules that loss, buffer and weight updates suit the staleness bound."""
    algo, buffer = config.algo, config.buffer
    return [
        Condition(
            config.max_versions == 0 or algo.is_corrected or algo.accept_uncorrected,
            "the loss",
            "weigh tokens that an older policy sampled when staleness.max_versions > 0, or it diverges on "
            "them (algo.correction=token_tis with algo.proximal=recompute works, or algo.surrogate=cispo "
            "with algo.proximal=behavior; algo.accept_uncorrected=true is for studies of what it does)",
            f"algo.surrogate={algo.surrogate}, algo.correction={algo.correction} and "
            f"algo.proximal={algo.proximal} with staleness.max_versions={config.max_versions}",
        ),
        Condition(
            config.max_versions > 0 or (buffer.max_uses == 1 and buffer.sampler == "fifo"),
            "buffer.max_uses",
            "be 1 and buffer.sampler fifo when staleness.max_versions = 0 (only the groups of the step "
            "itself are within the bound)",
            f"{buffer.max_uses} and {buffer.sampler}",
        ),
        Condition(
            config.staleness.on_late is not OnLate.mask or config.sync.in_flight,
            "sync.in_flight",
            "be true when staleness.on_late=mask (an overtaken group has no fresh tokens without in-flight "
            "updates)",
            False,
        ),
    ]


def _address_conditions(config: Config) -> list[Condition]:
    """Returns the rules that other hosts can connect to the learner, and that keys guard what they can
    reach."""
    address, buffer, gateway = config.sync.address, config.buffer, config.episodes.gateway
    serves_others = config.sync.transport.row.serves_hosts is not TransportUse.never
    return [
        Condition(
            # A run makes the keys that it lacks in its own folder.
            config.role is Role.all or not is_beyond_loopback(buffer.address) or buffer.keys is not None,
            "buffer.keys",
            "name a folder of keys when buffer.address is beyond the loopback interface (the run's own "
            "folder has them in `keys`)",
            f"none with {buffer.address!r}",
        ),
        Condition(
            address is not None or not names_no_host(buffer.address) or not serves_others,
            "sync.address",
            "be set when buffer.address names no host (other hosts connect to it)",
            f"none with {buffer.address}",
        ),
        Condition(
            not gateway.is_beyond_loopback or buffer.keys is not None,
            "buffer.keys",
            "name a folder of keys when episodes.gateway.host is beyond the loopback interface (make one "
            "with `scripts/keys.sh FOLDER`)",
            f"none with {gateway.host!r}",
        ),
        Condition(
            gateway.port == 0 or len(config.engine_names) <= 1,
            "episodes.gateway.port",
            "be 0 with several generators (each needs a port of its own)",
            f"{gateway.port} with {', '.join(config.engine_names)}",
        ),
    ]


def _turn_conditions(config: Config) -> list[Condition]:
    """Returns the rules of `placement.mode=colocated`."""
    if config.placement.mode is not PlacementMode.colocated:
        return []
    transport, learner, generators = config.sync.transport, config.learner, config.generators
    through_host = [one for one in Transport if one not in (Transport.nccl, Transport.cuda_ipc)]
    return [
        Condition(
            config.role is Role.all,
            "placement.mode",
            "be apart with role=generators (generators that join a run have GPUs of their own, and work at "
            "any time)",
            config.placement.mode,
        ),
        Condition(
            config.cluster.address is None,
            "cluster.address",
            "be null with placement.mode=colocated (learner and engines are on one host)",
            config.cluster.address,
        ),
        Condition(
            transport in through_host,
            "sync.transport",
            f"be one of {', '.join(through_host)} with placement.mode=colocated (weights go through the "
            "host's memory, because engines sleep while they are published)",
            transport,
        ),
        Condition(
            generators.count > 0,
            "generators.count",
            "be at least 1 with placement.mode=colocated",
            generators.count,
        ),
        Condition(
            learner.gpus in (None, 0) and generators.gpus in (None, 0),
            "learner.gpus and generators.gpus",
            "be null, or 0, with placement.mode=colocated (each has whole GPUs in its turn)",
            f"{learner.gpus} and {generators.gpus}",
        ),
    ]


def find_warnings(config: Config) -> list[str]:
    """Returns a sentence for each setting that is allowed and may surprise."""
    algo, learner = config.algo, config.learner
    is_simulated = learner.engine is LearnerKind.simulated
    is_real = not is_simulated and not Path(config.model.path).name.startswith("tiny")
    warnings = []
    if is_real and learner.lora.rank is None and learner.lr > LARGE_LEARNING_RATE:
        warnings.append(
            f"learner.lr={learner.lr:g} is a rate for the tiny model, far above what whole pretrained models "
            "bear (1e-6 to 1e-5 is usual)"
        )
    never_clips = algo.surrogate_section.clips_around_proximal and algo.proximal is Proximal.recompute
    if never_clips and learner.minibatches == 1:
        warnings.append(
            f"learner.minibatches=1: the clip of algo.surrogate={algo.surrogate} never acts, because it "
            "begins where the policy is (4 in presets; algo=dppo acts in the first update)"
        )
    if not config.sync.in_flight and not config.eval.generators and (config.eval.prompts or config.eval.sets):
        warnings.append(
            "sync.in_flight=false: an engine takes up no version before it has ended all evaluation replies; "
            "a step may wait for the longest (eval.generators=1 evaluates on a generator of its own)"
        )
    return warnings + _staleness_warnings(config)


def _staleness_warnings(config: Config) -> list[str]:
    algo, max_versions = config.algo, config.max_versions
    if max_versions <= algo.max_shown_staleness:
        return []
    if not algo.is_corrected:
        return [
            f"algo.accept_uncorrected=true: tokens up to {max_versions} versions old are trained with no "
            "correction"
        ]
    if config.staleness.controller is Controller.ess:
        return []
    return [
        f"staleness.max_versions={max_versions} is beyond {algo.max_shown_staleness}, up to which this kind "
        "of loss is known to learn (algo=m2po is made for more; watch offpolicy/ess_token, or let "
        "staleness.controller=ess do so)"
    ]
