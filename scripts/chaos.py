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
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import xxhash
from rich.console import Console
from rich.table import Table

from buffers import events as e
from buffers import messages as m
from buffers.buffer import Buffer
from buffers.client import BufferClient, BufferGone, RefusedByBuffer
from buffers.journal import Reader, read_events
from buffers.server import BufferServer
from buffers.trajectory import SCHEMA_VERSION, Trajectory, encode, flat, to_batch
from configs.load import load
from configs.schema import Config

GROUPS, SAMPLES, STALENESS = 6, 2, 2
KEEP_CHECKPOINTS, CHECKPOINT_EVERY = 2, 4


def configure(folder: Path, seed: int) -> Config:
    return load(
        [
            "generators.engine=simulated", "learner.engine=simulated", "eval.prompts=0", f"run.seed={seed}",
            f"learner.groups_per_step={GROUPS}", f"learner.samples_per_prompt={SAMPLES}", "run.steps=1000000",
            f"staleness.max_versions={STALENESS}", "buffer.lease_s=1.5", "buffer.max_attempts=1000", "buffer.segment_mb=1",
            f"buffer.address=ipc://{folder}/socket", "task.size=50",
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
                version=version, idle_s=0, alive_s=1, sampled_tokens=0, updates=0, update_bytes=0, pause_s=0, digest_mismatches=0
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
    """Plays the learner: its state is a hash over everything trained, in order; it is what a checkpoint holds."""
    client = BufferClient(configure(folder, seed).buffer.address, timeout_s=30.0)
    checkpoints = sorted(int(path.stem) for path in folder.glob("checkpoints/*.json"))
    step, state = 0, ""
    if checkpoints:
        step = checkpoints[-1]
        state = json.loads((folder / "checkpoints" / f"{step}.json").read_text())["state"]
    client.call(m.Rewind(step=step), m.Done)
    life = os.getpid()
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

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def names(self) -> list[str]:
        return ["server", "consumer", *(f"producer-{number}" for number in range(self.num_producers))]

    def start(self, name: str) -> None:
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115
        command = [sys.executable, __file__, "--be", name, "--folder", str(self.folder), "--seed", str(self.seed)]
        self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": ROOT})
        log.close()

    def run(self, num_kills: int, say: Callable[[str], None] = lambda text: None) -> None:
        """Kills `num_kills` times, then lets the run settle and stops it in good order."""
        try:
            for name in self.names:
                self.start(name)
            self.wait_for_progress("start")
            while self.kills.total() < num_kills:
                time.sleep(self.rng.expovariate(1 / 0.25))
                self.strike()
                if self.kills.total() % 20 == 0:
                    say(f"{self.kills.total()} of {num_kills} kills, step {self.last_step()}")
            self.wait_for_progress("settle")
        finally:
            for name in ("consumer", *(n for n in self.names if n.startswith("producer"))):
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
        self.kills[name.partition("-")[0]] += 1
        self.kill(name)
        if name == "server" and self.rng.random() < 0.5:
            self.tear()
        self.start(name)
        if name in ("server", "consumer") and self.rng.random() < 0.3:
            self.wait_for_progress(name)

    def kill(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None:
            process.kill()
            process.wait()

    def stall(self, name: str) -> None:
        """Longer than a lease lasts."""
        self.num_stalls += 1
        self.processes[name].send_signal(signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.1, 2.5))
        self.processes[name].send_signal(signal.SIGCONT)

    def tear(self) -> None:
        """Leaves behind what a write that was cut short leaves: bytes after the last acknowledged ones."""
        self.num_torn += 1
        segments = sorted((self.folder / "journal").glob("*.arrow"))
        for path in [self.folder / "journal" / "log.jsonl", *segments[-1:]]:
            if path.exists() and self.rng.random() < 0.7:
                with open(path, "ab") as file:
                    file.write(self.rng.randbytes(self.rng.randint(1, 3000)))

    def last_step(self) -> int:
        """Steps trained, from the tail of the log."""
        path = self.folder / "journal" / "log.jsonl"
        if not path.exists():
            return 0
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 60_000))
            trained = [e.decode(line) for line in file if line.startswith(b'{"type":"Trained"')]
        return max((event.step + 1 for event in trained if isinstance(event, e.Trained)), default=0)

    def wait_for_progress(self, what: str, timeout_s: float = 60.0) -> None:
        """Until another step is trained; notes how long that took."""
        began, before = time.monotonic(), (self.folder / "journal" / "log.jsonl")
        size = before.stat().st_size if before.exists() else 0
        while not self.trained_since(size):
            if time.monotonic() - began > timeout_s:
                raise RuntimeError(
                    f"no step was trained within {timeout_s} s after {what}; see the logs in {self.folder}"
                )
            time.sleep(0.02)
        self.recovery_s[what].append(time.monotonic() - began)

    def trained_since(self, size: int) -> bool:
        path = self.folder / "journal" / "log.jsonl"
        if not path.exists():
            return False
        with open(path, "rb") as file:
            file.seek(min(size, path.stat().st_size))
            return b'{"type":"Trained"' in file.read()


# ---- the audit


@dataclass
class Audit:
    """What was found wrong, by kind, and the figures."""

    wrong: list[str] = field(default_factory=list)
    figures: dict[str, int | str] = field(default_factory=dict)


def audit(folder: Path, seed: int) -> Audit:
    """Holds the journal, its log and the producers' records against each other."""
    found = Audit()
    buffer = Buffer(configure(folder, seed), folder / "journal")  # applies the log from its beginning
    ledger, book = buffer.ledger, buffer.book
    buffer.close()
    accepted: dict[int, e.Accepted] = {}
    handed: dict[int, list[int]] = {}
    trained: dict[int, e.Trained] = {}
    num_rewinds = num_undone = 0
    for event in read_events(folder / "journal"):
        match event:
            case e.Accepted():
                if event.group in accepted:
                    found.wrong.append(f"group {event.group} was accepted twice")
                accepted[event.group] = event
            case e.Trained():
                if event.step in trained or event.step != len(trained):
                    found.wrong.append(f"step {event.step} was trained out of order")
                if handed.setdefault(event.step, event.groups) != event.groups:
                    found.wrong.append(f"step {event.step} was handed out anew with other groups")
                trained[event.step] = event
            case e.Rewound():
                num_rewinds += 1
                num_undone += sum(step >= event.step for step in trained)
                trained = {step: done for step, done in trained.items() if step < event.step}
    acknowledged = {
        tuple(map(int, line.split()))
        for path in folder.glob("*.acknowledged")
        for line in path.read_text().splitlines()
        if len(line.split()) == 2
    }
    reader = Reader(folder / "journal")
    batches = {}
    for group, event in accepted.items():
        try:
            batches[group] = reader.read(event)
        except ValueError as error:
            found.wrong.append(f"group {group} cannot be read: {error}")
    lost = [pair for pair in acknowledged if pair[1] not in batches or accepted[pair[1]].lease != pair[0]]
    found.wrong += [f"acknowledged group {group} (lease {lease}) is lost" for lease, group in lost]
    uses = Counter(group for done in trained.values() for group in done.groups)
    twice = [group for group, times in uses.items() if times > 1]
    found.wrong += [f"group {group} was trained {uses[group]} times" for group in twice]
    beyond = 0
    for step in sorted(trained):
        for group in trained[step].groups:
            if accepted[group].due != step:
                found.wrong.append(f"group {group}, due at {accepted[group].due}, was trained at step {step}")
            rows = batches[group].column("versions").to_pylist() if group in batches else []
            versions = [v for row in rows for v in row if v >= 0]
            beyond += sum(not 0 <= step - version <= STALENESS for version in versions)
        if len(trained[step].groups) != GROUPS:
            found.wrong.append(f"step {step} trained {len(trained[step].groups)} groups")
    if beyond:
        found.wrong.append(f"{beyond} tokens were beyond the staleness bound when they were trained")
    found.wrong += _check_states(folder, trained, batches)
    sampled = sum(event.tokens for event in accepted.values())
    if not ledger.closes() or book.trained_twice:
        found.wrong.append(f"the ledger does not close: {vars(ledger)}")
    if ledger.groups["trained"] != len(uses) or ledger.groups["trained"] + len(book.pool) != len(accepted):
        found.wrong.append(f"the ledger has {ledger.groups} groups; {len(uses)} trained, {len(accepted)} accepted")
    if ledger.tokens["trained"] != sum(accepted[group].tokens for group in uses):
        found.wrong.append(f"the ledger has {ledger.tokens['trained']} tokens trained, the journal others")
    epoch = Counter(event.prompt for event in accepted.values() if event.group < 50)
    if max(epoch.values(), default=0) > 1:
        found.wrong.append("a prompt was given to two groups of one epoch")
    found.figures = {
        "groups accepted": len(accepted), "groups acknowledged to producers": len(acknowledged),
        "acknowledged groups lost": len(lost), "groups trained twice": len(twice), "steps trained": len(trained),
        "steps undone by rewinds": f"{num_undone} in {num_rewinds} rewinds", "tokens beyond the bound": beyond,
        "tokens in the journal": sampled, "ledger, groups": _account(ledger.leased, ledger.groups),
        "ledger, tokens": _account(ledger.generated, ledger.tokens),
    }  # fmt: skip
    return found


def _check_states(folder: Path, trained: dict[int, e.Trained], batches: dict[int, Any]) -> list[str]:
    """The consumer's checkpoints must hold the state that the journal, trained in the order of the log, leads to."""
    import pyarrow as pa

    wrong, state = [], ""
    checkpoints = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("checkpoints/*.json")}
    for step in sorted(trained):
        state = train(
            state, pa.Table.from_batches([batches[group] for group in trained[step].groups if group in batches])
        )
        if step + 1 in checkpoints and checkpoints[step + 1]["state"] != state:
            wrong.append(f"the checkpoint of step {step + 1} is not what the journal leads to")
    return wrong


def _account(total: int, fates: Counter[str]) -> str:
    return f"{total:,} = " + " + ".join(f"{number:,} {fate}" for fate, number in sorted(fates.items()) if number)


def report(harness: Harness, found: Audit, console: Console) -> None:
    table = Table(title="chaos", title_justify="left", show_header=False)
    table.add_row(
        "kills (SIGKILL)", f"{harness.kills.total()}: " + ", ".join(f"{n} {who}" for who, n in harness.kills.items())
    )
    table.add_row("stalls (SIGSTOP), torn files", f"{harness.num_stalls}, {harness.num_torn}")
    for name, value in found.figures.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
    for what, seconds in harness.recovery_s.items():
        table.add_row(
            f"to the next step after: {what}",
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
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # none of them outlives the harness
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
    found = audit(folder, options.seed)
    report(harness, found, console)
    if options.folder is None and not found.wrong:
        shutil.rmtree(folder)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
