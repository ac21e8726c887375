"""Whole runs, as a user starts them: real processes through `scripts/launch.sh`.

Times here are patience: they are long enough for a machine that does five other things. A test that waits for
less says why.
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import xxhash

from slipstream import newborn
from slipstream_bench.audit import find_open_accounts

ROOT = Path(__file__).parents[1]
SIMULATED = [
    "generators.engine=simulated",
    "generators.count=1",
    "generators.max_sequences=32",
    "generators.max_model_len=1000",
    "generators.simulated.mean_tokens=20",
    "generators.simulated.train_tokens_per_s=2000",
    "learner.engine=simulated",
    "learner.groups_per_step=4",
    "learner.samples_per_prompt=4",
    "sampling.max_tokens=200",
    "eval.prompts=0",
]


def is_alive(process: psutil.Process) -> bool:
    """True for a process that has not ended. One that ends while it is looked at has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class StartedRun:
    """A run under way, with its processes and its folder."""

    def __init__(self, outputs: Path, *overrides: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder = outputs / "run"
        named = [] if any(o.startswith("run.resume") for o in overrides) else ["run.name=run"]
        command = ["scripts/launch.sh", f"run.outputs={outputs}", *named, *overrides]
        self.hosts_the_run = "role=generators" not in overrides
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.seen: set[psutil.Process] = set()

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        # Workers are children of the nursery, which may belong to another process than the run.
        for process in list(self.seen):
            with contextlib.suppress(psutil.NoSuchProcess):
                if (name := process.name()).startswith(newborn.NAMED):
                    self.seen.add(psutil.Process(int(name.removeprefix(newborn.NAMED))))
        return [process for process in self.seen if is_alive(process)]

    def wait_for(self, holds: Callable[[], bool], what: str, timeout_s: float = 300) -> None:
        deadline, looks = time.monotonic() + timeout_s, itertools.count()
        while not holds():
            # Looking for descendants takes as long as a role's step, so it does so seldom.
            if next(looks) % 10 == 0:
                self.descendants()
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.process.stdout.read()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
            time.sleep(0.1)

    def steps(self) -> int:
        path = self.folder / "summary.json"
        return int(json.loads(path.read_text())["steps"]) if path.exists() else 0

    def finish(self, timeout_s: float = 300) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out

    def roles(self, name: str) -> list[psutil.Process]:
        """Returns the processes of one role, named by its class."""
        found = []
        for process in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                if f"ray::{name}" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def lose_a_rank(self, rank: int) -> None:
        """Kills the process that writes this rank's log, while it trains."""
        process = self.find_process("LearnerRole", f"learner-{rank}")
        assert process is not None
        process.kill()

    def lose_buffer(self) -> None:
        """Kills the process of the buffer, as soon as there is one."""
        self.wait_for(lambda: self.find_process("BufferRole", "buffer") is not None, "process of the buffer")
        process = self.find_process("BufferRole", "buffer")
        assert process is not None
        process.kill()
        process.wait(60)

    def find_process(self, role: str, name: str) -> psutil.Process | None:
        """Returns the process of this class of role that writes this log; None while there is none."""
        log = str(self.folder / "logs" / f"{name}.log")
        for process in self.roles(role):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/fd/1") == log:
                    return process
        return None

    def rewinds(self) -> list[int]:
        """Returns the steps that the buffer has gone back to."""
        log = (self.folder / "logs" / "buffer.log").read_text()
        return [int(step) for step in re.findall(r"rewound to step (\d+)", log)]

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def assert_nothing_left(self, within_s: float = 60) -> None:
        deadline = time.monotonic() + within_s
        while left := self.descendants():
            assert time.monotonic() < deadline, f"still alive: {[' '.join(p.cmdline())[:80] for p in left]}"
            time.sleep(0.1)
        if self.hosts_the_run:
            digest = xxhash.xxh32_hexdigest(str(self.folder.resolve()).encode())
            while left_in_memory := list(Path("/dev/shm").glob(f"*{digest}*")):
                assert time.monotonic() < deadline, f"nothing stays in shared memory either: {left_in_memory}"
                time.sleep(0.1)

    def kill(self) -> None:
        for process in [*self.descendants(), psutil.Process(self.process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def assert_accounts_close(summary: dict) -> None:
    assert not find_open_accounts(summary)
