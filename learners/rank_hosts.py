"""The hosts of a learner's ranks, and what each of them must have before a model is loaded."""

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from configs.host import boot_id
from configs.learner import LearnerKind
from configs.schema import Config
from learners.rendezvous import Pool
from learners.world import World

APPEARS_S = 15.0
"""Seconds that a new file may take to be seen on another host."""
LOOK_S = 0.2
WEIGHTS = ("*.safetensors", "*.bin")
"""Files of weights."""


class HostReport(msgspec.Struct, frozen=True):
    """Message of each rank to all."""

    host: str
    """Name of the host, for people."""
    identity: str
    """See `identify_host`."""
    problem: str = ""
    """Difference of the folder from what it must be; empty where there is none."""


def identify_host() -> str:
    """Returns a name that processes have in common which see each other's files in /proc.

    Two containers of one machine are two hosts.
    """
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


def reads_weights(config: Config, rank: int) -> bool:
    """Returns whether a rank reads a model's weights from files: the first rank of each pool does, and all do
    with Megatron. The others need the small files of the model only."""
    return config.learner.engine is LearnerKind.megatron or rank in (0, config.learner.ranks)


def check_model_files(config: Config, pool: Pool, rank: int) -> None:
    """Raises ValueError where this host lacks the files of a model that the rank reads."""
    engine, critic = config.learner.engine, config.algo.critic.path
    if engine is LearnerKind.simulated:
        return
    reads = reads_weights(config, rank)
    critic = critic if config.algo.needs_critic else None
    # All ranks read the policy's configuration: it says what a sequence costs.
    models = [("model.path", config.model.path, reads and not (pool is Pool.critic and critic is not None))]
    if critic is not None and pool is not Pool.policy:
        models.append(("algo.critic.path", critic, reads))
    for key, path, needs_weights in models:
        lacking = "" if (Path(path) / "config.json").exists() else "config.json"
        if not lacking and needs_weights and not any(any(Path(path).glob(kind)) for kind in WEIGHTS):
            lacking = WEIGHTS[0]
        if lacking:
            all_read = "every host of the learner's ranks with learner.engine=megatron"
            place = all_read if engine is LearnerKind.megatron else f"the host of the learner's rank {rank}"
            raise ValueError(
                f"{key} must be on {place}, got {path}/{lacking}, which {os.uname().nodename} lacks"
            )


def check_shared_folder(folder: Path, world: World, say: Callable[[str], None]) -> None:
    """Raises ValueError on all ranks where ranks on several hosts do not have one folder of checkpoints.

    Collective. The first rank writes a file, and each other host must see it, and be able to write beside it.
    """
    reports = _gather_reports(world)
    if len({report.identity for report in reports}) == 1:
        return
    say("loading: looking for the folder of checkpoints on all hosts")
    token = world.gather_messages(secrets.token_hex(8).encode())[0]
    path, problem = folder / f".seen_{token.decode()}", ""
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(token)
    # Nobody asks for the file before it is there: a network file system would remember that it was not.
    world.barrier()
    try:
        if world.rank > 0:
            problem = _find_problem(path, token)
        reports = _gather_reports(world, problem)
    finally:
        if world.rank == 0:
            path.unlink(missing_ok=True)
    for report in reports:
        if report.problem:
            raise ValueError(
                "run.outputs must be on a file system that all hosts of the learner's ranks share, because "
                f"every rank writes its part of a checkpoint there, got {folder} on {reports[0].host}, "
                f"{report.problem} {report.host}"
            )


def _gather_reports(world: World, problem: str = "") -> list[HostReport]:
    own = HostReport(os.uname().nodename, identify_host(), problem)
    told = world.gather_messages(msgspec.json.encode(own))
    return [msgspec.json.decode(one, type=HostReport) for one in told]


def _find_problem(path: Path, token: bytes) -> str:
    """Returns how the folder of a file that the first rank has written differs here; empty where it does
    not."""
    deadline, seen = time.monotonic() + APPEARS_S, b""
    while seen != token and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            # Opening the folder makes a network file system ask whether it has changed.
            os.close(os.open(path.parent, os.O_RDONLY))
            seen = path.read_bytes()
        if seen != token:
            time.sleep(LOOK_S)
    if seen != token:
        return "which is another folder, or none, on"
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return ""
    except OSError as error:
        return f"which cannot be written ({error.strerror}) on"
