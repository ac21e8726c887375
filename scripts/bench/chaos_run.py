"""Disturbs whole runs at random, then audits what is left: real roles, a network, a journal and a learner.

    scripts/chaos.sh --run [--faults 300] [--minutes M] [--seed 0] [--fleets 2] [--folder DIR] [--alone]
                           [--only TEXT]

The hosts of a run are namespaces of this machine (`slipstream_bench/network_hosts.py`, needs root):
driver, buffer and learner on the first, a fleet of generators on each other. The learner trains the tiny
model; the generators sample from it (`slipstream_bench/small_engine.py`). Each host gets one fault after the
other, drawn by the seed (`slipstream_bench/run_faults.py`), while the others get theirs; `--alone`: one fault
at a time. A recovery lasts from a death, or from the end of a disturbance, until a group that was leased
afterwards, to a generator of the host, is accepted, and a step is trained after that. Settings that matter
(`SETTINGS`) differ from run to run; so many runs as a setting has values have tried all of them.

The audit: nothing that the buffer acknowledged to a generator is lost (with `buffer.durability=none` that is
not promised), no group is trained twice, no token beyond the staleness bound, the ledger closes and is that
of the log, no process and no shared memory is left, no command ended by itself or printed a traceback, no log
has the lines of a busy loop, each fault was seen to be done, and `scripts/replay.sh` trains the journal to
the bits of the run's checkpoints, up to its last step.
The exit status is 1 when any of this does not hold.

After SIGTERM, Ctrl-C or the minutes given, no fault is begun: the run gets over those under way, ends, and is
audited. A second signal ends everything at once.
"""

import argparse
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from configs.buffer import Durability
from configs.load import load_study_config
from slipstream_bench.audit import AuditReport, audit_whole_run
from slipstream_bench.host_clocks import find_compiler
from slipstream_bench.network_hosts import NetworkHosts, find_obstacle
from slipstream_bench.noise import find_noise
from slipstream_bench.run_faults import (
    FAULTS_OF_FLEET,
    FAULTS_OF_RUN,
    NEED_COMPILER,
    FaultMethod,
    FaultNotDone,
    HostFaults,
)
from slipstream_bench.run_on_hosts import PATIENCE_S, ChaosFailure, HarnessStopped, RunOnHosts, tail

FAULTS_A_RUN = 75
SAME = "bit for bit the same as the run"
AGENT = "slipstream_bench.chaos_agent:SummingAgent"


@dataclass(frozen=True)
class BorneFault:
    """A fault that the run has got over."""

    kind: str
    host: str
    run: int
    at_s: float
    """Seconds from the start of the run's faults to the end of the recovery."""
    recovery_s: float


@dataclass(frozen=True)
class RunSettings:
    """Settings that differ from run to run."""

    overrides: list[str]
    of_fleet: list[str]
    """Overrides of each fleet."""
    lease_s: float


class Ending:
    """Says when no further fault is to begin: at a signal, or when the time is over."""

    def __init__(self, minutes: float | None = None) -> None:
        self._deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.is_signalled = False

    def note_signal(self, *_: object) -> None:
        """Handles a signal. Raises KeyboardInterrupt at the second one."""
        if self.is_signalled:
            raise KeyboardInterrupt
        self.is_signalled = True

    def has_come(self) -> bool:
        return self.is_signalled or time.monotonic() > self._deadline


@dataclass
class ChaosOfRun:
    """The faults of one run, from its start to its audit."""

    folder: Path
    number: int
    seed: int
    num_faults: int
    num_fleets: int
    kinds_of_run: dict[str, FaultMethod]
    kinds_of_fleet: dict[str, FaultMethod]
    alone: bool
    say: Callable[[str], None]
    ending: Ending = field(default_factory=Ending)
    recoveries: list[BorneFault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    figures: dict[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = draw_settings(self.seed, self.number)
        self._has_finished = False
        self._left, self._lock = self.num_faults, threading.Lock()
        self._turn = threading.Lock() if self.alone else nullcontext()

    def disturb_and_audit(self) -> None:
        with NetworkHosts(1 + self.num_fleets) as hosts:
            run = RunOnHosts(
                self.folder, hosts, self.settings.overrides, self.settings.of_fleet, self.problems
            )
            try:
                run.start()
                self._began = time.monotonic()
                self._disturb_hosts(run)
                if not run.stopped:
                    run.await_work_everywhere()
                    run.finish()
                    self._has_finished = True
            except ChaosFailure as failure:
                self.problems.append(str(failure))
            finally:
                run.stopped = True
                run.keep_folder()
                self.figures |= run.list_figures()
        self.problems += find_noise(self.folder.glob("*.txt"), self.folder.glob("kept*/**/*.log"))
        self._audit()

    def _disturb_hosts(self, run: RunOnHosts) -> None:
        """Disturbs every host in a thread of its own, until there were enough faults or one was too much."""
        threads = []
        for host in run.hosts:
            kinds = self.kinds_of_run if host is run.first else self.kinds_of_fleet
            if kinds:
                rng = random.Random(f"{self.seed} {self.number} {host.name}")
                faults = HostFaults(run, host, self.settings.lease_s, rng)
                threads.append(threading.Thread(target=self._disturb_host, args=(faults, kinds)))
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except KeyboardInterrupt:
            run.stopped = True
            for thread in threads:
                thread.join()
            raise

    def _disturb_host(self, faults: HostFaults, kinds: dict[str, FaultMethod]) -> None:
        deck: list[str] = []
        while self._take_fault():
            if not deck:
                deck = faults.random.sample(sorted(kinds), len(kinds))
            kind = deck.pop()
            try:
                with self._turn, faults.run.disturb(faults.host):
                    self._recover(faults, kind, kinds[kind])
            except HarnessStopped:
                return
            except Exception as error:
                self.problems.append(f"{kind} ({faults.host.name}): {type(error).__name__}: {error}")
                faults.run.stopped = True
                return

    def _recover(self, faults: HostFaults, kind: str, method: FaultMethod) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            faults.run.tend(faults.host)
            try:
                began = faults.disturb(method)
                break
            except psutil.NoSuchProcess as error:  # the process had just ended
                if time.monotonic() > deadline:
                    raise FaultNotDone("whatever is to be disturbed ends before") from error
        faults.run.await_work(faults.host, faults.victim)
        now = time.monotonic()
        with self._lock:
            self.recoveries.append(
                BorneFault(kind, faults.host.name, self.number, now - self._began, now - began)
            )
            done = len(self.recoveries)
        self.say(
            f"run {self.number}, fault {done} of {self.num_faults}, {faults.host.name}: {kind}; back after "
            f"{now - began:.1f} s, at step {faults.run.count_steps()}"
        )

    def _take_fault(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0 and not self.ending.has_come()

    # ---- the audit

    def _audit(self) -> None:
        if len(self.recoveries) < self.num_faults and not self.problems and not self.ending.has_come():
            self.problems.append(f"{len(self.recoveries)} of {self.num_faults} faults were done")
        run = self.folder / "kept" / "run"
        if not (run / "summary.json").exists():
            self.problems.append(f"the run has left no summary in {run}")
            return
        summary = json.loads((run / "summary.json").read_text())
        found: AuditReport = audit_whole_run(run, self.folder, load_study_config(run, []), summary)
        self.problems += found.problems
        self.figures |= found.figures
        # A run that was ended in good order ends with a checkpoint.
        self._replay(run, last=int(found.figures["steps trained"]) if self._has_finished else None)

    def _replay(self, run: Path, last: int | None) -> None:
        """Trains the journal again. The checkpoints that are compared must go up to the `last` step."""
        began = time.monotonic()
        command = [sys.executable, "-P", "-m", "slipstream.replay", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        same = find_sameness(done.stdout, last)
        if done.returncode or not same:
            upto = "" if last is None else f" up to step {last}"
            self.problems.append(f"the replay is not the run{upto}: {tail(done.stdout + done.stderr)}")
        self.figures["replayed"] = f"{same or 'no'} ({time.monotonic() - began:.0f} s)"


def find_sameness(said: str, last: int | None) -> str:
    """Returns the line in which a replay says that it is the run, up to the `last` step where one is given;
    empty where it says less."""
    same = (line for line in said.splitlines() if SAME in line)
    return next((line for line in same if last is None or line.split()[-1] == str(last)), "")


SETTINGS: dict[str, list[list[str]]] = {
    "staleness bound": [[f"staleness.max_versions={bound}"] for bound in (0, 1, 2, 4)],
    "late groups": [
        ["staleness.on_late=wait"],
        ["staleness.on_late=mask"],
        ["staleness.on_late=cancel", "staleness.straggler_timeout_s=15"],
    ],
    "durability": [[f"buffer.durability={durability}"] for durability in Durability],
    "lease": [[f"buffer.lease_s={seconds}"] for seconds in (4, 7, 12)],
    "checkpoints": [[f"learner.checkpoint_every={steps}"] for steps in (2, 5, 10)],
    "groups": [[f"learner.groups_per_step={groups}"] for groups in (2, 4)],
    "samples": [[f"learner.samples_per_prompt={samples}"] for samples in (2, 4)],
    "ranks": [[f"learner.ranks={ranks}"] for ranks in (1, 2)],
    "evaluation": [["eval.prompts=0"], ["eval.prompts=4", "eval.every=3"]],
    "task": [["task.name=sorting"], [f"task.name={AGENT}"]],
}
"""Settings that differ from run to run, each with its values."""
SETTINGS_OF_FLEETS: dict[str, list[list[str]]] = {
    "generators": [[f"generators.count={count}"] for count in (1, 2)],
    "leaving": [[f"generators.grace_s={seconds}"] for seconds in (0, 5, 20)],
}


def draw_settings(seed: int, number: int) -> RunSettings:
    """Returns the settings of a run: of each one the next value, in an order that the seed draws."""

    def draw_from(settings: dict[str, list[list[str]]]) -> list[str]:
        overrides = []
        for name, values in settings.items():
            order = random.Random(f"{seed} {name}").sample(values, len(values))
            overrides += order[number % len(values)]
        return overrides

    overrides = draw_from(SETTINGS)
    (lease_s,) = (one.partition("=")[2] for one in overrides if one.startswith("buffer.lease_s="))
    return RunSettings(overrides, draw_from(SETTINGS_OF_FLEETS), float(lease_s))


# ---- the report


def print_audit(run: ChaosOfRun, console: Console) -> None:
    say_line = partial(console.print, highlight=False, soft_wrap=True)
    say_line(f"run {run.number}: {' '.join(run.settings.overrides + run.settings.of_fleet)}")
    for name, value in run.figures.items():
        say_line(f"  {name}: {value}")
    for text in run.problems:
        say_line(f"  wrong: {text}", markup=False)


def print_recoveries(runs: list[ChaosOfRun], console: Console) -> None:
    if not runs:
        console.print("no run was audited")
        return
    recoveries = [one for run in runs for one in run.recoveries]
    table = Table(title=f"{len(recoveries)} faults in {len(runs)} runs", title_justify="left")
    for title in ("fault", "times", "median s", "worst s"):
        table.add_column(title, justify="left" if title == "fault" else "right")
    for kind in sorted({one.kind for one in recoveries}):
        seconds = [one.recovery_s for one in recoveries if one.kind == kind]
        table.add_row(kind, str(len(seconds)), f"{median(seconds):.1f}", f"{max(seconds):.1f}")
    console.print(table)
    wrong = sum(len(run.problems) for run in runs)
    console.print(f"[red]{wrong} things are wrong[/]" if wrong else "everything adds up")


def write_json(runs: list[ChaosOfRun], seed: int, path: Path) -> None:
    told = [
        {
            "settings": run.settings.overrides + run.settings.of_fleet,
            "faults": [asdict(one) for one in run.recoveries],
            "figures": run.figures,
            "problems": run.problems,
        }
        for run in runs
    ]
    path.write_text(json.dumps({"seed": seed, "runs": told}, indent=1))


def choose_kinds(kinds: dict[str, FaultMethod], only: str) -> dict[str, FaultMethod]:
    """Returns the faults whose name holds `only`. Some cannot be done without a compiler."""
    return {
        name: method
        for name, method in kinds.items()
        if only in name and (find_compiler() is not None or method not in NEED_COMPILER)
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos.sh --run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=300, help="over all runs (default: 300)")
    parser.add_argument("--minutes", type=float, help="begin no fault after so many (default: no limit)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleets", type=int, default=2, help="hosts with a fleet (default: 2)")
    parser.add_argument("--folder", type=Path, help="new folder, which is kept (default: a temporary one)")
    parser.add_argument("--alone", action="store_true", help="one fault at a time, on whichever host")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name holds this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all that is known of each fault")
    options = parser.parse_args()
    console, say_line = Console(), partial(Console(stderr=True).print, highlight=False, soft_wrap=True)
    of_run, of_fleet = (choose_kinds(kinds, options.only) for kinds in (FAULTS_OF_RUN, FAULTS_OF_FLEET))
    if obstacle := find_obstacle():
        parser.error(obstacle)
    if not of_run and not of_fleet:
        names = ", ".join([*FAULTS_OF_RUN, *FAULTS_OF_FLEET])
        parser.error(f"--only must be part of a fault's name ({names}), got {options.only!r}")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="slipstream-chaos-"))
    num_runs = -(-options.faults // FAULTS_A_RUN)
    runs: list[ChaosOfRun] = []
    ending = Ending(options.minutes)
    for told in (signal.SIGINT, signal.SIGTERM):  # a shell starts what is in the background without SIGINT
        signal.signal(told, ending.note_signal)
    try:
        for number in range(num_runs):
            if ending.has_come():
                break
            count = options.faults // num_runs + (number < options.faults % num_runs)
            place = folder / f"run-{number}"
            kinds = (of_run, of_fleet)
            runs.append(
                ChaosOfRun(
                    place, number, options.seed, count, options.fleets, *kinds, options.alone, say_line,
                    ending,
                )
            )  # fmt: skip
            runs[-1].disturb_and_audit()
            print_audit(runs[-1], console)
    except KeyboardInterrupt:
        say_line("interrupted again: the run under way does not count")
        runs = runs[:-1]
    if sum(len(run.recoveries) for run in runs) < options.faults and ending.has_come():
        say_line(f"no fault was begun after {'a signal' if ending.is_signalled else 'the minutes given'}")
    print_recoveries(runs, console)
    if options.json is not None:
        write_json(runs, options.seed, options.json)
    wrong = any(run.problems for run in runs)
    if options.folder is None and not wrong:
        shutil.rmtree(folder)
    elif wrong:
        console.print(f"see {folder}", highlight=False)
    return 1 if wrong else 130 if ending.is_signalled else 0


if __name__ == "__main__":
    sys.exit(main())
