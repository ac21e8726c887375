"""A run's folder whose trackers are given records, without a run."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from configs.load import load_config, to_yaml
from slipstream.tracking.trackers import Trackers

PATIENCE_S = 120.0


class TrackedFolder:
    """A run's folder whose trackers are given records."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder, self.said = folder, list[str]()
        self.file = folder.parent / "calls.jsonl"
        folder.mkdir(exist_ok=True)
        self.config = load_config(
            [
                f"run.outputs={folder.parent}",
                "run.name=run",
                "run.steps=7",
                "tracking.timeout_s=30",
                *overrides,
            ]
        )

    def start(self, first_step: int = 0) -> Trackers:
        trackers = Trackers(self.config, self.folder, first_step, self.said.append, before={})
        trackers.start()
        return trackers

    def start_driver(self, lines: str, leave_s: float) -> subprocess.Popen[bytes]:
        """Starts a process that starts the trackers, and runs these lines, in which they are `trackers`.

        When it dies, they have `leave_s` to close the run.
        """
        code = (
            "import sys, time; from pathlib import Path; from configs.load import parse_config\n"
            "from slipstream.tracking.tracker import SampleRow; from slipstream.tracking.trackers import *\n"
            f"from slipstream.tracking import remote; remote.LEAVE_S = {leave_s}\n"
            "trackers = Trackers(parse_config(open(sys.argv[1]).read()), Path(sys.argv[2]), 0, print, {})\n"
            f"trackers.start()\n{lines}\ntime.sleep(600)"
        )
        config = self.folder / "config.yaml"
        config.write_text(to_yaml(self.config))
        command = [sys.executable, "-c", code, str(config), str(self.folder)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def calls(self) -> list[dict[str, Any]]:
        """Returns what the trackers have noted, each in order, in their files."""
        files = sorted(self.file.parent.glob(f"{self.file.name}*"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def find(self, call: str) -> list[dict[str, Any]]:
        return [one for one in self.calls() if one["call"] == call]

    def assert_no_process_is_left(self) -> None:
        for one in self.find("process"):
            wait_until(lambda pid=one["pid"]: not is_alive(pid), f"end of process {one['pid']}")


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S} s"
        time.sleep(0.02)
