"""Kills the buffer and everyone around it at random moments, and audits what is left. No Ray, no model: the data path alone.

    scripts/chaos.sh [--kills 200] [--seed 0] [--producers 3] [--folder DIR]

Real processes: one buffer server, producers that make groups of random length, and a consumer that "trains" (it hashes every byte that
it is handed), writes checkpoints and goes back to them. The harness kills them with SIGKILL, stops and continues producers
(SIGSTOP, SIGCONT), and leaves garbage behind the journal's last bytes, as a torn write does. Each process that dies is started
again at once. At the end the journal, its log and the records that the producers kept for themselves are held against each other.
The exit status is 1 when anything does not add up.
"""

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import xxhash
from audit import Audit, audit
from rich.console import Console
from rich.table import Table

from buffers import events as e
from buffers import messages as m
from buffers.client import BufferClient, BufferGone, RefusedByBuffer
from buffers.server import BufferServer
from buffers.trajectory import SCHEMA_VERSION, Trajectory, encode, flat, to_batch
from configs.load import load
from configs.schema import Config

GROUPS, SAMPLES, STALENESS = 6, 2, 2
KEEP_CHECKPOINTS, CHECKPOINT_EVERY = 2, 4
LEASE_S, PROMPTS = 1.5, 50


def configure(folder: Path, seed: int) -> Config:
    return load(
        [
            "generators.engine=simulated", "learner.engine=simulated", "eval.prompts=0", f"run.seed={seed}",
            f"learner.groups_per_step={GROUPS}", f"learner.samples_per_prompt={SAMPLES}", "run.steps=1000000",
            f"staleness.max_versions={STALENESS}", f"buffer.lease_s={LEASE_S}", "buffer.max_attempts=1000", "buffer.segment_mb=1",
            f"buffer.address=ipc://{folder}/socket", f"task.size={PROMPTS}",
        ]
    )  # fmt: skip


# ---- the processes


def serve(folder: Path, seed: int) -> None:
    server = BufferServer(configure(folder, seed), folder / "journal")
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.run()


def produce(folder: Path, seed: int, name: str) -> None:
    """Makes groups; writes down each that the buffer has acknowledged as accepted."""
    rng = random.Random(f"{seed} {name} {time.time_ns()}")
    client = BufferClient(configure(folder, seed).buffer.address, timeout_s=30.0)
    client.call(m.Join(generator=name), m.Welcome)
    record = open(folder / f"{name}.acknowledged", "a", buffering=1)  # noqa: SIM115
    waiting: dict[int, m.Lease] = {}  # leased, by lease
    submitted: dict[int, list[m.Lease]] = {}  # by request
    asked: int | None = None
    version, beat_at = -1, 0.0
    while True:
        if asked is None and len(waiting) < 4:
            asked = client.post(m.Ask(generator=name, count=4, wait_s=2.0))
        if time.monotonic() - beat_at > 0.3:
            beat_at = time.monotonic()
            report = m.GeneratorReport(
                version=version, alive_s=1
            )  # fmt: skip
            held = [*waiting, *(lease.id for leases in submitted.values() for lease in leases)]
            client.post(m.Heartbeat(generator=name, progress=dict.fromkeys(held, 0), report=report))
        for answer in client.receive(0.02):
            match answer.reply:
                case m.Work(leases=leases):
                    asked = None if answer.number == asked else asked
                    version = answer.reply.version
                    waiting |= {lease.id: lease for lease in leases}
                case m.Standing(revoked=revoked):
                    version = answer.reply.version
                    for lease in revoked:
                        if waiting.pop(lease, None) is not None:
                            client.post(
                                m.Fail(generator=name, lease=lease, num_tokens=0, error="revoked", revoked=True)
                            )
                case m.Receipt(leases=ids, verdicts=verdicts):
                    mine = {lease.id: lease for lease in submitted.pop(answer.number, [])}
                    for lease_id, verdict in zip(ids, verdicts, strict=True):
                        if verdict == "accepted" and lease_id in mine:
                            record.write(f"{lease_id} {mine[lease_id].group}\n")
        ready = [lease for lease in waiting.values() if lease.floor <= version and rng.random() < 0.3]
        if ready:
            for one in ready:
                del waiting[one.id]
            batch = to_batch([row for lease in ready for row in rows_of(lease, version, name, rng)])
            request = m.Submit(generator=name, leases=[lease.id for lease in ready], schema=SCHEMA_VERSION)
            submitted[client.post(request, encode(batch))] = ready


def rows_of(lease: m.Lease, version: int, name: str, rng: random.Random) -> list[Trajectory]:
    rows = []
    for sample in range(lease.num_samples):
        length = rng.randint(1, 40)
        versions = sorted(rng.randint(lease.floor, version) for _ in range(length))
        rows.append(
            Trajectory(
                group=lease.group, sample=sample, due=lease.due, prompt_id=lease.index, task=lease.task,
                tokens=[rng.randrange(1000) for _ in range(length + 3)], sampled=[False] * 3 + [True] * length,
                logprobs=[0.0] * 3 + [-rng.random() for _ in range(length)], versions=[-1] * 3 + versions,
                reward=rng.random(), finish_reason="stop", generator=name, started_at=0.0, finished_at=time.time(),
            )
        )  # fmt: skip
    return rows


def consume(folder: Path, seed: int) -> None:
    """Plays the learner: its state is a hash over everything trained, in order; it is what a checkpoint holds, and what is
    written down after each step."""
    client = BufferClient(configure(folder, seed).buffer.address, timeout_s=30.0)
    checkpoints = sorted(int(path.stem) for path in folder.glob("checkpoints/*.json"))
    step, state = 0, ""
    if checkpoints:
        step = checkpoints[-1]
        state = json.loads((folder / "checkpoints" / f"{step}.json").read_text())["state"]
    client.call(m.Rewind(step=step), m.Done)
    life = os.getpid()
    record = open(folder / "consumer.states", "a", buffering=1)  # noqa: SIM115
    while True:
        client.call(m.Publish(version=step, weights=f"{life}/{step}"), m.Done)
        while isinstance(taken := client.next(step, wait_s=5.0), m.NotYet):
            pass
        if isinstance(taken, m.Over):
            return
        state = train(state, taken.table)
        versions = flat(taken.table, "versions")
        mine = versions[versions >= 0]
        trained = int(((step - mine >= 0) & (step - mine <= STALENESS)).sum())
        done = m.Consumed(step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={})
        client.call(done, m.Done)
        record.write(f"{step} {state}\n")
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            kept = save(folder / "checkpoints", step, state)
            client.call(m.Checkpointed(step=step, oldest=kept[0]), m.Done)


def train(state: str, table: Any) -> str:
    """The next state: a hash of the last one and of all that is trained."""
    digest = xxhash.xxh3_128(state.encode())
    for column in ("group", "sample", "reward"):
        digest.update(table.column(column).to_numpy().tobytes())
    for column in ("tokens", "logprobs", "versions"):
        digest.update(flat(table, column).tobytes())
    return digest.hexdigest()


def save(folder: Path, step: int, state: str) -> list[int]:
    folder.mkdir(exist_ok=True)
    temporary = folder / f"{step}.tmp"
    temporary.write_text(json.dumps({"step": step, "state": state}))
    os.replace(temporary, folder / f"{step}.json")
    kept = sorted(int(path.stem) for path in folder.glob("*.json"))
    for old in kept[:-KEEP_CHECKPOINTS]:
        (folder / f"{old}.json").unlink()
    return kept[-KEEP_CHECKPOINTS:]


# ---- the harness


@dataclass
class Harness:
    folder: Path
    seed: int
    num_producers: int = 3
    kills: Counter[str] = field(default_factory=Counter)
    num_stalls: int = 0
    num_torn: int = 0
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)
    status: m.Status | None = None
    """What the server said of itself when all others were gone."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.log = self.folder / "journal" / "log.jsonl"

    @property
    def names(self) -> list[str]:
        return ["server", "consumer", *(f"producer-{number}" for number in range(self.num_producers))]

    def start(self, name: str) -> None:
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115
        command = [sys.executable, __file__, "--be", name, "--folder", str(self.folder), "--seed", str(self.seed)]
        self.processes[name] = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": ROOT}, preexec_fn=die_with_parent
        )
        log.close()

    def run(self, num_kills: int, say: Callable[[str], None] = lambda text: None) -> None:
        """Kills `num_kills` times, then lets the run settle and stops it in good order."""
        try:
            for name in self.names:
                self.start(name)
            self.wait_for(None, {"step trained": is_trained})
            while self.kills.total() < num_kills:
                time.sleep(self.rng.expovariate(1 / 0.25))
                self.strike()
                self.notice_the_dead()
                if self.kills.total() % 20 == 0:
                    say(f"{self.kills.total()} of {num_kills} kills, step {self.last_step()}")
            self.wait_for(None, {"step trained": is_trained})
            self.notice_the_dead()
            for name in self.names[1:]:
                self.kill(name)
            time.sleep(1.5 * LEASE_S)  # by then all leases have expired
            client = BufferClient(configure(self.folder, self.seed).buffer.address)
            self.status = client.call(m.Watch(after=0, wait_s=0.0), m.News).status
            client.close()
        finally:
            for name in self.names[1:]:
                self.kill(name)
            server = self.processes.get("server")
            if server is not None:
                server.terminate()
                server.wait(timeout=20)

    def strike(self) -> None:
        name = self.rng.choice([*self.names, "server", "consumer"])
        if name.startswith("producer") and self.rng.random() < 0.3:
            self.stall(name)
            return
        who = name.partition("-")[0]
        self.kills[who] += 1
        self.kill(name)
        if name == "server" and self.rng.random() < 0.5:
            self.tear()
        self.start(name)
        if self.rng.random() < 0.3:
            awaited: dict[str, dict[str, Seen]] = {
                "server": {"group accepted": is_accepted, "step trained": is_trained},
                "consumer": {"step trained": is_trained},
                "producer": {"lease taken": lambda event: isinstance(event, e.Leased) and event.generator == name},
            }
            self.wait_for(who, awaited[who])

    def kill(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None:
            process.kill()
            process.wait()

    def notice_the_dead(self) -> None:
        """A process that has ended without being killed is a fault; it is started again all the same."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.wrong.append(f"{name} ended by itself with {process.returncode}, see {self.folder}/{name}.log")
                self.start(name)

    def stall(self, name: str) -> None:
        """Stops a process, now and then for longer than a lease lasts; the others go on, and are killed meanwhile."""
        self.num_stalls += 1
        process = self.processes[name]
        process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(self.rng.uniform(0.1, 1.7 * LEASE_S), process.send_signal, [signal.SIGCONT])
        timer.daemon = True
        timer.start()

    def tear(self) -> None:
        """Leaves behind what a write that was cut short leaves: after the last acknowledged bytes a part of a real line or
        record batch, or garbage."""
        self.num_torn += 1
        for path in [self.log, *sorted((self.folder / "journal").glob("*.arrow"))[-1:]]:
            if path.exists() and self.rng.random() < 0.7:
                with open(path, "r+b") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - 3000))
                    part = file.read()
                    if path == self.log:
                        part = part.splitlines(keepends=True)[-1]
                    cut = part[: self.rng.randrange(1, len(part))] if len(part) > 1 else b"x"
                    file.seek(0, os.SEEK_END)
                    file.write(cut if self.rng.random() < 0.5 else self.rng.randbytes(self.rng.randint(1, 3000)))

    def last_step(self) -> int:
        """Steps trained, from the tail of the log."""
        tail = self.events_after(max(0, self.log.stat().st_size - 60_000)) if self.log.exists() else []
        return max((event.step + 1 for event in tail if isinstance(event, e.Trained)), default=0)

    def events_after(self, place: int) -> list[e.AnyEvent]:
        if not self.log.exists():
            return []
        with open(self.log, "rb") as file:
            file.seek(min(place, self.log.stat().st_size))
            return [event for event in map(e.decode, file) if event is not None]

    def wait_for(self, killed: str | None, awaited: dict[str, "Seen"], timeout_s: float = 60.0) -> None:
        """Until each of these has been seen in the log, and the server answers; notes how long that took."""
        began, place = time.monotonic(), self.log.stat().st_size if self.log.exists() else 0
        if killed == "server":
            client = BufferClient(configure(self.folder, self.seed).buffer.address, timeout_s=timeout_s)
            client.call(m.Locate(), m.Located)
            client.close()
            self.recovery_s["server killed, to its first answer"].append(time.monotonic() - began)
        left = dict(awaited)
        while left:
            events = self.events_after(place)
            for name, seen in list(left.items()):
                if any(map(seen, events)):
                    del left[name]
                    if killed:
                        self.recovery_s[f"{killed} killed, to the next {name}"].append(time.monotonic() - began)
            if time.monotonic() - began > timeout_s:
                self.notice_the_dead()
                raise RuntimeError(
                    f"no {' or '.join(left)} in {timeout_s} s; {self.wrong or 'all are alive'}; see the logs in {self.folder}"
                )
            time.sleep(0.02)


Seen = Callable[[e.AnyEvent], bool]


def is_trained(event: e.AnyEvent) -> bool:
    return isinstance(event, e.Trained)


def is_accepted(event: e.AnyEvent) -> bool:
    return isinstance(event, e.Accepted)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- the report


def report(harness: Harness, found: Audit, console: Console) -> None:
    table = Table(title="chaos", title_justify="left", show_header=False)
    table.add_row(
        "kills (SIGKILL)", f"{harness.kills.total()}: " + ", ".join(f"{n} {who}" for who, n in harness.kills.items())
    )
    table.add_row("stalls (SIGSTOP), torn tails", f"{harness.num_stalls}, {harness.num_torn}")
    for name, value in found.figures.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
    for what, seconds in harness.recovery_s.items():
        table.add_row(
            what,
            f"median {median(seconds):.2f} s, worst {max(seconds):.2f} s ({len(seconds)} times)",
        )
    console.print(table)
    for text in found.wrong[:20]:
        console.print(f"[red]wrong:[/] {text}")
    console.print("everything adds up" if not found.wrong else f"[red]{len(found.wrong)} things are wrong[/]")


ROOT = str(Path(__file__).parents[1])
PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--producers", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work, and what to keep (default: a temporary folder)")
    parser.add_argument("--be", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be is not None:
        role = {"server": serve, "consumer": consume}.get(options.be)
        try:
            role(options.folder, options.seed) if role else produce(options.folder, options.seed, options.be)
        except (BufferGone, RefusedByBuffer) as error:
            print(f"{options.be}: {error}", file=sys.stderr)
            return 1
        return 0
    console, say = Console(), Console(stderr=True)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="slipstream-chaos-"))
    harness = Harness(folder, options.seed, options.producers)
    harness.run(options.kills, lambda text: say.print(text))
    found = audit(folder, configure(folder, options.seed), train, harness.status)
    found.wrong += harness.wrong
    report(harness, found, console)
    if options.folder is None and not found.wrong:
        shutil.rmtree(folder)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
