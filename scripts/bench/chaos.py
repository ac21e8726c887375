"""Kills the buffer and everyone around it at random moments, and audits what is left. No Ray, no model: the
data path alone.

    scripts/chaos.sh [--kills 200] [--seed 0] [--producers 3] [--on-late wait|mask|cancel|all] [--folder DIR]

Real processes: one buffer server, producers that make groups of random length, and a consumer that "trains"
(it hashes every byte that it is handed), writes checkpoints and goes back to them. Each process that dies is
started again at once. The faults:

    kill            SIGKILL to the server, the consumer or a producer, at a random moment
    kill, rotation  to the server, just when a new segment or log file has appeared
    kill, recovery  to the server, again and again while it recovers a log of 60,000 lines
    stall           a producer is stopped (SIGSTOP), now and then for longer than a lease lasts
    torn tail       a server that was killed leaves a part of a real line or record batch, or garbage
    second opener   another server is started on the living journal
    rotten group    a bit changes in a group that waits to be trained
    rotten log      a bit changes inside the log of a server that was killed; `buffers.repair` mends it
    full disk       the server's disk is full, in the middle of a write

The buffer keeps what its checkpoints need and no more (`buffer.retention=checkpoints`); what it deletes is
moved aside for the audit. At the end the journal, its log and the records that the producers kept for
themselves are held against each other. The exit status is 1 when anything does not add up.
"""

import argparse
import ctypes
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

from rich.console import Console
from rich.table import Table

from buffers import events as e
from buffers import messages as m
from buffers.client import BufferClient
from buffers.run_status import RunStatus
from buffers.segments import is_closed
from buffers.state import state_numbers
from configs.staleness import OnLate
from slipstream_bench.audit import Audit, audit
from slipstream_bench.chaos_roles import FULL_DISK, LEASE_S, LONG_LOG, REFUSED, configure, play_role, train

# ---- the harness


Place = tuple[int, int]
"""(file of the log, byte in it)."""


@dataclass
class Harness:
    folder: Path
    seed: int
    num_producers: int = 3
    on_late: str = "wait"
    kills: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """Those that kill nobody."""
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)
    status: RunStatus | None = None
    """What the server said of itself when all others were gone."""
    long_log: int = LONG_LOG
    """Lines of the log that is recovered first."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config = configure(self.folder, self.seed, self.on_late)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.journal = self.folder / "journal"

    @property
    def names(self) -> list[str]:
        return ["server", "consumer", *(f"producer-{number}" for number in range(self.num_producers))]

    def start(self, name: str) -> None:
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115
        self.processes[name] = subprocess.Popen(
            self.command(name),
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": ROOT},
            preexec_fn=die_with_parent,
        )
        log.close()

    def command(self, name: str) -> list[str]:
        own = ["--folder", str(self.folder), "--seed", str(self.seed), "--on-late", self.on_late]
        return [sys.executable, __file__, "--be", name, *own]

    def run(self, num_kills: int, say: Callable[[str], None] = lambda text: None) -> None:
        """Kills `num_kills` times, then lets the run settle and stops it in good order."""
        strikes = [self.kill_somebody] * 20 + [self.stall] * 4 + [self.kill_at_rotation] * 2
        strikes += [self.open_twice, self.rot_group, self.rot_log, self.fill_disk]
        try:
            self.interrupt_long_recovery()
            for name in self.names:
                self.start(name)
            self.wait_for(None, {"step trained": is_trained})
            for strike in dict.fromkeys(strikes):  # each once at least
                strike()
                self.notice_the_dead()
            while self.kills.total() < num_kills:
                time.sleep(self.rng.expovariate(1 / 0.25))
                self.rng.choice(strikes)()
                self.notice_the_dead()
                if self.kills.total() % 20 == 0:
                    say(f"{self.on_late}: {self.kills.total()} of {num_kills} kills, step {self.last_step()}")
            self.wait_for(None, {"step trained": is_trained})
            self.notice_the_dead()
            for name in self.names[1:]:
                self.kill(name)
            time.sleep(1.5 * LEASE_S)  # by then all leases have expired
            client = BufferClient(self.config.buffer.address)
            self.status = client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status
            client.close()
        finally:
            for name in self.names[1:]:
                self.kill(name)
            server = self.processes.get("server")
            if server is not None:
                server.terminate()
                server.wait(timeout=20)

    # ---- faults

    def interrupt_long_recovery(self) -> None:
        subprocess.run(
            [*self.command("long"), "--lines", str(self.long_log)],
            check=True,
            env={**os.environ, "PYTHONPATH": ROOT},
        )
        for _ in range(5):
            self.start("server")
            time.sleep(self.rng.uniform(0.3, 2.5))
            self.kill("server")
            self.kills["server while it recovers"] += 1

    def kill_somebody(self) -> None:
        name = self.rng.choice([*self.names, "server", "consumer"])
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
                "producer": {
                    "lease taken": lambda event: isinstance(event, e.Leased) and event.generator == name
                },
            }
            self.wait_for(who, awaited[who])

    def kill_at_rotation(self) -> None:
        """Kills the server when it has just begun a segment or a file of the log."""
        before, deadline = self.files_begun(), time.monotonic() + 5.0
        while self.files_begun() <= before and time.monotonic() < deadline:
            time.sleep(0.0005)
        self.kill("server")
        self.kills["server at a rotation"] += 1
        self.start("server")

    def files_begun(self) -> set[str]:
        return {path.name for path in (*self.journal.glob("*.arrow"), *self.journal.glob("log/*.jsonl"))}

    def open_twice(self) -> None:
        self.wait_for_answer()
        second = subprocess.run(
            self.command("second"),
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": ROOT},
            timeout=60,
        )
        self.faults["second opener"] += 1
        if second.returncode != REFUSED or "must have one writer" not in second.stderr:
            self.wrong.append(f"a second opener ended with {second.returncode}: {second.stderr[-300:]}")

    def rot_group(self) -> None:
        """Changes a bit of a group that is not trained yet, and will not be for a step or two."""
        events = self.follow((sorted(self.log_files())[-2:][0], 0))[0]
        step = self.last_step()
        waiting = [event for event in events if isinstance(event, e.Accepted) and event.due > step + 1]
        if not waiting:
            return
        event = self.rng.choice(waiting[-3:])
        place = event.offset + self.rng.randrange(event.size)
        flip_bit(self.journal / f"{event.segment:06d}.arrow", place, 0)
        with open(self.folder / "rotten", "a") as record:
            record.write(f"{event.segment} {place} 0\n")
        self.faults["rotten group"] += 1

    def rotten_groups(self) -> list[tuple[int, int]]:
        """(segment, byte) of each bit that was changed in a group."""
        record = self.folder / "rotten"
        lines = record.read_text().splitlines() if record.exists() else []
        return [(int(segment), int(place)) for segment, place, _ in map(str.split, lines)]

    def rot_log(self) -> None:
        """Changes a bit inside the log of a dead server: the next one must refuse, and go on after a
        repair, with a consumer that goes back to its checkpoint, as a run that is resumed does."""
        self.kill("server")
        self.kill("consumer")
        self.kills["server"] += 1
        path = max(self.journal.glob("log/*.jsonl"))
        lines = path.read_bytes().splitlines(keepends=True)
        rotten = self.rotten_groups()
        events = map(e.decode_line, lines)
        # A group whose bytes and whose checksum are both rotten is beyond any repair's knowledge.
        whole = [
            number
            for number, event in enumerate(events)
            if event is not None and not (isinstance(event, e.Accepted) and covers(event, rotten))
        ]
        if len(whole) >= 4 and int(path.stem) >= max(state_numbers(self.journal)):
            victim = self.rng.choice(whole[1:-1])
            place = sum(map(len, lines[:victim])) + self.rng.randrange(len(lines[victim]) - 1)
            flip_bit(path, place, self.rng.randrange(8))
            self.faults["rotten log"] += 1
            self.start("server")
            if self.processes["server"].wait(timeout=60) != REFUSED:
                self.wrong.append(f"a server opened a log with a rotten line at {place} of {path}")
            repair = subprocess.run(
                self.command("repair"),
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": ROOT},
                timeout=60,
            )
            (self.folder / "repair.log").open("a").write(repair.stdout + repair.stderr)
            if repair.returncode:
                self.wrong.append(f"the repair ended with {repair.returncode}: {repair.stderr[-500:]}")
            states = self.folder / "consumer.states"
            with open(self.folder / "repairs", "a") as record:
                record.write(f"{len(states.read_text().splitlines()) if states.exists() else 0}\n")
        self.start("server")
        self.start("consumer")

    def fill_disk(self) -> None:
        """The server must end by itself, with the disk's name, and go on when there is room."""
        self.wait_for_answer()
        (self.folder / "full").touch()
        try:
            ended = self.processes["server"].wait(timeout=20)
            if ended != FULL_DISK:
                self.wrong.append(
                    f"a server whose disk was full ended with {ended}, see {self.folder}/server.log"
                )
        except subprocess.TimeoutExpired:
            self.wrong.append("a server whose disk was full went on")
        (self.folder / "full").unlink()
        self.faults["full disk"] += 1
        self.start("server")

    def stall(self) -> None:
        """Stops a process, now and then for longer than a lease lasts; the others go on, and are killed
        meanwhile."""
        process = self.processes[self.rng.choice(self.names[2:])]
        self.faults["stall"] += 1
        process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(self.rng.uniform(0.1, 1.7 * LEASE_S), process.send_signal, [signal.SIGCONT])
        timer.daemon = True
        timer.start()

    def tear(self) -> None:
        """Leaves behind what a write that was cut short leaves: after the last acknowledged bytes a part
        of a real line or record batch, or garbage."""
        self.faults["torn tail"] += 1
        newest = [*sorted(self.journal.glob("log/*.jsonl"))[-1:], *sorted(self.journal.glob("*.arrow"))[-1:]]
        for path in newest:
            if self.rng.random() < 0.7 and not (path.suffix == ".arrow" and is_closed(path)):
                with open(path, "r+b") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - 3000))
                    part = file.read()
                    if path.suffix == ".jsonl" and part:
                        part = part.splitlines(keepends=True)[-1]
                    cut = part[: self.rng.randrange(1, len(part))] if len(part) > 1 else b"x"
                    file.seek(0, os.SEEK_END)
                    file.write(
                        cut if self.rng.random() < 0.5 else self.rng.randbytes(self.rng.randint(1, 3000))
                    )

    def kill(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None:
            process.kill()
            process.wait()

    def notice_the_dead(self) -> None:
        """A process that has ended without being killed is a fault; it is started again all the same."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.wrong.append(
                    f"{name} ended by itself with {process.returncode}, see {self.folder}/{name}.log"
                )
                self.start(name)

    # ---- what the log says meanwhile

    def last_step(self) -> int:
        """Steps trained, from the newest files of the log."""
        files = sorted(self.log_files())
        events = self.follow((files[-3:][0], 0))[0] if files else []
        return max((event.step + 1 for event in events if isinstance(event, e.Trained)), default=0)

    def log_files(self) -> dict[int, Path]:
        """Every file of the log that there has been, by number."""
        places = (self.folder / "discarded/log", self.journal / "log")
        return {int(path.stem): path for place in places for path in place.glob("*.jsonl")}

    def follow(self, place: Place) -> tuple[list[e.AnyEvent], Place]:
        """What has been written to the log since this place, and the place behind it."""
        events: list[e.AnyEvent] = []
        for number, path in sorted(self.log_files().items()):
            if number < place[0]:
                continue
            try:
                with open(path, "rb") as file:
                    file.seek(place[1] if number == place[0] else 0)
                    for line in file:
                        if (event := e.decode_line(line)) is not None:
                            events.append(event)
                    place = (number, file.tell())
            except FileNotFoundError:  # discarded a moment ago
                continue
        return events, place

    def wait_for_answer(self, timeout_s: float = 60.0) -> None:
        """Until the server answers."""
        client = BufferClient(self.config.buffer.address, timeout_s=timeout_s)
        client.call(m.LocateJournal(), m.JournalLocation)
        client.close()

    def wait_for(self, killed: str | None, awaited: dict[str, "Seen"], timeout_s: float = 60.0) -> None:
        """Until each of these has been seen in the log, and the server answers; notes how long that took."""
        began = time.monotonic()
        _, place = self.follow((max(self.log_files(), default=0), 0))
        if killed == "server":
            self.wait_for_answer(timeout_s)
            self.recovery_s["server killed, to its first answer"].append(time.monotonic() - began)
        left, events = dict(awaited), list[e.AnyEvent]()
        while left:
            more, place = self.follow(place)
            events += more
            for name, seen in list(left.items()):
                if any(map(seen, events)):
                    del left[name]
                    if killed:
                        self.recovery_s[f"{killed} killed, to the next {name}"].append(
                            time.monotonic() - began
                        )
            if time.monotonic() - began > timeout_s:
                self.notice_the_dead()
                raise RuntimeError(
                    f"no {' or '.join(left)} in {timeout_s} s; {self.wrong or 'all are alive'}; see the logs"
                    f" in {self.folder}"
                )
            time.sleep(0.02)


Seen = Callable[[e.AnyEvent], bool]


def covers(event: e.Accepted, places: list[tuple[int, int]]) -> bool:
    """True when the group's bytes have one of these places."""
    return any(
        segment == event.segment and event.offset <= place < event.offset + event.size
        for segment, place in places
    )


def flip_bit(path: Path, place: int, bit: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def is_trained(event: e.AnyEvent) -> bool:
    return isinstance(event, e.Trained)


def is_accepted(event: e.AnyEvent) -> bool:
    return isinstance(event, e.Accepted)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- the report


def report(harness: Harness, found: Audit, console: Console) -> None:
    table = Table(title=f"chaos, on_late={harness.on_late}", title_justify="left", show_header=False)
    table.add_row(
        "kills (SIGKILL)",
        f"{harness.kills.total()}: " + ", ".join(f"{n} {who}" for who, n in harness.kills.items()),
    )
    table.add_row(
        "other faults", ", ".join(f"{number} × {fault}" for fault, number in harness.faults.items())
    )
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


ROOT = str(Path(__file__).parents[2])
PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--producers", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where to work, and what to keep (default: a temporary folder)"
    )
    parser.add_argument(
        "--on-late", choices=[*OnLate, "all"], default="wait", help="`all`: the kills are divided among them"
    )
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=int, default=LONG_LOG, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be is not None:
        return play_role(options)
    console, say = Console(), Console(stderr=True)
    modes = list(OnLate) if options.on_late == "all" else [options.on_late]
    wrong = 0
    for mode in modes:
        folder = (
            options.folder / mode if options.folder else Path(tempfile.mkdtemp(prefix="slipstream-chaos-"))
        )
        harness = Harness(folder, options.seed, options.producers, str(mode))
        harness.run(-(-options.kills // len(modes)), lambda text: say.print(text))
        found = audit(folder, harness.config, train, harness.status)
        found.wrong += harness.wrong
        report(harness, found, console)
        wrong += len(found.wrong)
        if options.folder is None and not found.wrong:
            shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
