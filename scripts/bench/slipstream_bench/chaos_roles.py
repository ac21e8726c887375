"""The processes that `chaos.py` kills: a buffer server, producers of groups, and a consumer like a
learner."""

import argparse
import dataclasses
import errno
import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import xxhash

from buffers import journal
from buffers import messages as m
from buffers.buffer import Buffer
from buffers.client import BufferClient, BufferGone, RefusedByBuffer
from buffers.run_status import GeneratorReport
from buffers.server import BufferServer
from buffers.trajectory import SCHEMA_VERSION, Trajectory, encode_batch, flatten_column, to_batch
from configs import disk
from configs.disk import DiskFull
from configs.load import load_config
from configs.schema import Config
from slipstream import repair

GROUPS, SAMPLES, STALENESS = 6, 2, 2
BRANCHED_SHARE = 0.3
"""Part of the samples that have two branches."""
KEEP_CHECKPOINTS, CHECKPOINT_EVERY = 2, 4
LEASE_S, PROMPTS = 1.5, 50
ROTATE_LINES, LONG_LOG = 400, 60_000
FULL_DISK, REFUSED = 3, 4
"""Exit statuses of a server with a full disk, and of a server that refuses to open the journal."""


def make_config(folder: Path, seed: int, on_late: str = "wait") -> Config:
    late = {"cancel": ["staleness.straggler_timeout_s=1.0"]}.get(on_late, [])
    return load_config(
        [
            *late,
            f"staleness.on_late={on_late}",
            "buffer.retention=checkpoints",
            "generators.engine=simulated",
            "learner.engine=simulated",
            "eval.prompts=0",
            f"run.seed={seed}",
            f"learner.groups_per_step={GROUPS}",
            f"learner.samples_per_prompt={SAMPLES}",
            "run.steps=1000000",
            f"staleness.max_versions={STALENESS}",
            f"buffer.lease_s={LEASE_S}",
            "buffer.max_attempts=1000000",
            "buffer.segment_mb=1",
            f"buffer.address=ipc://{folder}/socket",
            f"task.size={PROMPTS}",
        ]
    )


def serve_buffer(config: Config, folder: Path, address: str | None = None) -> int:
    """Runs the server and returns its exit status. `address` replaces the configured one."""
    journal.ROTATE_LINES = ROTATE_LINES
    keep_discarded_files(folder / "discarded")
    fill_disk_on_demand(folder / "full")
    if address is not None:
        config = dataclasses.replace(config, buffer=dataclasses.replace(config.buffer, address=address))
    try:
        server = BufferServer(config, folder / "journal")
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        server.run()
    except DiskFull as error:
        print(f"server: {error}", file=sys.stderr)
        return FULL_DISK
    except ValueError as error:
        print(f"server: {error}", file=sys.stderr)
        return REFUSED
    return 0


def keep_discarded_files(folder: Path) -> None:
    """Makes journals move the files that they discard to `folder`, where the audit finds them."""

    def discard_file(self: journal.Journal, path: Path) -> None:
        if path.exists():
            place = folder / path.relative_to(self.folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)

    journal.Journal.discard_file = discard_file  # type: ignore[method-assign]


def fill_disk_on_demand(mark: Path) -> None:
    """Makes writes to the journal fail with ENOSPC in the middle, for as long as the file `mark` exists."""
    write = os.write

    def write_if_there_is_room(file: int, data: bytes | memoryview) -> int:
        if mark.exists() and file > 2:
            if len(data) > 1:
                write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    disk.os = SimpleNamespace(**{**vars(os), "write": write_if_there_is_room})  # type: ignore[assignment]


def write_long_log(config: Config, folder: Path, num_lines: int) -> None:
    """Writes a journal with a long log of failed leases, and with no state but its first."""
    journal.ROTATE_LINES = 10**9
    logging.disable(logging.WARNING)
    buffer = Buffer(config, folder / "journal")
    buffer.progress.publish_version(0, "long")
    for number in range(num_lines // 2):
        lease = buffer.lease_next("long")
        assert lease is not None
        buffer.fail_lease(lease.id, 0, "it was never begun")
        if number % 1000 == 0:
            buffer.commit()
    buffer.commit()
    buffer.journal.close()


def produce_groups(config: Config, folder: Path, seed: int, name: str) -> None:
    """Makes groups, and writes down each group that the buffer acknowledges as accepted."""
    rng = random.Random(f"{seed} {name} {time.time_ns()}")
    client = BufferClient(config.buffer.address, timeout_s=30.0)
    client.call(m.JoinRun(generator=name), m.JoinedRun)
    record = open(folder / f"{name}.acknowledged", "a", buffering=1)  # noqa: SIM115
    # Leases by number whose groups are not made yet; leases of submitted groups by number of the request.
    waiting: dict[int, m.Lease] = {}
    submitted: dict[int, list[m.Lease]] = {}
    # Number of the request for leases that has no answer yet.
    asked: int | None = None
    version, beat_at = -1, 0.0
    while True:
        if asked is None and len(waiting) < 4:
            asked = client.send_request(m.RequestLeases(generator=name, count=4, wait_s=2.0))
        if time.monotonic() - beat_at > 0.3:
            beat_at = time.monotonic()
            report = GeneratorReport(version=version, alive_s=1)
            held = [*waiting, *(lease.id for leases in submitted.values() for lease in leases)]
            client.send_request(
                m.GeneratorHeartbeat(generator=name, progress=dict.fromkeys(held, 0), report=report)
            )
        for answer in client.receive_answers(0.02):
            match answer.reply:
                case m.LeaseGrant(leases=leases):
                    asked = None if answer.number == asked else asked
                    version = answer.reply.version
                    waiting |= {lease.id: lease for lease in leases}
                case m.GeneratorStanding(revoked=revoked):
                    version = answer.reply.version
                    for lease in revoked:
                        if waiting.pop(lease, None) is not None:
                            client.send_request(
                                m.FailLease(
                                    generator=name, lease=lease, num_tokens=0, error="revoked", revoked=True
                                )
                            )
                case m.LeaseReceipt(leases=ids, verdicts=verdicts):
                    mine = {lease.id: lease for lease in submitted.pop(answer.number, [])}
                    for lease_id, verdict in zip(ids, verdicts, strict=True):
                        if verdict == "accepted" and lease_id in mine:
                            record.write(f"{lease_id} {mine[lease_id].group}\n")
        ready = [lease for lease in waiting.values() if lease.min_version <= version and rng.random() < 0.3]
        if ready:
            for one in ready:
                del waiting[one.id]
            groups = [make_rows(lease, version, name, rng) for lease in ready]
            batch = to_batch([row for rows in groups for row in rows])
            request = m.SubmitGroups(
                generator=name,
                leases=[lease.id for lease in ready],
                rows=[len(rows) for rows in groups],
                schema=SCHEMA_VERSION,
            )
            submitted[client.send_request(request, encode_batch(batch))] = ready


def make_rows(lease: m.Lease, version: int, name: str, rng: random.Random) -> list[Trajectory]:
    """Returns the trajectories of one group: 3 prompt tokens each, and 1 to 40 sampled ones of random
    versions. Some samples have a second branch, on which a second turn stands."""
    rows: list[Trajectory] = []
    places = [
        (sample, branch)
        for sample in range(lease.num_samples)
        for branch in range(1 + (rng.random() < BRANCHED_SHARE))
    ]
    for sample, branch in places:
        length = rng.randint(1, 40)
        reward = rows[-1].reward if branch else rng.random()
        versions = sorted(rng.randint(lease.min_version, version) for _ in range(length))
        rows.append(
            Trajectory(
                group=lease.group,
                sample=sample,
                branch=branch,
                due=lease.due,
                prompt_id=lease.index,
                task=lease.task,
                tokens=[rng.randrange(1000) for _ in range(length + 3)],
                sampled=[False] * 3 + [True] * length,
                logprobs=[0.0] * 3 + [-rng.random() for _ in range(length)],
                versions=[-1] * 3 + versions,
                turn=[-1] * 3 + [branch] * length,
                reward=reward,
                finish_reason="stop",
                generator=name,
                started_at=0.0,
                finished_at=time.time(),
            )
        )
    return rows


def consume_steps(config: Config, folder: Path) -> None:
    """Plays the learner.

    Its state is a hash over everything that it trained, in order. It writes the state down after each step,
    and a checkpoint holds it.
    """
    client = BufferClient(config.buffer.address, timeout_s=30.0)
    step, state = rewind_to_newest_checkpoint(client, folder)
    life = os.getpid()
    record = open(folder / "consumer.states", "a", buffering=1)  # noqa: SIM115
    while True:
        client.call(m.PublishVersion(version=step, manifest_locator=f"{life}/{step}"), m.Acknowledged)
        while isinstance(taken := client.take_batch(step, wait_s=5.0), m.NotReadyYet):
            pass
        if isinstance(taken, m.RunStopped):
            return
        state = hash_training_step(state, taken.table)
        versions = flatten_column(taken.table, "versions")
        mine = versions[versions >= 0]
        trained = int(((step - mine >= 0) & (step - mine <= STALENESS)).sum())
        done = m.ReportTrainedStep(step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={})
        client.call(done, m.Acknowledged)
        record.write(f"{step} {state}\n")
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            kept = save_checkpoint(folder / "checkpoints", step, state)
            client.call(m.ReportCheckpoint(step=step, oldest=kept[0]), m.Acknowledged)


def rewind_to_newest_checkpoint(client: BufferClient, folder: Path) -> tuple[int, str]:
    """Rewinds the buffer to the newest checkpoint that it accepts; returns that step and its state.

    The buffer refuses a checkpoint whose steps a repair of the log has lost. Such a checkpoint is deleted.
    """
    for step in sorted((int(path.stem) for path in folder.glob("checkpoints/*.json")), reverse=True):
        try:
            client.call(m.RewindToStep(step=step), m.Acknowledged)
        except RefusedByBuffer:
            (folder / "checkpoints" / f"{step}.json").unlink()
            continue
        return step, json.loads((folder / "checkpoints" / f"{step}.json").read_text())["state"]
    client.call(m.RewindToStep(step=0), m.Acknowledged)
    return 0, ""


def hash_training_step(state: str, table: Any) -> str:
    """Returns the next state: a hash of the last state and of every column that a step trains."""
    digest = xxhash.xxh3_128(state.encode())
    for column in ("group", "sample", "reward"):
        digest.update(table.column(column).to_numpy().tobytes())
    for column in ("tokens", "logprobs", "versions"):
        digest.update(flatten_column(table, column).tobytes())
    return digest.hexdigest()


def save_checkpoint(folder: Path, step: int, state: str) -> list[int]:
    """Writes a checkpoint, deletes the oldest ones, and returns the steps of those that are left, in
    order."""
    folder.mkdir(exist_ok=True)
    temporary = folder / f"{step}.tmp"
    temporary.write_text(json.dumps({"step": step, "state": state}))
    os.replace(temporary, folder / f"{step}.json")
    kept = sorted(int(path.stem) for path in folder.glob("*.json"))
    for old in kept[:-KEEP_CHECKPOINTS]:
        (folder / f"{old}.json").unlink()
    return kept[-KEEP_CHECKPOINTS:]


def play_role(options: argparse.Namespace) -> int:
    """Plays the process that `options.be` names; returns its exit status."""
    config = make_config(options.folder, options.seed, options.on_late)
    try:
        match options.be:
            case "server":
                return serve_buffer(config, options.folder)
            case "second":
                return serve_buffer(config, options.folder, f"ipc://{options.folder}/second")
            case "repair":
                keep_discarded_files(options.folder / "discarded")
                return repair.main([str(options.folder / "journal")])
            case "long":
                write_long_log(config, options.folder, options.lines)
            case "consumer":
                consume_steps(config, options.folder)
            case "player":
                # Imported here, because it takes torch along.
                from slipstream_bench.chaos_player import play_episodes

                play_episodes(config, options.folder, options.be)
            case name:
                produce_groups(config, options.folder, options.seed, name)
    except (BufferGone, RefusedByBuffer) as error:
        print(f"{options.be}: {error}", file=sys.stderr)
        return 1
    return 0
