"""Bad input is refused at start-up, with field, rule and value."""

import dataclasses
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from configs.algo import AlgoConfig
from configs.checks import find_config_problems, find_warnings
from configs.help import KeyHelp, format_help, format_page, list_sections
from configs.load import (
    FOLDER,
    check_config,
    list_defaults,
    load_config,
    load_resumed_config,
    load_study_config,
    parse_config,
    to_yaml,
)
from configs.schema import Config

ROOT = Path(__file__).parents[1]
PRESETS = sorted(path.stem for path in FOLDER.glob("algo/*.yaml"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("experiment/*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_composes(path: Path) -> None:
    load_config([f"+experiment={path.stem}"])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_accepted_bears_its_name_and_is_the_defaults_with_what_its_file_says(
    name: str,
) -> None:
    config = load_config([f"algo={name}"])
    assert config.algo.name == name and config.max_versions > 0 and find_warnings(config) == []
    said = OmegaConf.load(FOLDER / "algo" / f"{name}.yaml")
    assert config == OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), said))


def test_a_written_configuration_reads_back_the_same() -> None:
    config = load_config(["mode=on_policy", "task.args={digits: 2}", "run.name=x", "algo=vapo"])
    assert parse_config(to_yaml(config)) == config
    assert "learner.groups_per_step" in list_defaults()


# By composing: what Hydra and the names of keys have a say in.
NOT_COMPOSED = {
    "generators.cuont=3": r"generators.cuont must be a configuration key \(nearest: generators.count.*'generators.cuont=3'",
    "algo.clip_low=0.2": r"algo.clip_low must be a configuration key \(nearest: .*algo.ppo.clip_low.*got 'algo.clip_low=0.2'",
    "algo.temperatures=[1,0]": r"algo.temperatures must be a configuration key .*got 'algo.temperatures=\[1,0\]'",
    "+foo.bar=1": r"foo.bar must be a configuration key, got '\+foo.bar=1'",
    "mode=sync": r"mode: Invalid value 'sync', expected one of \[async, on_policy\]",
    "algo.correction=tis": r"algo.correction: Invalid value 'tis', expected one of \[none, token_tis, icepop",
    "algo.rejection.level=turn": r"algo.rejection.level: Invalid value 'turn', expected one of \[token, sequence_sum",
    "run.steps=1.5": r"run.steps: Value '1.5' of type 'float' could not be converted to Integer",
    "algo=nope": "algo=nope: .*Available options in 'algo'",
    "algo=reinforce_pp learner.samples_per_prompt=1 algo.dynamic_sampling=true": "when algo.dynamic_sampling=true .*got 1",
    "algo=gspo algo.gspo.clip_high=0.2": "algo.gspo.clip_low and clip_high must be at most 0.1, .*got 0.0003 and 0.2",
    "algo=remax generators.max_sequences=8": "generators.max_sequences must be at least 9 .*remax adds a greedy response.*got 8 with",
}

REFUSED = {
    "buffer.max_uses=3": "buffer.max_uses must divide learner.groups_per_step, got 3 and 64",
    "buffer.max_uses=0": "buffer.max_uses must be a finite number above 0, got 0",
    "buffer.max_bytes=-1": "buffer.max_bytes must be a finite number above 0, got -1",
    "mode=on_policy buffer.sampler=freshest": "buffer.sampler fifo when staleness.max_versions = 0 .* got 1 and freshest",
    "task.size=0": "task.size must be a finite number above 0, got 0",
    "run.steps=0": "run.steps must be a finite number above 0, got 0",
    "learner.lr=nan": "learner.lr must be a finite number above 0, got nan",
    "learner.minibatches=5": "learner.minibatches must divide learner.groups_per_step, got 5 and 64",
    "sampling.max_tokens=64": "sampling.max_tokens must be below generators.max_model_len .* got 64 and 64",
    "sampling.top_p=0.9": "unless sampling.accept_truncation_bias=true, got 0.9, -1 and 0.0",
    "sampling.temperature=0": "sampling.temperature must be a finite number above 0, got 0.0",
    "learner.ranks=600": r"learner.groups_per_step × learner.samples_per_prompt must be at least learner.minibatches × the shares of a batch \(600 with .* got 64 × 8 and 4 × 600",
    "algo.surrogate=dppo algo.correction=none algo.advantage=vtrace": "algo.surrogate must not multiply by π/μ itself for algo.advantage=vtrace .*got dppo",
    "algo.surrogate=dppo algo.correction=none algo.proximal=loglinear": "algo.proximal must not be loglinear for algo.surrogate=dppo .*got loglinear",
    "algo.surrogate=cispo algo.correction=none algo.proximal=behavior algo.rejection.estimator=k2": "algo.rejection.estimator must be null for algo.proximal=behavior .*got k2",
    "algo.surrogate=dppo algo.correction=none algo.dppo.low=1.5": "algo.dppo.low must be in \\(0, 1\\] .*got 1.5",
    "learner.parity_every=-1": "learner.parity_every must be a finite number of at least 0, got -1",
    "learner.fsdp.replicas=2": "learner.fsdp.replicas must divide learner.ranks, got 2 and 1",
    "learner.ranks=2 learner.fsdp.sequence_parallel=4": "sequence_parallel must divide learner.ranks, got 4 and 2",
    "learner.fsdp.replicas=0": "learner.fsdp.replicas must be a finite number above 0, got 0",
    "learner.lora.rank=0": "learner.lora.rank must be a finite number above 0, got 0",
    "learner.lora.publish=adapter": "learner.lora.rank must be set where other settings of learner.lora are, got null",
    "learner.lora.rank=8 learner.lora.publish=adapter sync.transport=nccl": "sync.transport must be auto, .* got nccl",
    "learner.engine=megatron learner.lora.rank=8": "learner.lora.rank must be null unless learner.engine=fsdp, got 8 with megatron",
    "learner.engine=megatron learner.fsdp.cpu_offload=true": "learner.fsdp must be left alone unless learner.engine=fsdp",
    "learner.engine=megatron learner.attention=varlen": "learner.attention must be auto unless learner.engine=fsdp, got varlen",
    "learner.megatron.tensor_parallel=2": "learner.megatron must be left alone unless learner.engine=megatron",
    "learner.engine=megatron learner.ranks=2 learner.megatron.tensor_parallel=2 learner.megatron.pipeline_parallel=2": (
        "tensor_parallel × pipeline_parallel must divide learner.ranks, got 2 × 2 and 2"
    ),
    "learner.engine=megatron learner.ranks=2 learner.megatron.tensor_parallel=2 learner.megatron.expert_parallel=2": (
        "learner.megatron.expert_parallel must divide the data-parallel ranks .* got 2 and 1"
    ),
    "learner.gpus=2": r"learner.gpus must be 0, in \[0.05, 1\], got 2.0",
    "generators.gpus=1.5": r"generators.gpus must be 0, in \[0.05, 1\] or a whole number, got 1.5",
    "generators.gpu_memory_fraction=1.1": r"generators.gpu_memory_fraction must be in \(0, 1\], got 1.1",
    "placement.critic=own": "placement.critic must be with_actor where the algorithm has no critic .* algo.advantage=grpo",
    "algo.advantage=gae placement.critic=own placement.critic_ranks=0": "placement.critic_ranks must be a finite number above 0",
    "staleness.max_versions=-1": "staleness.max_versions must be a finite number of at least 0, got -1",
    "staleness.on_late=cancel": "straggler_timeout_s must be set exactly when staleness.on_late=cancel",
    "staleness.on_late=mask sync.in_flight=false": "sync.in_flight must be true when staleness.on_late=mask",
    "staleness.ess_target=1": r"staleness.ess_target must be in \(0, 1\) .*got 1.0",
    "staleness.ess_target=0": r"staleness.ess_target must be in \(0, 1\) .*got 0.0",
    "learner.samples_per_prompt=1": "learner.samples_per_prompt must be at least 2 for algo.advantage=grpo .*reinforce_pp.*got 1",
    "generators.max_sequences=4": "generators.max_sequences must be at least 8 .*got 4 with samples_per_prompt=8",
    "generators.engine=simulated learner.engine=simulated learner.ranks=2": "learner.ranks must be 1 .* got 2",
    "generators.engine=simulated": "must both be simulated or neither, got simulated and fsdp",
    "buffer.address=tcp://0.0.0.0:5555": "buffer.keys must name a folder of keys .*0.0.0.0:5555",
    "buffer.address=nowhere": "buffer.address must be tcp://HOST:PORT or ipc://PATH, got 'nowhere'",
    "role=generators": "role=generators must name the buffer to join",
    "sync.folder=/tmp/w": "sync.folder must be set only when sync.transport=disk",
    "sync.bucket_mb=0": "sync.bucket_mb must be a finite number above 0, got 0",
    "sync.address=tcp://0.0.0.0:5556": "sync.address must name a host",
    "sync.address=tcp://10.0.0.7:5556": "buffer.keys must name a folder of keys when sync.address is .*10.0.0.7:5556",
    "sync.address=10.0.0.7": "sync.address must be tcp://HOST:PORT, got '10.0.0.7'",
    "run.name=a/b": "run.name must be a plain folder name, got 'a/b'",
}  # fmt: skip

UNCORRECTED = (
    "the loss must weigh tokens that an older policy sampled when staleness.max_versions > 0.*algo.correction=token_tis with algo.proximal=recompute works"
    ".*algo.surrogate=cispo with algo.proximal=behavior; algo.accept_uncorrected=true.*got algo.surrogate={}, "
    "algo.correction={} and algo.proximal={} with staleness.max_versions=2"
)
REFUSED_ALGORITHMS = {
    "algo.surrogate=nope": "algo.surrogate must be one of ppo, gspo, .*opmd, got 'nope'",
    "algo.surrogate=kl": "algo.surrogate must be one of ppo, .*got 'kl'",
    # what stale tokens need
    "algo.correction=none": UNCORRECTED.format("ppo", "none", "recompute"),
    "algo.proximal=behavior": UNCORRECTED.format("ppo", "token_tis", "behavior"),
    "algo.proximal=behavior algo.correction=none": UNCORRECTED.format("ppo", "none", "behavior"),
    "algo.proximal=loglinear algo.correction=none": UNCORRECTED.format("ppo", "none", "loglinear"),
    "algo.surrogate=kimi algo.proximal=behavior": UNCORRECTED.format("kimi", "token_tis", "behavior"),
    "algo.surrogate=opmd algo.correction=none": UNCORRECTED.format("opmd", "none", "recompute"),
    "algo.surrogate=cispo algo.correction=none": UNCORRECTED.format("cispo", "none", "recompute"),
    "algo.advantage=remax algo.reward.overlong_share=0.2": "algo.reward.overlong_share must be off .*got 0.2",
    "algo.advantage=vtrace algo.correction=none algo.proximal=behavior": "algo.proximal must be recompute",
    # what corrects already
    "algo.surrogate=topr": r"algo.correction must be none for algo.surrogate=topr \(it multiplies by .*got token_tis",
    "algo.surrogate=dppo": "algo.correction must be none for algo.surrogate=dppo .*got token_tis",
    "algo.surrogate=aipo algo.correction=icepop": "algo.correction must be none for algo.surrogate=aipo .*got icepop",
    "algo.surrogate=m2po": "algo.correction must be none for algo.surrogate=m2po .*got token_tis",
    "algo.advantage=vtrace": r"algo.correction must be none for algo.advantage=vtrace \(its advantages already .*got token_tis",
    # what does not go together
    "algo.advantage=remax algo.reward.normalize=true": "algo.reward.normalize must be off for algo.advantage=remax .*got true",
    "algo.kl.loss_coef=0.1 algo.kl.reward_coef=0.2": "algo.kl.loss_coef and reward_coef must not both be above 0 .*got 0.1 and 0.2",
    "algo.kl.target=0.5": "algo.kl.target must be set only with algo.kl.loss_coef or reward_coef above 0 .*got 0.5",
    "algo.proximal=loglinear algo.normalize_weights=true":
        "algo.normalize_weights must be false when algo.proximal=loglinear .*recompute works.*got true",
    "algo.surrogate=m2po algo.correction=none algo.proximal=loglinear":
        "algo.proximal must be recompute for algo.surrogate=m2po .*got loglinear",
    "algo.surrogate=m2po algo.correction=none algo.proximal=behavior":
        "algo.proximal must be recompute for algo.surrogate=m2po .*got behavior",
    "algo.horizon=5": "algo.horizon must be set only with algo.aggregation=constant_horizon, got 5 with sequence_mean_token_mean",
    "algo.aggregation=constant_horizon algo.horizon=0": "algo.horizon must be a finite number above 0, got 0",
    "algo.correction=icepop algo.correction_floor=7": "algo.correction_floor must be below algo.correction_cap, got 7.0 and 5.0",
    "algo.correction=geometric_mask algo.correction_cap=0.5":
        "algo.correction_floor must be below algo.correction_cap, got 0.99 and 0.5",
    # what would have no effect
    "algo.kl.loss_coef=0.1 algo.kl.estimator=k1": "algo.kl.estimator must be k2 or k3 with algo.kl.loss_coef above 0 .*got k1",
    "algo.surrogate=topr algo.correction=none algo.correction_cap=3":
        "algo.correction_cap must not be set without a correction that has a cap, got 3.0 with algo.advantage=grpo, algo.correction=none and algo.surrogate=topr",
    "algo.correction_floor=0.1": "algo.correction_floor must not be set without a correction that drops .*got 0.1 with .*token_tis",
    "algo.surrogate=aipo algo.correction=none algo.normalize_weights=true":
        "algo.normalize_weights must not be set without weights other than 1, got true with .*algo.correction=none",
    "algo.imitation_above=0.5": "algo.imitation_above must not be set without algo.imitation_coef above 0, got 0.5",
    "learner.samples_per_prompt=1 algo.dynamic_sampling=true": "must be at least 2 when algo.dynamic_sampling=true .*got 1",
    "generators.engine=simulated learner.engine=simulated algo.advantage=gae":
        "learner.engine must be fsdp .*algo=grpo without a KL penalty needs neither.*got simulated with algo.advantage=gae",
    "generators.engine=simulated learner.engine=simulated algo.advantage=prime":
        "learner.engine must be fsdp .*got simulated with algo.advantage=prime",
    "generators.engine=simulated learner.engine=simulated algo.kl.loss_coef=0.1": "learner.engine must be fsdp .*got simulated",
    # sections that play no part
    "algo.gspo.clip_low=1e-3":
        "algo.gspo.clip_low must not be set without algo.surrogate=gspo, got 0.001 with algo.advantage=grpo, .* and algo.surrogate=ppo",
    "algo.surrogate=gspo algo.ppo.dual_clip=null":
        "algo.ppo.dual_clip must not be set without algo.surrogate=ppo, got null with .*algo.surrogate=gspo",
    "algo.opmd.tau=2": "algo.opmd.tau must not be set without algo.surrogate=opmd, got 2.0",
    "algo.critic.lr=1": "algo.critic.lr must not be set without algo.advantage=gae or vtrace, got 1.0 with algo.advantage=grpo",
    "algo.gae.lam=0.5": "algo.gae.lam must not be set without algo.advantage=gae, got 0.5 with algo.advantage=grpo",
    "algo.vtrace.lam=0.5": "algo.vtrace.lam must not be set without algo.advantage=vtrace, got 0.5",
    "algo.prime.gamma=0.9": "algo.prime.gamma must not be set without algo.advantage=prime, got 0.9",
    # ranges
    "algo.surrogate=gspo algo.gspo.clip_low=0.2 algo.gspo.clip_high=0.28":
        "algo.gspo.clip_low and clip_high must be at most 0.1, .*3e-4 and 4e-4.*algo.surrogate=ppo takes.*got 0.2 and 0.28",
    "algo.ppo.clip_low=3e-4 algo.ppo.clip_high=4e-4":
        "algo.ppo.clip_low and clip_high must be at least 0.01, .*0.2 is usual.*algo.surrogate=gspo takes.*got 0.0003 and 0.0004",
    "algo.ppo.clip_low=0": "algo.ppo.clip_low must be a finite number above 0, got 0.0",
    "algo.rejection.threshold=0.1": "algo.rejection.threshold must not be set without algo.rejection.estimator=k1, k2 or k3, got 0.1",
    "algo.ppo.dual_clip=1": "algo.ppo.dual_clip must be a finite number above 1 .*got 1.0",
    "algo.surrogate=cispo algo.cispo.clip_high=inf": "algo.cispo.clip_high must be a finite number above 0, got inf",
    "algo.surrogate=sapo algo.sapo.tau_negative=-1": "algo.sapo.tau_negative must be a finite number above 0, got -1.0",
    "algo.surrogate=kimi algo.kimi.tau=0": "algo.kimi.tau must be a finite number above 0, got 0.0",
    "algo.surrogate=m2po algo.correction=none algo.m2po.threshold=0": "algo.m2po.threshold must be .*above 0, got 0.0",
    "algo.surrogate=aipo algo.correction=none algo.aipo.cap=nan": "algo.aipo.cap must be a finite number above 0, got nan",
    "algo.surrogate=dppo algo.correction=none algo.dppo.low=0": r"algo.dppo.low must be in \(0, 1\] .*got 0.0",
    "algo.correction_cap=0": "algo.correction_cap must be a finite number above 0, got 0.0",
    "algo.correction_floor=-1": "algo.correction_floor must be a finite number above 0, got -1.0",
    "algo.rejection.estimator=k3 algo.rejection.threshold=0": "algo.rejection.threshold must be .*above 0, got 0.0",
    "algo.entropy_coef=-1": "algo.entropy_coef must be a finite number of at least 0, got -1.0",
    "algo.imitation_coef=nan": "algo.imitation_coef must be a finite number of at least 0, got nan",
    "algo.kl.loss_coef=-1": "algo.kl.loss_coef must be a finite number of at least 0, got -1.0",
    "algo.kl.reward_coef=inf": "algo.kl.reward_coef must be a finite number of at least 0, got inf",
    "algo.kl.loss_coef=0.1 algo.kl.target=0": "algo.kl.target must be a finite number above 0, got 0.0",
    "algo.kl.horizon=0": "algo.kl.horizon must be a finite number above 0, got 0",
    "algo.reward.overlong_share=1.5": r"algo.reward.overlong_share must be in \(0, 1\], got 1.5",
    "algo.reward.overlong_share=0": r"algo.reward.overlong_share must be in \(0, 1\], got 0.0",
    "algo.reward.clip=0": "algo.reward.clip must be a finite number above 0, got 0.0",
    "algo.reward.filter_power=-2": "algo.reward.filter_power must be a finite number above 0, got -2.0",
    "algo.advantage=gae algo.critic.lr=0": "algo.critic.lr must be a finite number above 0, got 0.0",
    "algo.advantage=gae algo.critic.clip=0": "algo.critic.clip must be a finite number above 0, got 0.0",
    "algo.advantage=gae algo.critic.pretrain_steps=-1": "algo.critic.pretrain_steps must be .*at least 0, got -1",
    "algo.advantage=gae algo.gae.lam=1.5": r"algo.gae.lam must be in \[0, 1\], got 1.5",
    "algo.advantage=gae algo.gae.critic_lam=-1": r"algo.gae.critic_lam must be in \[0, 1\], got -1.0",
    "algo.advantage=gae algo.gae.gamma=nan": r"algo.gae.gamma must be in \[0, 1\], got nan",
    "algo.advantage=gae algo.gae.length_alpha=0": "algo.gae.length_alpha must be a finite number above 0, got 0.0",
    "algo.advantage=vtrace algo.correction=none algo.vtrace.rho_bar=0": "algo.vtrace.rho_bar must be .*above 0, got 0.0",
    "algo.advantage=vtrace algo.correction=none algo.vtrace.lam=2": r"algo.vtrace.lam must be in \[0, 1\], got 2.0",
    "algo.advantage=prime algo.prime.beta=0": "algo.prime.beta must be a finite number above 0, got 0.0",
    "algo.advantage=prime algo.prime.lr=-1": "algo.prime.lr must be a finite number above 0, got -1.0",
    "algo.advantage=prime algo.prime.gamma=2": r"algo.prime.gamma must be in \[0, 1\], got 2.0",
}  # fmt: skip

ACCEPTED = [
    "algo.surrogate=gspo",
    "algo.surrogate=cispo algo.proximal=behavior algo.correction=none",
    "algo.surrogate=cispo algo.proximal=behavior",
    "algo.surrogate=gspo algo.proximal=behavior algo.correction=none",
    "algo.surrogate=topr algo.proximal=behavior algo.correction=none",
    "algo.correction=none algo.accept_uncorrected=true",
    "algo.proximal=behavior algo.accept_uncorrected=true",
    "algo.proximal=behavior mode=on_policy",
    "algo.proximal=behavior staleness.max_versions=0",
    "algo.proximal=loglinear",
    "algo.advantage=opmd algo.opmd.tau=2",
    "algo.aggregation=constant_horizon algo.horizon=100",
    "algo.aggregation=constant_horizon",
    "algo.kl.loss_coef=0.1 algo.kl.target=0.01",
    "algo.advantage=vtrace algo.correction=none algo.critic.lr=1e-2",
    "algo.advantage=gae algo.critic.clip=null algo.gae.span=turn",
    "algo.advantage=remax algo.reward.clip=1 generators.max_sequences=9",
    "algo.advantage=reinforce_pp learner.samples_per_prompt=1",
    "algo.surrogate=m2po algo.correction=none algo.normalize_weights=true",
    "algo.ppo.dual_clip=null",
    "algo.rejection.estimator=k2 algo.rejection.level=sequence_max",
    "generators.engine=simulated learner.engine=simulated",
    "staleness.controller=ess staleness.ess_target=0.5",
]


@pytest.mark.parametrize("overrides", NOT_COMPOSED)
def test_what_cannot_be_composed_is_refused_with_the_key_and_what_is_near(overrides: str) -> None:
    with pytest.raises(ValueError, match=NOT_COMPOSED[overrides]):
        load_config(overrides.split())


@pytest.fixture(scope="module")
def defaults() -> DictConfig:
    """Composed once, a tenth of a second for every rule would add up; not the default preset, whose surrogate takes no correction."""
    return OmegaConf.structured(load_config(["algo=grpo"]))


def changed(defaults: DictConfig, overrides: str) -> Config:
    return check_config(OmegaConf.merge(defaults, OmegaConf.from_dotlist(overrides.split())))


@pytest.mark.parametrize("overrides", REFUSED | REFUSED_ALGORITHMS)
def test_refused_with_field_rule_and_value(defaults: DictConfig, overrides: str) -> None:
    with pytest.raises(ValueError, match=(REFUSED | REFUSED_ALGORITHMS)[overrides]) as error:
        changed(defaults, overrides)
    named = [override.partition("=")[0].rpartition(".")[2] for override in overrides.split()]
    for line in str(error.value).splitlines():
        assert " must " in line and any(name in line for name in named), line


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_accepted(defaults: DictConfig, overrides: str) -> None:
    assert find_config_problems(changed(defaults, overrides)) == []


def test_a_loss_tolerates_what_it_was_shown_to_and_nothing_without_a_correction(defaults: DictConfig) -> None:
    assert changed(defaults, "algo.ppo.clip_low=0.2").algo.max_shown_staleness == 8
    assert changed(defaults, "algo.surrogate=m2po algo.correction=none").algo.max_shown_staleness == 256
    assert (
        changed(defaults, "algo.correction=none algo.accept_uncorrected=true").algo.max_shown_staleness == 0
    )


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ("staleness.max_versions=8", None),
        ("staleness.max_versions=9", "staleness.max_versions=9 is beyond 8, .*algo=m2po is made for more"),
        ("staleness.max_versions=9 mode=on_policy", None),
        ("staleness.max_versions=9 staleness.controller=ess", None),
        ("staleness.max_versions=9 algo.surrogate=m2po algo.correction=none", None),
        (
            "algo.correction=none algo.accept_uncorrected=true",
            "algo.accept_uncorrected=true: tokens up to 2 versions old",
        ),
    ],
)
def test_staleness_beyond_what_was_shown_is_warned_of(
    defaults: DictConfig, overrides: str, warning: str | None
) -> None:
    found = find_warnings(changed(defaults, overrides))
    assert len(found) == (warning is not None) and all(re.match(warning or "", line) for line in found)


def test_every_parameter_of_a_section_that_plays_no_part_is_refused(defaults: DictConfig) -> None:
    """Under algo=grpo: sections of other surrogates, and of models that it does not use."""
    unused = [
        f"algo.{section.name}.{parameter.name}"
        for section in dataclasses.fields(AlgoConfig)
        if section.name in ("gspo", "cispo", "sapo", "dppo", "aipo", "m2po", "kimi", "opmd", "critic", "gae", "vtrace", "prime")
        for parameter in dataclasses.fields(getattr(AlgoConfig(), section.name))
        if isinstance(parameter.default, float)
    ]  # fmt: skip
    assert len(unused) > 20
    for name in unused:
        with pytest.raises(
            ValueError, match=f"{name} must not be set without algo.*got 0.125 with algo.advantage=grpo"
        ):
            changed(defaults, f"{name}=0.125")


def test_on_policy_is_s_zero_and_needs_no_correction() -> None:
    assert load_config(["mode=on_policy", "algo.correction=none"]).max_versions == 0


def test_a_staleness_bound_that_the_synchronous_baseline_would_not_heed_is_refused(tmp_path: Path) -> None:
    refusal = "staleness.max_versions must be 0 with mode=on_policy .*got 3"
    with pytest.raises(ValueError, match=refusal):
        load_config(["mode=on_policy", "staleness.max_versions=3"])
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(["mode=on_policy"])))
    with pytest.raises(ValueError, match=refusal):
        load_resumed_config(tmp_path, ["staleness.max_versions=3"])
    assert load_resumed_config(tmp_path, []).max_versions == 0
    assert load_config(["mode=on_policy", "staleness.max_versions=0"]).max_versions == 0


def test_all_problems_come_in_one_message() -> None:
    with pytest.raises(ValueError) as error:
        load_config(["learner.lr=nan", "sampling.top_p=0.9", "run.steps=0"])
    assert len(str(error.value).splitlines()) == 3


def test_a_resumed_run_keeps_what_its_journal_depends_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(["run.seed=3"])))
    assert load_resumed_config(tmp_path, ["run.steps=500"]).run.steps == 500
    with pytest.raises(ValueError, match="learner.groups_per_step must stay 64 in a resumed run .* got 32"):
        load_resumed_config(tmp_path, ["learner.groups_per_step=32"])
    with pytest.raises(ValueError, match="must be the folder of a run"):
        load_resumed_config(tmp_path / "absent", [])


def test_a_resumed_run_takes_what_suits_it_and_not_the_default_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from slipstream import train

    (tmp_path / "config.yaml").write_text(
        to_yaml(load_config(["algo=grpo", "generators.max_model_len=2048"]))
    )
    overrides = [f"run.resume={tmp_path}", "algo.ppo.clip_high=0.28", "sampling.max_tokens=512"]
    assert train.main(["--cfg", *overrides]) == 0
    assert "clip_high: 0.28" in capsys.readouterr().out
    with pytest.raises(ValueError, match="run.stpes must be a configuration key .nearest: run.steps"):
        load_resumed_config(tmp_path, ["run.stpes=3"])
    with pytest.raises(
        ValueError, match="^learner.lr: Value 'abc' of type 'str' could not be converted to Float"
    ):
        load_resumed_config(tmp_path, ["learner.lr=abc"])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("run.resume=", "run.resume must be the folder of a run, got "),
        ("run.resume='/no/such run'", "run.resume must be the folder of a run, got /no/such run"),
        ("++run.resume=/no/such", "run.resume must be said as run.resume=FOLDER"),
        ("run={resume:/no/such}", "run.resume must be said as run.resume=FOLDER"),
    ],
)
def test_no_spelling_of_a_folder_begins_a_run_of_the_defaults_in_it(
    said: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from slipstream import train

    assert train.main([said]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "then", "lr", "minibatches"),
    [
        ("algo=grpo", "algo=dppo", 6e-4, 1),
        ("algo=dppo", "algo=grpo", 2e-4, 4),
        ("algo=grpo learner.lr=1e-6 learner.minibatches=8", "algo=dppo", 1e-6, 8),
        ("algo=grpo", "algo=dppo learner.lr=1e-5", 1e-5, 1),
        ("algo=grpo algo.name=mine", "algo=dppo", 6e-4, 4),
    ],
)
def test_a_study_has_the_presets_rate_and_minibatches_unless_the_run_had_its_own(
    tmp_path: Path, before: str, then: str, lr: float, minibatches: int
) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(before.split())))
    studied = load_study_config(tmp_path, then.split())
    assert (studied.algo.surrogate, studied.learner.lr, studied.learner.minibatches) == (
        "dppo" if "dppo" in then else "ppo", lr, minibatches,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["model.path=/models/Qwen3"], r"learner.lr=0.0006 is a rate for the tiny model"),
        (["model.path=/models/Qwen3", "learner.lr=1e-6"], None),
        (["model.path=/models/Qwen3", "learner.lora.rank=8"], None),
        (["model.path=/home/me/.cache/tiny-12ab"], None),
        (["model.path=simulated", "learner.engine=simulated", "generators.engine=simulated"], None),
        (
            ["algo=grpo", "learner.minibatches=1"],
            r"learner.minibatches=1: the clip of algo.surrogate=ppo never acts",
        ),
    ],
)
def test_a_rate_for_the_tiny_model_and_a_clip_that_never_acts_are_told_of(
    overrides: list[str], warning: str | None
) -> None:
    found = find_warnings(load_config(overrides))
    assert len(found) == (warning is not None) and all(re.match(warning or "", line) for line in found)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.stpes=3"], "run.stpes must be a configuration key (nearest: run.steps"),
        (
            ["model.path=/no/such/model"],
            "model.path must be a Hugging Face model folder or `tiny`, got /no/such/model",
        ),
        (
            ["task.name=nope"],
            "task.name must be one of ['arithmetic', 'sorting'], or read module:Class, got 'nope'",
        ),
        (["task.args.numbers=0"], "task.args must suit sorting, got {'numbers': 0}"),
    ],
)
def test_the_command_says_what_is_wrong_and_leaves_nothing_behind(
    tmp_path: Path, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from slipstream import train

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = train.main([f"run.outputs={tmp_path}", *overrides])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err
    assert code == 2 and message in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_the_command_ends_with_status_two_when_it_is_told_what_cannot_be(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "slipstream.train", f"run.outputs={tmp_path}", "run.stpes=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "nearest: run.steps" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def list_keys() -> list[KeyHelp]:
    return [key for section in list_sections() for key in section.keys]


def test_every_key_section_and_choice_says_what_it_is() -> None:
    assert {key.name for key in list_keys()} == set(list_defaults())
    assert not [section.name for section in list_sections() if not section.text.endswith(".")]
    assert not [key.name for key in list_keys() if not key.text.endswith(".")]
    choices = [
        (key.name, name, text)
        for key in list_keys()
        for name, text in key.choices.items()
        if key.name != "mode"
    ]
    assert len(choices) > 50 and not [choice for choice in choices if not choice[2].endswith(".")]


def test_the_page_of_the_configuration_is_current() -> None:
    """After a change of a key: `python -m configs.help --markdown > docs/configuration.md`."""
    assert (ROOT / "docs" / "configuration.md").read_text() == format_page()


def test_a_default_keeps_its_rule_and_the_rule_stands_in_the_help() -> None:
    assert find_config_problems(Config()) == []
    assert "learner.lr=0.0002\n  Peak learning rate" in format_help(["learner.lr"])
    assert "Must be a finite number above 0." in format_help(["learner.lr=3"])
    assert "- mask: The step trains other complete groups." in format_help(["staleness.on_late"])
    assert "Sections below it: learner.fsdp, learner.megatron" in format_help(["learner"])
    assert "algo=NAME chooses a preset: aipo, cispo" in format_help(["algo"])


def test_the_overview_names_every_key_below_its_section() -> None:
    lines = format_help([]).splitlines()
    assert max(map(len, lines)) <= 110
    assert {line.split("=")[0].strip() for line in lines if re.match(r"  [a-z]", line)} == set(
        list_defaults()
    )
    assert lines.index("learner.fsdp: The engine `learner.engine=fsdp`.") > 0


def test_help_for_what_is_no_key_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    from slipstream import train

    assert train.main(["--help", "staleness.max_version"]) == 2
    assert (
        "must be followed by a key or a section (nearest: staleness.max_versions" in capsys.readouterr().err
    )
    assert train.main(["--help", "staleness"]) == 0
    assert "staleness.on_late=wait" in capsys.readouterr().out


def test_no_preset_repeats_a_default() -> None:
    defaults = list_defaults()
    for name in PRESETS:
        preset = OmegaConf.load(FOLDER / "algo" / f"{name}.yaml")
        assert isinstance(preset, DictConfig)
        repeated = [
            key for key, default in defaults.items() if OmegaConf.select(preset, key) == default is not None
        ]
        assert repeated in ([], ["algo.name"]), f"{name} repeats {repeated}"


@pytest.mark.parametrize(
    ("overrides", "address"),
    [
        ([], None),
        (["buffer.address=tcp://10.0.0.7:5555", "buffer.keys=keys"], "tcp://10.0.0.7:0"),
        (["buffer.address=tcp://10.0.0.7:5555", "buffer.keys=keys", "sync.transport=disk"], None),
        (
            ["buffer.address=tcp://10.0.0.7:5555", "buffer.keys=keys", "sync.address=tcp://n7:6000"],
            "tcp://n7:6000",
        ),
        (["sync.transport=tcp"], "tcp://127.0.0.1:0"),
        (["sync.transport=shared_memory"], None),
        (["buffer.address=ipc:///tmp/buffer"], None),
    ],
)
def test_weights_are_served_where_other_hosts_can_join(
    defaults: DictConfig, overrides: list[str], address: str | None
) -> None:
    assert changed(defaults, " ".join(overrides)).weights_address == address


def test_a_buffer_that_listens_everywhere_needs_an_address_for_weights() -> None:
    with pytest.raises(ValueError, match="sync.address must be set when buffer.address names no host"):
        load_config(["buffer.address=tcp://0.0.0.0:5555", "buffer.keys=keys"])


def test_a_configuration_of_another_version_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(load_config([])) + "gone: 3\n")
    for read in (
        lambda: parse_config((tmp_path / "config.yaml").read_text()),
        lambda: load_resumed_config(tmp_path, []),
        lambda: load_study_config(tmp_path, []),
    ):
        with pytest.raises(
            ValueError, match="config.yaml must be of this version of Slipstream, got one with gone: .*not in"
        ):
            read()
