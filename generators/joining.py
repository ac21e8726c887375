"""A generator joins a run: it asks the buffer for the run's configuration and builds its parts from that."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from buffers import messages as m
from buffers.client import BufferClient
from buffers.connections import watch_small_requests
from buffers.keys import has_server_key, show_key, start_authenticator
from buffers.role_registry import STARTING
from buffers.timeline import Timeline
from configs.checks import find_config_problems
from configs.generators import EngineKind
from configs.load import parse_config
from configs.parity_probe import probe_lengths
from configs.placement import PlacementMode
from configs.schema import Config
from generators.engine import Engine
from generators.engine_turns import EngineTurns
from generators.episode import Episodes, SimulatedEpisodes
from generators.evaluation_episodes import EvaluationEpisodes
from generators.plain_values import describe_error
from generators.run_files import bring_files
from generators.task_versions import compare_versions
from generators.tensor_parallel import check_heads
from generators.worker import Generator, start_heartbeat
from sync.subscriber import Subscriber, open_subscriber
from sync.transports.ends import SocketGuards
from sync.transports.messages import MAX_UNREAD_BYTES
from sync.turns import open_turn_locks

log = logging.getLogger("slipstream.generator")


def join_run(
    address: str,
    name: str,
    seed: int,
    keys: str | None,
    gpu_memory: float | None = None,
    shares_gpu: bool = False,
    *,
    evaluates: bool = False,
    patience_s: float = 60.0,
    turns_of: Path | None = None,
    on_gpus: bool = False,
    tensor_parallel: int = 1,
    timeline: Timeline | None = None,
) -> Generator:
    """Returns a generator of the run whose buffer answers at `address`, ready to run. `evaluates`: it leases
    evaluation prompts alone. Raises BufferGone after `patience_s` without an answer.

    The run's configuration decides model, task and sampling. Three things are matters of this host:
    `gpu_memory`, the share of its GPU that the engine may take, `shares_gpu`, whether other processes are
    on that GPU, and `tensor_parallel`, the GPUs (on a CPU: processors) that are its own. Files of the model
    and rows that the host lacks come from the buffer. `turns_of`: the folder of the run whose learner has the
    generator's GPUs, or processors, by turns (`on_gpus`: it has GPUs).

    Heartbeats begin before that, because it and the engine's start take long. When it fails the buffer hears
    why.
    """
    client = BufferClient(address, timeout_s=patience_s, keys=keys)
    welcome = client.call(m.JoinRun(generator=name, evaluates=evaluates), m.JoinedRun)
    config = parse_config(welcome.config)
    heart = start_heartbeat(client.open_another(), name, evaluates=evaluates, timeline=timeline)
    try:
        take_host_settings(config, gpu_memory, tensor_parallel, takes_turns=turns_of is not None)
        for warning in compare_versions(config.task.versions):
            log.warning("%s", warning)
        bring_files(config, client, heart.set_activity)
        heart.set_activity(STARTING)
        turns = None if turns_of is None else open_engine_turns(config, name, turns_of, on_gpus)
        if turns is not None:
            turns.wait_for_start(heart)
        engine, episodes = make_engine(config, seed, shares_gpu), make_episodes(config)
        subscriber = make_subscriber(config, address, keys)
        return Generator(
            name,
            config,
            client,
            engine,
            episodes,
            subscriber,
            heart,
            run=welcome.run,
            evaluates=evaluates,
            turns=turns,
        )
    except BaseException as error:
        heart.close()
        client.send_request(m.LeaveRun(generator=name, error=describe_error(error)))
        client.close()
        raise


def take_host_settings(
    config: Config, gpu_memory: float | None, tensor_parallel: int, *, takes_turns: bool
) -> None:
    """Puts what this host has set aside for an engine into the run's configuration. Raises ValueError where
    the run's other settings forbid so many GPUs."""
    config.generators.gpu_memory_fraction = gpu_memory
    if not takes_turns:  # its GPUs are its own, whatever the run's other engines have
        config.placement.mode = PlacementMode.apart
    if tensor_parallel == config.generators.tensor_parallel:
        return
    config.generators = replace(config.generators, tensor_parallel=tensor_parallel, gpus=None)
    if problems := find_config_problems(config):
        raise ValueError("\n".join(problems))


def open_engine_turns(config: Config, name: str, run: Path, on_gpus: bool) -> EngineTurns:
    """Opens the turns of an engine that has its GPUs together with the learner of the run in this folder."""
    locks = open_turn_locks(run, name, None, config.num_learner_ranks, on_gpus=on_gpus)
    return EngineTurns(locks, keeps_weights=not config.sync.in_flight)


def make_subscriber(config: Config, buffer_address: str, keys: str | None) -> Subscriber:
    """Opens this host's side of the transport, behind the keys that the host has.

    The host may serve other hosts only where it has the server's key, or where the run has no keys.
    """
    watch = partial(watch_small_requests, encrypted=keys is not None, max_unread=MAX_UNREAD_BYTES)
    guards = SocketGuards(
        secure_server=None if keys is None else lambda socket: start_authenticator(socket, Path(keys)),
        secure_client=None if keys is None else lambda socket: show_key(socket, Path(keys)),
        watch=watch,
        may_serve=keys is None or has_server_key(Path(keys)),
    )
    return open_subscriber(config, buffer_address, guards)


def make_engine(config: Config, seed: int, shares_gpu: bool = False) -> Engine:
    if config.generators.engine is EngineKind.simulated:
        from generators.simulated_engine import SimulatedEngine

        simulated = config.generators.simulated
        return SimulatedEngine(
            tokens_per_s=simulated.tokens_per_s,
            slots=simulated.slots,
            mean_tokens=simulated.mean_tokens,
            cv=simulated.cv,
        )
    if config.generators.engine is EngineKind.transformers:
        from generators.transformers_engine import TransformersEngine

        return TransformersEngine(**_read_engine_settings(config))
    # Imported here, because importing vLLM takes seconds and changes torch.
    from generators.vllm_engine import VllmEngine

    tensor_parallel = config.generators.tensor_parallel
    check_heads(Path(config.model.path), tensor_parallel)
    sleeps = config.placement.mode is PlacementMode.colocated
    return VllmEngine(
        tensor_parallel=tensor_parallel,
        prefix_cache=config.generators.prefix_cache,
        seed=seed,
        shares_gpu=shares_gpu,
        record_experts=config.learner.moe.router_replay,
        # A sleeping engine can receive nothing on its GPU.
        transfer=None if sleeps or tensor_parallel > 1 else config.sync.transport.row.vllm_engine,
        sleeps=sleeps,
        **_read_engine_settings(config),
    )


def _read_engine_settings(config: Config) -> dict[str, Any]:
    """Returns the arguments that every engine with a model takes."""
    generators, sampling = config.generators, config.sampling
    return {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": generators.max_model_len,
        # Beside the rollouts there is room for the parity probe, which so waits for none of them.
        "max_sequences": generators.max_sequences + len(probe_lengths(config)),
        "kv_cache_mb": generators.kv_cache_mb,
        "gpu_memory_fraction": generators.gpu_memory_fraction,
        "kv_cache": config.sync.kv_cache,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
    }


def make_episodes(config: Config) -> Episodes:
    if config.generators.engine is EngineKind.simulated:
        return SimulatedEpisodes()
    from transformers import AutoTokenizer

    from generators.task_episodes import TaskEpisodes

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return EvaluationEpisodes(config, lambda one: TaskEpisodes(one, tokenizer))
