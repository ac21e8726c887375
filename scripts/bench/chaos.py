"""Kills the processes of the data path at random moments, then audits what is left: no Ray, no model.

    scripts/chaos.sh [--kills 200] [--seed 0] [--producers 3] [--on-late wait|mask|cancel|all] [--folder DIR]

The processes are real: one buffer server, producers that make groups of random length, a generator whose
episodes wait for tools (its engine is simulated), and a consumer that "trains" (it hashes every byte that the
buffer hands out), writes checkpoints and rewinds to them. The harness starts each process that dies again at
once. At the end no process of an environment may be left. The faults:

    kill            SIGKILL to the server, the consumer, a producer or the generator, at a random moment
    kill, rotation  to the server, just when a new segment or log file has appeared
    kill, recovery  to the server, again and again while it recovers a log of 60,000 lines
    stall           SIGSTOP to a producer, sometimes for longer than a lease lasts
    torn tail       a part of a real line or record batch, or garbage, behind the files of a killed server
    second opener   another server starts on the journal of a living one
    corrupt group   a bit changes in a group that waits to be trained
    corrupt log     a bit changes inside the log of a killed server; `slipstream.repair` mends the log
    full disk       the server's disk becomes full in the middle of a write

The buffer keeps only the files that its checkpoints need (`buffer.retention=checkpoints`); the harness moves
the files that it discards aside, for the audit. At the end the audit compares the journal, its log and the
records of producers and consumer. The exit status is 1 when they contradict each other.
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
from slipstream_bench.audit import AuditReport, audit_run
from slipstream_bench.chaos_log import ChaosLog, EventTest, flip_bit, holds_any_byte, is_accepted, is_trained
from slipstream_bench.chaos_roles import (
    FULL_DISK,
    LEASE_S,
    LONG_LOG,
    REFUSED,
    hash_training_step,
    make_config,
    play_role,
)
from slipstream_bench.leftovers import FOLDER_MARK, list_workers

PLAYER = "player"
"""Name of the process that plays episodes."""

# ---- the harness


@dataclass
class ChaosHarness:
    """Starts the processes of one run in `folder`, kills and disturbs them, and notes what it did and saw."""

    folder: Path
    seed: int
    num_producers: int = 3
    on_late: str = "wait"
    kills: Counter[str] = field(default_factory=Counter)
    """Number of kills, by what was killed."""
    faults: Counter[str] = field(default_factory=Counter)
    """Number of faults of each kind that kills no process."""
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds from a kill to a sign of life, by what was killed and what the sign was."""
    problems: list[str] = field(default_factory=list)
    """Everything that went wrong during the run, in words."""
    status: RunStatus | None = None
    """The server's last answer about itself, when all other processes had ended."""
    long_log: int = LONG_LOG
    """Number of lines of the log that the server recovers first."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config = make_config(self.folder, self.seed, self.on_late)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.journal, self.log = self.folder / "journal", ChaosLog(self.folder)

    @property
    def process_names(self) -> list[str]:
        producers = [f"producer-{number}" for number in range(self.num_producers)]
        return ["server", "consumer", PLAYER, *producers]

    def start_process(self, name: str) -> None:
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115
        self.processes[name] = subprocess.Popen(
            self.make_command(name),
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": ROOT, FOLDER_MARK: str(self.folder)},
            preexec_fn=die_with_parent,
        )
        log.close()

    def make_command(self, name: str) -> list[str]:
        own = ["--folder", str(self.folder), "--seed", str(self.seed), "--on-late", self.on_late]
        return [sys.executable, __file__, "--be", name, *own]

    def run(self, num_kills: int, say: Callable[[str], None] = lambda text: None) -> None:
        """Strikes until `num_kills` processes were killed, then lets the run settle and stops the server
        properly.

        `say` receives a line of progress now and then.
        """
        strikes = [self.kill_somebody] * 20 + [self.stall_producer] * 4 + [self.kill_at_rotation] * 2
        strikes += [self.open_journal_twice, self.corrupt_group, self.corrupt_log, self.fill_disk]
        try:
            self.kill_during_recovery()
            for name in self.process_names:
                self.start_process(name)
            self.wait_for_events(None, {"step trained": is_trained})
            # Each kind of strike comes at least once.
            for strike in dict.fromkeys(strikes):
                strike()
                self.restart_dead_processes()
            while self.kills.total() < num_kills:
                time.sleep(self.rng.expovariate(1 / 0.25))
                self.rng.choice(strikes)()
                self.restart_dead_processes()
                if self.kills.total() % 20 == 0:
                    step = self.log.count_trained_steps()
                    say(f"{self.on_late}: {self.kills.total()} of {num_kills} kills, step {step}")
            self.wait_for_events(None, {"step trained": is_trained})
            self.restart_dead_processes()
            for name in self.process_names[1:]:
                self.kill_process(name)
            # All leases expire, so that nothing is under way when the server tells its status.
            time.sleep(1.5 * LEASE_S)
            client = BufferClient(self.config.buffer.address)
            self.status = client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status
            client.close()
        finally:
            for name in self.process_names[1:]:
                self.kill_process(name)
            server = self.processes.get("server")
            if server is not None:
                server.terminate()
                server.wait(timeout=20)
            self.await_end_of_workers()

    def await_end_of_workers(self) -> None:
        """Waits until no process of an environment is left, and notes those that stay."""
        deadline = time.monotonic() + 20
        while (left := list_workers(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            self.problems.append(f"{len(left)} processes of environments outlive their generator: {left}")

    # ---- faults

    def kill_during_recovery(self) -> None:
        """Writes a long log, and kills the server five times while it recovers that log."""
        subprocess.run(
            [*self.make_command("long"), "--lines", str(self.long_log)],
            check=True,
            env={**os.environ, "PYTHONPATH": ROOT},
        )
        for _ in range(5):
            self.start_process("server")
            time.sleep(self.rng.uniform(0.3, 2.5))
            self.kill_process("server")
            self.kills["server while it recovers"] += 1

    def kill_somebody(self) -> None:
        """Kills a random process and starts it again; in some cases waits until it does its work again."""
        name = self.rng.choice([*self.process_names, "server", "consumer"])
        who = name.partition("-")[0]
        self.kills[who] += 1
        self.kill_process(name)
        if name == "server" and self.rng.random() < 0.5:
            self.tear_tails()
        self.start_process(name)
        if self.rng.random() < 0.3:
            awaited: dict[str, dict[str, EventTest]] = {
                "server": {"group accepted": is_accepted, "step trained": is_trained},
                "consumer": {"step trained": is_trained},
                PLAYER: {
                    "lease taken": lambda event: isinstance(event, e.Leased) and event.generator == name
                },
                "producer": {
                    "lease taken": lambda event: isinstance(event, e.Leased) and event.generator == name
                },
            }
            self.wait_for_events(who, awaited[who])

    def kill_at_rotation(self) -> None:
        """Kills the server just after it began a segment or a file of the log."""
        before, deadline = self.log.list_begun_files(), time.monotonic() + 5.0
        while self.log.list_begun_files() <= before and time.monotonic() < deadline:
            time.sleep(0.0005)
        self.kill_process("server")
        self.kills["server at a rotation"] += 1
        self.start_process("server")

    def open_journal_twice(self) -> None:
        """Starts a second server on the journal of the living one: it must refuse."""
        self.wait_for_answer()
        second = subprocess.run(
            self.make_command("second"),
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": ROOT},
            timeout=60,
        )
        self.faults["second opener"] += 1
        if second.returncode != REFUSED or "must have one writer" not in second.stderr:
            self.problems.append(f"a second opener ended with {second.returncode}: {second.stderr[-300:]}")

    def corrupt_group(self) -> None:
        """Flips a bit of a group that will not be trained in the next step or two."""
        events = self.log.read_since((sorted(self.log.find_files())[-2:][0], 0))[0]
        step = self.log.count_trained_steps()
        waiting = [event for event in events if isinstance(event, e.Accepted) and event.due > step + 1]
        if not waiting:
            return
        event = self.rng.choice(waiting[-3:])
        place = event.offset + self.rng.randrange(event.size)
        flip_bit(self.journal / f"{event.segment:06d}.arrow", place, 0)
        with open(self.folder / "flipped_bits", "a") as record:
            record.write(f"{event.segment} {place} 0\n")
        self.faults["corrupt group"] += 1

    def read_corrupted_places(self) -> list[tuple[int, int]]:
        """Returns (segment, byte offset) of each bit that was flipped in a group."""
        record = self.folder / "flipped_bits"
        lines = record.read_text().splitlines() if record.exists() else []
        return [(int(segment), int(place)) for segment, place, _ in map(str.split, lines)]

    def corrupt_log(self) -> None:
        """Flips a bit inside the log of a killed server.

        The next server must refuse the log, and must go on after a repair. The consumer starts anew too,
        because it has to rewind to a checkpoint, as it does in a run that is resumed.
        """
        self.kill_process("server")
        self.kill_process("consumer")
        self.kills["server"] += 1
        path = max(self.journal.glob("log/*.jsonl"))
        lines = path.read_bytes().splitlines(keepends=True)
        corrupted = self.read_corrupted_places()
        events = map(e.decode_line, lines)
        # Leave out the lines of corrupt groups: no repair can mend a group whose bytes and checksum are both
        # wrong.
        whole = [
            number
            for number, event in enumerate(events)
            if event is not None and not (isinstance(event, e.Accepted) and holds_any_byte(event, corrupted))
        ]
        if len(whole) >= 4 and int(path.stem) >= max(state_numbers(self.journal)):
            victim = self.rng.choice(whole[1:-1])
            place = sum(map(len, lines[:victim])) + self.rng.randrange(len(lines[victim]) - 1)
            flip_bit(path, place, self.rng.randrange(8))
            self.faults["corrupt log"] += 1
            self.start_process("server")
            if self.processes["server"].wait(timeout=60) != REFUSED:
                self.problems.append(f"a server opened a log whose line at byte {place} of {path} is corrupt")
            repair = subprocess.run(
                self.make_command("repair"),
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": ROOT},
                timeout=60,
            )
            (self.folder / "repair.log").open("a").write(repair.stdout + repair.stderr)
            if repair.returncode:
                self.problems.append(f"the repair ended with {repair.returncode}: {repair.stderr[-500:]}")
            states = self.folder / "consumer.states"
            with open(self.folder / "repairs", "a") as record:
                record.write(f"{len(states.read_text().splitlines()) if states.exists() else 0}\n")
        self.start_process("server")
        self.start_process("consumer")

    def fill_disk(self) -> None:
        """Fills the disk: the server must end by itself, and must go on once there is room again."""
        self.wait_for_answer()
        (self.folder / "full").touch()
        try:
            ended = self.processes["server"].wait(timeout=20)
            if ended != FULL_DISK:
                self.problems.append(
                    f"a server with a full disk ended with status {ended}, see {self.folder}/server.log"
                )
        except subprocess.TimeoutExpired:
            self.problems.append("a server with a full disk went on")
        (self.folder / "full").unlink()
        self.faults["full disk"] += 1
        self.start_process("server")

    def stall_producer(self) -> None:
        """Stops a producer for a random time, sometimes for longer than a lease lasts.

        The other processes go on, and are killed meanwhile.
        """
        process = self.processes[self.rng.choice(self.process_names[2:])]
        self.faults["stall"] += 1
        process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(self.rng.uniform(0.1, 1.7 * LEASE_S), process.send_signal, [signal.SIGCONT])
        timer.daemon = True
        timer.start()

    def tear_tails(self) -> None:
        """Appends a part of a real line or record batch, or garbage, to the newest files of a killed server.

        A write that was cut short leaves such bytes after the last acknowledged ones.
        """
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

    def kill_process(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None:
            process.kill()
            process.wait()

    def restart_dead_processes(self) -> None:
        """Notes each process that ended without being killed as a problem, and starts it again."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.problems.append(
                    f"{name} ended by itself with status {process.returncode}, see {self.folder}/{name}.log"
                )
                self.start_process(name)

    def wait_for_answer(self, timeout_s: float = 180.0) -> None:
        """Waits until the server answers a request."""
        client = BufferClient(self.config.buffer.address, timeout_s=timeout_s)
        client.call(m.LocateJournal(), m.JournalLocation)
        client.close()

    def wait_for_events(
        self, killed: str | None, awaited: dict[str, EventTest], timeout_s: float = 180.0
    ) -> None:
        """Waits until the log received an event of each awaited kind; notes how long that took after a kill.

        `killed` is the kind of process that was just killed, or None. After a kill of the server, it must
        also answer a request.
        """
        began = time.monotonic()
        _, place = self.log.read_since((max(self.log.find_files(), default=0), 0))
        if killed == "server":
            self.wait_for_answer(timeout_s)
            self.recovery_s["server killed, to its first answer"].append(time.monotonic() - began)
        left, events = dict(awaited), list[e.AnyEvent]()
        while left:
            more, place = self.log.read_since(place)
            events += more
            for name, is_awaited in list(left.items()):
                if any(map(is_awaited, events)):
                    del left[name]
                    if killed:
                        self.recovery_s[f"{killed} killed, to the next {name}"].append(
                            time.monotonic() - began
                        )
            if time.monotonic() - began > timeout_s:
                self.restart_dead_processes()
                raise RuntimeError(
                    f"no {' or '.join(left)} within {timeout_s} s; {self.problems or 'all processes live'};"
                    f" see the logs in {self.folder}"
                )
            time.sleep(0.02)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- the report


def print_report(harness: ChaosHarness, found: AuditReport, console: Console) -> None:
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
    for text in found.problems[:20]:
        console.print(f"[red]wrong:[/] {text}")
    console.print(
        "everything adds up" if not found.problems else f"[red]{len(found.problems)} things are wrong[/]"
    )


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
        "--folder",
        type=Path,
        help="folder of the journal and the logs, which is kept (default: a temporary folder)",
    )
    parser.add_argument(
        "--on-late", choices=[*OnLate, "all"], default="wait", help="`all` divides the kills among the three"
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
        harness = ChaosHarness(folder, options.seed, options.producers, str(mode))
        harness.run(-(-options.kills // len(modes)), lambda text: say.print(text))
        found = audit_run(folder, harness.config, hash_training_step, harness.status)
        found.problems += harness.problems
        print_report(harness, found, console)
        wrong += len(found.problems)
        if options.folder is None and not found.problems:
            shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
