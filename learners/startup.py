"""Starts one rank of the learner: process group, models (from a checkpoint, if there is one), publisher of
weights."""

import logging
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from buffers import messages as m
from buffers.client import BufferClient
from buffers.connections import watch_small_requests
from buffers.keys import start_authenticator
from buffers.timeline import Timeline
from configs.addresses import is_beyond_loopback
from configs.learner import LearnerKind
from configs.placement import PlacementMode
from configs.schema import Config
from learners import checkpoint
from learners.learner import BatchSource, Learner, read_ledger
from learners.memory import GIB, MemoryMeter, plan_memory
from learners.models import load_models
from learners.publication import Publication, identify_memory
from learners.rank_hosts import check_model_files, check_shared_folder
from learners.rendezvous import JoinedRank, Pool, join_ranks
from learners.step import Trainer
from learners.turns import LearnerTurns, OwnGpu
from sync.publisher import open_host_publisher, open_publisher
from sync.transports.ends import SocketGuards
from sync.transports.messages import MAX_UNREAD_BYTES
from sync.turns import open_turn_locks

log = logging.getLogger("slipstream.learner")


def start_learner(
    config: Config,
    folder: Path,
    source: BatchSource,
    rank: int,
    rendezvous: str,
    resume_step: int | None,
    *,
    publish: bool = True,
    say: Callable[..., None] = lambda activity, moved=True: None,
    timeline: Timeline | None = None,
) -> Learner:
    """Returns one rank of the learner, ready to run. Collective: it joins all ranks at `rendezvous`.

    `resume_step` names the checkpoint that the run goes on from. Raises ValueError for a checkpoint that is
    damaged or that another run wrote.
    """
    turns = OwnGpu()
    if publish and config.placement.mode is PlacementMode.colocated:
        turns = _take_first_turn(config, folder, rank, say)
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    meter = MemoryMeter(cuda=torch.cuda.is_available())
    _log_memory_plan(config, rank)
    if config.num_learner_ranks > 1:
        say(f"loading: meeting the other ranks at {rendezvous}")
    joined = join_ranks(config, rank, rendezvous)
    check_model_files(config, joined.pool, rank)
    check_shared_folder(folder / "checkpoints", joined.world, say)
    say("loading the model")
    models = load_models(config, joined.pool, lambda: say("loading the model"))
    world = joined.world
    kl_coef = None
    if resume_step is not None:
        saved = folder / "checkpoints" / f"step_{resume_step}"
        manifest = checkpoint.verify_checkpoint(
            saved,
            joined.writers,
            lambda num_bytes: say(f"verifying {saved.name}"),
            lambda: say(f"verifying {saved.name}: other ranks read their part"),
        )
        say("loading the checkpoint")
        check_same_run(manifest, config, read_ledger(source) if rank == 0 else None)
        models.load_state(saved)
        kl_coef = manifest.kl_coef if config.algo.kl.target is not None else None
    # Ranks that load another model take longer than a collective of training waits.
    joined.writers.gather_messages(b"", lambda: say("loading: waiting for the other ranks"))
    # One life of the learner has one name, on all ranks.
    incarnation = world.gather_messages(secrets.token_hex(4).encode())[0].decode()
    return Learner(
        config,
        folder,
        source,
        Trainer(config, models, world, kl_coef),
        open_publication(config, folder, incarnation, joined, say, source, timeline) if publish else None,
        world,
        joined.writers,
        meter,
        rank=rank,
        first_step=resume_step or 0,
        incarnation=incarnation,
        probes=publish and config.learner.engine is not LearnerKind.simulated,
        say=say,
        turns=turns,
        timeline=timeline,
    )


def _take_first_turn(config: Config, folder: Path, rank: int, say: Callable[..., None]) -> OwnGpu:
    """Waits until no engine has the rank's GPU. Before that the rank takes no memory of it."""
    on_gpus = torch.cuda.is_available()
    locks = open_turn_locks(folder, f"learner-{rank}", rank, config.num_learner_ranks, on_gpus=on_gpus)
    turns = LearnerTurns(locks, say)
    turns.begin("loading the model")
    return turns


def _log_memory_plan(config: Config, rank: int) -> None:
    """Logs what a rank will need of memory, and warns where its GPU has less."""
    cuda = torch.cuda.is_available()
    plan = plan_memory(config, cuda=cuda)
    if plan is None:
        return
    if rank == 0:
        log.info("%s", plan)
    if cuda:
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        available = (config.learner.gpu_memory_fraction or 1.0) * int(device.total_memory)
        if plan.total_bytes > available:
            log.warning(
                "that is more than its %.1f GiB: see docs/learner.md for what makes it less", available / GIB
            )


# ---- the checkpoint that the run goes on from


def check_same_run(
    manifest: checkpoint.CheckpointManifest, config: Config, now: checkpoint.LedgerTotals | None
) -> None:
    """Raises ValueError when another engine, or another run than the buffer's journal, wrote the checkpoint.

    `now`: the buffer's ledger, which has gone back to the checkpoint's step; None where there is none to
    compare.
    """
    if manifest.engine != config.learner.engine:
        raise ValueError(
            f"learner.engine must be {manifest.engine}, which wrote the checkpoint, "
            f"got {config.learner.engine} (another engine takes up its export: scripts/export.sh, "
            "and model.path of a new run)"
        )
    then = manifest.ledger
    if then is not None and now is not None and (then.trained, then.masked) != (now.trained, now.masked):
        raise ValueError(
            "journal and checkpoint must be of the same run: "
            f"at step {manifest.step} {then.trained} tokens were trained and {then.masked} masked, "
            f"the journal's ledger has {now.trained} and {now.masked}"
        )


# ---- publication


def open_publication(
    config: Config,
    folder: Path,
    incarnation: str,
    joined: JoinedRank,
    say: Callable[[str], None],
    source: BatchSource,
    timeline: Timeline | None = None,
) -> Publication:
    """Opens this rank's part in the publication of the run in this folder, behind the keys that the run has.
    The first rank announces versions over a connection of its own to the buffer of `source`.

    Collective. Raises ValueError on all ranks of several hosts where the transport cannot bring parts.
    """
    world, transport = joined.publishers, config.sync.transport
    memory = "critic" if joined.pool is Pool.critic else identify_memory()
    if transport.row.shares_folder:
        memory = "shared"
    memories = [one.decode() for one in world.gather_messages(memory.encode())]
    hosts = {one for one in memories if one != "critic"}
    if len(hosts) > 1 and (config.weights_address is None or not transport.row.brings_parts):
        raise ValueError(
            "sync.transport must be auto or tcp (with an address that other hosts reach), or disk, where the "
            f"learner's ranks are on several hosts, got {transport} with {len(hosts)} hosts"
        )
    publisher = None
    if memory in hosts and memories.index(memory) == world.rank:
        guards = make_guards(config)
        if world.rank == 0:
            publisher = open_publisher(config, folder, incarnation, guards)
        else:
            publisher = open_host_publisher(config, folder, incarnation, guards)
    # A first rank that digests the base of its adapters takes longer than a collective waits.
    joined.writers.gather_messages(b"", lambda: say("loading: waiting for the other ranks"))
    announced_to = open_announcements(source) if world.rank == 0 else None
    return Publication(world, publisher, memory, announced_to, timeline)


def open_announcements(source: BatchSource) -> BufferClient:
    """Opens the connection of the publication's thread."""
    assert isinstance(source, BufferClient), "a recording hears of no version"
    client = source.open_another()
    # From its first request on, the buffer knows a connection for one of this life of the learner. An
    # announcement that comes when this life is over must not be the first.
    client.call(m.LocateJournal(), m.JournalLocation)
    return client


def make_guards(config: Config) -> SocketGuards:
    """Returns the keys and limits of the sockets that serve weights. Raises ValueError where there must be
    keys."""
    keys, address = config.buffer.keys, config.weights_address
    if keys is None and address is not None and is_beyond_loopback(address):
        raise ValueError(
            "buffer.keys must name a folder of keys when weights are served beyond the loopback interface, "
            f"got none with {address!r}"
        )
    return SocketGuards(
        secure_server=None if keys is None else lambda socket: start_authenticator(socket, Path(keys)),
        watch=partial(watch_small_requests, encrypted=keys is not None, max_unread=MAX_UNREAD_BYTES),
    )
