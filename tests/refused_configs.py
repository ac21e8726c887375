"""Overrides that the configuration refuses, with the patterns of the refusals, and some that it accepts."""


def read_cases(text: str) -> dict[str, str]:
    """Returns the pattern of the refusal by overrides.

    In the text, indented lines with the pattern follow a line with the overrides; `#` begins a comment.
    """
    cases: dict[str, list[str]] = {}
    overrides = ""
    for line in text.splitlines():
        if line.startswith(" "):
            cases[overrides].append(line.strip())
        elif line and not line.startswith("#"):
            overrides = line
            assert overrides not in cases, overrides
            cases[overrides] = []
    return {overrides: " ".join(lines) for overrides, lines in cases.items()}


NOT_COMPOSED = read_cases(r"""
generators.cuont=3
    generators.cuont must be a configuration key \(nearest: generators.count.*'generators.cuont=3'
algo.clip_low=0.2
    algo.clip_low must be a configuration key \(nearest: .*algo.ppo.clip_low.*got 'algo.clip_low=0.2'
algo.temperatures=[1,0]
    algo.temperatures must be a configuration key .*got 'algo.temperatures=\[1,0\]'
+foo.bar=1
    foo.bar must be a configuration key, got '\+foo.bar=1'
mode=sync
    mode must be one of async, on_policy, got 'sync'
algo.correction=tis
    algo.correction must be one of none, token_tis, icepop, .*, got 'tis'
algo.rejection.level=turn
    algo.rejection.level must be one of token, sequence_sum, .*, got 'turn'
run.steps=1.5
    run.steps must be a whole number, got '1.5'
task.name=[a]
    task.name must be a text, got
task.args=abc
    task.args must be a mapping, \{KEY: VALUE\}, got
curriculum.keep=abc
    curriculum.keep must be a list, \[VALUE, ...\], got
data.system_prompt={a:1}
    data.system_prompt must be a text, got
algo=nope
    algo must be one of aipo, .*, got 'nope'
algo=reinforce_pp learner.samples_per_prompt=1 algo.dynamic_sampling=true
    when algo.dynamic_sampling=true .*got 1
algo=gspo algo.gspo.clip_high=0.2
    algo.gspo.clip_low and clip_high must be at most 0.1, .*got 0.0003 and 0.2
algo=remax generators.max_sequences=8
    generators.max_sequences must be at least 9 .*remax adds a greedy response.*got 8 with
""")
"""Refused by Hydra, or by the names of keys."""


REFUSED = read_cases(r"""
buffer.max_uses=3
    buffer.max_uses must divide learner.groups_per_step, got 3 and 64
buffer.max_uses=0
    buffer.max_uses must be a finite number above 0, got 0
buffer.max_bytes=-1
    buffer.max_bytes must be a finite number above 0, got -1
mode=on_policy buffer.sampler=freshest
    buffer.sampler fifo when staleness.max_versions = 0 .* got 1 and freshest
task.size=0
    task.size must be a finite number above 0, got 0
run.steps=0
    run.steps must be a finite number above 0, got 0
learner.lr=nan
    learner.lr must be a finite number above 0, got nan
learner.minibatches=5
    learner.minibatches must divide learner.groups_per_step, got 5 and 64
sampling.max_tokens=64
    sampling.max_tokens must be below generators.max_model_len .* got 64 and 64
sampling.top_p=0.9
    unless sampling.accept_truncation_bias=true, got 0.9, -1 and 0.0
sampling.temperature=0
    sampling.temperature must be a finite number above 0, got 0.0
learner.ranks=600
    learner.groups_per_step × learner.samples_per_prompt must be at least learner.minibatches × the shares
    of a batch \(600 with .* got 64 × 8 and 4 × 600
algo.surrogate=dppo algo.correction=none algo.advantage=vtrace
    algo.surrogate must not multiply by π/μ itself for algo.advantage=vtrace .*got dppo
algo.surrogate=dppo algo.correction=none algo.proximal=loglinear
    algo.proximal must not be loglinear for algo.surrogate=dppo .*got loglinear
algo.surrogate=cispo algo.correction=none algo.proximal=behavior algo.rejection.estimator=k2
    algo.rejection.estimator must be null for algo.proximal=behavior .*got k2
algo.surrogate=dppo algo.correction=none algo.dppo.low=1.5
    algo.dppo.low must be in \(0, 1\] .*got 1.5
learner.parity_every=-1
    learner.parity_every must be a finite number of at least 0, got -1
learner.fsdp.replicas=2
    learner.fsdp.replicas must divide learner.ranks, got 2 and 1
learner.ranks=2 learner.fsdp.sequence_parallel=4
    sequence_parallel must divide learner.ranks, got 4 and 2
learner.fsdp.replicas=0
    learner.fsdp.replicas must be a finite number above 0, got 0
learner.lora.rank=0
    learner.lora.rank must be a finite number above 0, got 0
learner.lora.publish=adapter
    learner.lora.rank must be set where other settings of learner.lora are, got null
learner.lora.rank=8 learner.lora.publish=adapter sync.transport=nccl
    sync.transport must be one of auto, .* got nccl
learner.engine=megatron learner.lora.rank=8
    learner.lora.rank must be null unless learner.engine=fsdp, got 8 with megatron
learner.engine=megatron learner.fsdp.cpu_offload=true
    learner.fsdp must be left alone unless learner.engine=fsdp
learner.engine=megatron learner.attention=varlen
    learner.attention must be auto unless learner.engine=fsdp, got varlen
learner.megatron.tensor_parallel=2
    learner.megatron must be left alone unless learner.engine=megatron
learner.engine=megatron learner.ranks=3 learner.megatron.tensor_parallel=2
    tensor_parallel × pipeline_parallel × context_parallel must divide learner.ranks, got 2 × 1 × 1 and 3
learner.engine=megatron learner.ranks=4 learner.megatron.tensor_parallel=2 learner.megatron.context_parallel=4
    tensor_parallel × pipeline_parallel × context_parallel must divide learner.ranks, got 2 × 1 × 4 and 4
learner.megatron.context_parallel=2
    learner.megatron must be left alone unless learner.engine=megatron
learner.engine=megatron learner.ranks=2 learner.megatron.tensor_parallel=2 learner.megatron.expert_parallel=2
    learner.megatron.expert_parallel must divide the data- and context-parallel ranks .* got 2 and 1
learner.gpus=2
    learner.gpus must be 0, in \[0.05, 1\], got 2.0
generators.grace_s=-1
    generators.grace_s must be a finite number of at least 0, got -1
generators.grace_s=inf
    generators.grace_s must be a finite number of at least 0, got inf
generators.gpus=2
    generators.gpus must be null, 0 or generators.tensor_parallel, .* got 2.0 with 1
generators.tensor_parallel=4 generators.gpus=2
    generators.gpus must be null, 0 or generators.tensor_parallel, .* got 2.0 with 4
generators.tensor_parallel=2 generators.engine=simulated learner.engine=simulated
    generators.tensor_parallel must be 1 unless generators.engine=vllm, got 2 with simulated
generators.tensor_parallel=2 sync.transport=cuda_ipc
    sync.transport must be one of auto, .*, disk when generators.tensor_parallel .* got cuda_ipc
generators.gpus=1.5
    generators.gpus must be 0, in \[0.05, 1\] or a whole number, got 1.5
generators.gpu_memory_fraction=1.1
    generators.gpu_memory_fraction must be in \(0, 1\], got 1.1
generators.engine=transformers generators.tensor_parallel=2
    generators.tensor_parallel must be 1 unless generators.engine=vllm, got 2 with transformers
generators.engine=transformers generators.gpus=2
    generators.gpus must be null, 0 or generators.tensor_parallel, or a part of one GPU .* got 2.0 with 1
placement.mode=colocated sync.transport=nccl
    sync.transport must be one of auto, shared_memory, tcp, disk with placement.mode=colocated .* got nccl
placement.mode=colocated sync.transport=cuda_ipc
    sync.transport must be one of .* got cuda_ipc
placement.mode=colocated cluster.address=auto
    cluster.address must be null .*\(learner and engines are on one host\), got auto
placement.mode=colocated generators.count=0
    generators.count must be at least 1 with placement.mode=colocated, got 0
placement.mode=colocated learner.gpus=0.5
    learner.gpus and generators.gpus must be null, or 0, .* got 0.5 and None
role=generators buffer.address=tcp://127.0.0.1:5555 placement.mode=colocated
    placement.mode must be apart with role=generators .* got colocated
placement.critic=own
    placement.critic must be with_actor where the algorithm has no critic .* algo.advantage=grpo
algo.advantage=gae placement.critic=own placement.critic_ranks=3 learner.ranks=4 learner.fsdp.replicas=2
    placement.critic_ranks must be a multiple of learner.fsdp.replicas .* got 3 and 2
algo.advantage=gae placement.critic=own learner.ranks=2 learner.fsdp.sequence_parallel=2
    placement.critic_ranks must be a multiple of learner.fsdp.sequence_parallel .* got 1 and 2
algo.advantage=gae placement.critic=own placement.critic_ranks=0
    placement.critic_ranks must be a finite number above 0
staleness.max_versions=-1
    staleness.max_versions must be a finite number of at least 0, got -1
staleness.on_late=cancel
    straggler_timeout_s must be set exactly when staleness.on_late=cancel
staleness.on_late=mask sync.in_flight=false
    sync.in_flight must be true when staleness.on_late=mask
staleness.ess_target=1
    staleness.ess_target must be in \(0, 1\) .*got 1.0
staleness.ess_target=0
    staleness.ess_target must be in \(0, 1\) .*got 0.0
learner.samples_per_prompt=1
    learner.samples_per_prompt must be at least 2 for algo.advantage=grpo .*reinforce_pp.*got 1
generators.max_sequences=4
    generators.max_sequences must be at least 8 .*got 4 with samples_per_prompt=8
episodes.max_concurrent=4
    episodes.max_concurrent must be at least 8 .*got 4 with samples_per_prompt=8
episodes.turn_timeout_s=4000
    episodes.turn_timeout_s must be at most episodes.timeout_s .*got 4000 and 1800
episodes.max_turns=0
    episodes.max_turns must be in \(0, 32767\] .*got 0
generators.engine=simulated learner.engine=simulated learner.ranks=2
    learner.ranks must be 1 .* got 2
generators.engine=simulated
    must both be simulated or neither, got simulated and fsdp
buffer.address=tcp://0.0.0.0:5555
    sync.address must be set when buffer.address names no host .*0.0.0.0:5555
role=generators buffer.address=tcp://10.0.0.7:5555
    buffer.keys must name a folder of keys .*10.0.0.7:5555
cluster.address=local
    cluster.address must be auto, or HOST:PORT .*, got 'local'
cluster.address=ray://10.0.0.7:10001
    cluster.address must be auto, or HOST:PORT .*, got 'ray://10.0.0.7:10001'
buffer.address=nowhere
    buffer.address must be tcp://HOST:PORT .* or ipc://PATH, got 'nowhere'
buffer.address=tcp://fd00::1:5555
    buffer.address must be tcp://HOST:PORT .* an IPv4 address\) or ipc://PATH, got 'tcp://fd00::1:5555'
role=generators
    role=generators must name the buffer to join
sync.folder=/tmp/w
    sync.folder must be set only when sync.transport=disk
sync.bucket_mb=0
    sync.bucket_mb must be a finite number above 0, got 0
sync.address=tcp://0.0.0.0:5556
    sync.address must name a host
sync.address=10.0.0.7
    sync.address must be tcp://HOST:PORT .*, got '10.0.0.7'
run.name=a/b
    run.name must be a plain folder name, got 'a/b'
""")
"""Refused on top of `algo=grpo`, but for the algorithm."""


REFUSED_ALGORITHMS = read_cases(r"""
algo.surrogate=nope
    algo.surrogate must be one of ppo, gspo, .*opmd, got 'nope'
algo.surrogate=kl
    algo.surrogate must be one of ppo, .*got 'kl'
# What stale tokens need.
algo.correction=none
    the loss must weigh tokens .*got algo.surrogate=ppo, algo.correction=none and algo.proximal=recompute
    with
algo.proximal=behavior
    the loss must weigh tokens .*got algo.surrogate=ppo, algo.correction=token_tis and
    algo.proximal=behavior with
algo.proximal=behavior algo.correction=none
    the loss must weigh tokens .*got algo.surrogate=ppo, algo.correction=none and algo.proximal=behavior
    with
algo.proximal=loglinear algo.correction=none
    the loss must weigh tokens .*got algo.surrogate=ppo, algo.correction=none and algo.proximal=loglinear
    with
algo.surrogate=kimi algo.proximal=behavior
    the loss must weigh tokens .*got algo.surrogate=kimi, algo.correction=token_tis and
    algo.proximal=behavior with
algo.surrogate=opmd algo.correction=none
    the loss must weigh tokens .*got algo.surrogate=opmd, algo.correction=none and algo.proximal=recompute
    with
algo.surrogate=cispo algo.correction=none
    the loss must weigh tokens .*got algo.surrogate=cispo, algo.correction=none and
    algo.proximal=recompute with
algo.advantage=remax algo.reward.overlong_share=0.2
    algo.reward.overlong_share must be off .*got 0.2
algo.advantage=vtrace algo.correction=none algo.proximal=behavior
    algo.proximal must be recompute
# What corrects already.
algo.surrogate=topr
    algo.correction must be none for algo.surrogate=topr \(it multiplies by .*got token_tis
algo.surrogate=dppo
    algo.correction must be none for algo.surrogate=dppo .*got token_tis
algo.surrogate=aipo algo.correction=icepop
    algo.correction must be none for algo.surrogate=aipo .*got icepop
algo.surrogate=m2po
    algo.correction must be none for algo.surrogate=m2po .*got token_tis
algo.advantage=vtrace
    algo.correction must be none for algo.advantage=vtrace \(its advantages already .*got token_tis
# What does not go together.
algo.advantage=remax algo.reward.normalize=true
    algo.reward.normalize must be off for algo.advantage=remax .*got true
algo.kl.loss_coef=0.1 algo.kl.reward_coef=0.2
    algo.kl.loss_coef and reward_coef must not both be above 0 .*got 0.1 and 0.2
algo.kl.target=0.5
    algo.kl.target must be set only with algo.kl.loss_coef or reward_coef above 0 .*got 0.5
algo.proximal=loglinear algo.normalize_weights=true
    algo.normalize_weights must be false when algo.proximal=loglinear .*recompute works.*got true
algo.surrogate=m2po algo.correction=none algo.proximal=loglinear
    algo.proximal must be recompute for algo.surrogate=m2po .*got loglinear
algo.surrogate=m2po algo.correction=none algo.proximal=behavior
    algo.proximal must be recompute for algo.surrogate=m2po .*got behavior
algo.horizon=5
    algo.horizon must be set only with algo.aggregation=constant_horizon, got 5 with
    sequence_mean_token_mean
algo.aggregation=constant_horizon algo.horizon=0
    algo.horizon must be a finite number above 0, got 0
algo.correction=icepop algo.correction_floor=7
    algo.correction_floor must be below algo.correction_cap, got 7.0 and 5.0
algo.correction=geometric_mask algo.correction_cap=0.5
    algo.correction_floor must be below algo.correction_cap, got 0.99 and 0.5
# What would have no effect.
algo.kl.loss_coef=0.1 algo.kl.estimator=k1
    algo.kl.estimator must be k2 or k3 with algo.kl.loss_coef above 0 .*got k1
algo.surrogate=topr algo.correction=none algo.correction_cap=3
    algo.correction_cap must not be set without a correction that has a cap, got 3.0 with
    algo.advantage=grpo, algo.correction=none and algo.surrogate=topr
algo.correction_floor=0.1
    algo.correction_floor must not be set without a correction that drops .*got 0.1 with .*token_tis
algo.surrogate=aipo algo.correction=none algo.normalize_weights=true
    algo.normalize_weights must not be set without weights other than 1, got true with
    .*algo.correction=none
algo.imitation_above=0.5
    algo.imitation_above must not be set without algo.imitation_coef above 0, got 0.5
learner.samples_per_prompt=1 algo.dynamic_sampling=true
    must be at least 2 when algo.dynamic_sampling=true .*got 1
generators.engine=simulated learner.engine=simulated algo.advantage=gae
    learner.engine must be fsdp .*algo=grpo without a KL penalty needs neither.*got simulated with
    algo.advantage=gae
generators.engine=simulated learner.engine=simulated algo.advantage=prime
    learner.engine must be fsdp .*got simulated with algo.advantage=prime
generators.engine=simulated learner.engine=simulated algo.kl.loss_coef=0.1
    learner.engine must be fsdp .*got simulated
# Sections that play no part.
algo.gspo.clip_low=1e-3
    algo.gspo.clip_low must not be set without algo.surrogate=gspo, got 0.001 with algo.advantage=grpo, .*
    and algo.surrogate=ppo
algo.surrogate=gspo algo.ppo.dual_clip=null
    algo.ppo.dual_clip must not be set without algo.surrogate=ppo, got null with .*algo.surrogate=gspo
algo.opmd.tau=2
    algo.opmd.tau must not be set without algo.surrogate=opmd, got 2.0
curriculum.pools.easy_weight=2
    curriculum.pools.easy_weight must not be set without curriculum.kind=pools, got 2.0 with
    curriculum.kind=none
curriculum.kind=pools curriculum.levels.review=0.5
    curriculum.levels.review must not be set without curriculum.kind=levels, got 0.5 with .*kind=pools
curriculum.kind=pools curriculum.pools.hard_up_to=0.9
    curriculum.pools.hard_up_to must be below curriculum.pools.normal_up_to, got 0.9 and 0.75
curriculum.kind=pools curriculum.pools.unseen_weight=0
    curriculum.pools.unseen_weight must be a finite number above 0, got 0.0
curriculum.kind=levels curriculum.levels.lower_at=0.9
    curriculum.levels.lower_at must be below curriculum.levels.raise_at, got 0.9 and 0.8
curriculum.kind=levels curriculum.levels.review=1
    curriculum.levels.review must be in \[0, 0.9\], got 1.0
curriculum.keep=[0.9,0.1]
    curriculum.keep must be two numbers, the lower one first, got \[0.9, 0.1\]
curriculum.keep=[0.5]
    curriculum.keep must be two numbers, the lower one first, got \[0.5\]
curriculum.kind=pools curriculum.pools.normal_up_to=inf
    curriculum.pools.normal_up_to must be a finite number, got inf
curriculum.kind=levels curriculum.levels.raise_at=nan
    curriculum.levels.raise_at must be a finite number, got nan
curriculum.max_refills=1000000000000000000000000000000
    curriculum.max_refills must be a number of 64 bits, got 1000000000000000000000000000000
eval.prompts=-1
    eval.prompts must be a finite number of at least 0, got -1
curriculum.window=0
    curriculum.window must be a finite number above 0, got 0
algo.critic.lr=1
    algo.critic.lr must not be set without algo.advantage=gae or vtrace, got 1.0 with algo.advantage=grpo
algo.gae.lam=0.5
    algo.gae.lam must not be set without algo.advantage=gae, got 0.5 with algo.advantage=grpo
algo.vtrace.lam=0.5
    algo.vtrace.lam must not be set without algo.advantage=vtrace, got 0.5
algo.prime.gamma=0.9
    algo.prime.gamma must not be set without algo.advantage=prime, got 0.9
# Ranges.
algo.surrogate=gspo algo.gspo.clip_low=0.2 algo.gspo.clip_high=0.28
    algo.gspo.clip_low and clip_high must be at most 0.1, .*3e-4 and 4e-4.*algo.surrogate=ppo takes.*got
    0.2 and 0.28
algo.ppo.clip_low=3e-4 algo.ppo.clip_high=4e-4
    algo.ppo.clip_low and clip_high must be at least 0.01, .*0.2 is usual.*algo.surrogate=gspo takes.*got
    0.0003 and 0.0004
algo.ppo.clip_low=0
    algo.ppo.clip_low must be a finite number above 0, got 0.0
algo.rejection.threshold=0.1
    algo.rejection.threshold must not be set without algo.rejection.estimator=k1, k2 or k3, got 0.1
algo.ppo.dual_clip=1
    algo.ppo.dual_clip must be a finite number above 1 .*got 1.0
algo.surrogate=cispo algo.cispo.clip_high=inf
    algo.cispo.clip_high must be a finite number above 0, got inf
algo.surrogate=sapo algo.sapo.tau_negative=-1
    algo.sapo.tau_negative must be a finite number above 0, got -1.0
algo.surrogate=kimi algo.kimi.tau=0
    algo.kimi.tau must be a finite number above 0, got 0.0
algo.surrogate=m2po algo.correction=none algo.m2po.threshold=0
    algo.m2po.threshold must be .*above 0, got 0.0
algo.surrogate=aipo algo.correction=none algo.aipo.cap=nan
    algo.aipo.cap must be a finite number above 0, got nan
algo.surrogate=dppo algo.correction=none algo.dppo.low=0
    algo.dppo.low must be in \(0, 1\] .*got 0.0
algo.correction_cap=0
    algo.correction_cap must be a finite number above 0, got 0.0
algo.correction_floor=-1
    algo.correction_floor must be a finite number above 0, got -1.0
algo.rejection.estimator=k3 algo.rejection.threshold=0
    algo.rejection.threshold must be .*above 0, got 0.0
algo.entropy_coef=-1
    algo.entropy_coef must be a finite number of at least 0, got -1.0
algo.imitation_coef=nan
    algo.imitation_coef must be a finite number of at least 0, got nan
algo.kl.loss_coef=-1
    algo.kl.loss_coef must be a finite number of at least 0, got -1.0
algo.kl.reward_coef=inf
    algo.kl.reward_coef must be a finite number of at least 0, got inf
algo.kl.loss_coef=0.1 algo.kl.target=0
    algo.kl.target must be a finite number above 0, got 0.0
algo.kl.horizon=0
    algo.kl.horizon must be a finite number above 0, got 0
algo.reward.overlong_share=1.5
    algo.reward.overlong_share must be in \(0, 1\], got 1.5
algo.reward.overlong_share=0
    algo.reward.overlong_share must be in \(0, 1\], got 0.0
algo.reward.clip=0
    algo.reward.clip must be a finite number above 0, got 0.0
algo.reward.filter_power=-2
    algo.reward.filter_power must be a finite number above 0, got -2.0
algo.advantage=gae algo.critic.lr=0
    algo.critic.lr must be a finite number above 0, got 0.0
algo.advantage=gae algo.critic.clip=0
    algo.critic.clip must be a finite number above 0, got 0.0
algo.advantage=gae algo.critic.pretrain_steps=-1
    algo.critic.pretrain_steps must be .*at least 0, got -1
algo.advantage=gae algo.gae.lam=1.5
    algo.gae.lam must be in \[0, 1\], got 1.5
algo.advantage=gae algo.gae.critic_lam=-1
    algo.gae.critic_lam must be in \[0, 1\], got -1.0
algo.advantage=gae algo.gae.gamma=nan
    algo.gae.gamma must be in \[0, 1\], got nan
algo.advantage=gae algo.gae.length_alpha=0
    algo.gae.length_alpha must be a finite number above 0, got 0.0
algo.advantage=vtrace algo.correction=none algo.vtrace.rho_bar=0
    algo.vtrace.rho_bar must be .*above 0, got 0.0
algo.advantage=vtrace algo.correction=none algo.vtrace.lam=2
    algo.vtrace.lam must be in \[0, 1\], got 2.0
algo.advantage=prime algo.prime.beta=0
    algo.prime.beta must be a finite number above 0, got 0.0
algo.advantage=prime algo.prime.lr=-1
    algo.prime.lr must be a finite number above 0, got -1.0
algo.advantage=prime algo.prime.gamma=2
    algo.prime.gamma must be in \[0, 1\], got 2.0
""")
"""Algorithms that are refused on top of `algo=grpo`."""


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
"""Accepted on top of `algo=grpo`."""
