"""Trackers that tests name by `module:Class`: one that writes down its calls, and ones that misbehave."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.tracking.tracker import OpenedRun, SampleRow, TrackedRun

DAEMON = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]


class WritingTracker:
    """Writes each call into a file, a line of JSON each."""

    def __init__(self, file: str) -> None:
        self._file = file

    def open(self, run: TrackedRun) -> OpenedRun:
        self._note(
            "open", id=run.id, num_records=run.num_records, name=run.name, steps=run.config["run"]["steps"]
        )
        return OpenedRun(id=run.id or "first", place="a page")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note("metrics", step=step, **metrics)

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        self._note("samples", step=step, prompts=[sample.prompt for sample in samples])

    def close(self, status: str, summary: Mapping[str, Any], files: Sequence[str]) -> None:
        self._note(
            "close", status=status, steps=summary.get("steps"), files=[Path(one).name for one in files]
        )

    def _note(self, call: str, **facts: object) -> None:
        with open(self._file, "a") as file:
            file.write(json.dumps({"call": call} | facts) + "\n")


class OddTracker(WritingTracker):
    """Does one odd deed in one of its calls, each time."""

    def __init__(self, file: str, deed: str, at: str) -> None:
        super().__init__(file)
        self._deed, self._at = deed, at
        self._note("process", pid=os.getpid())

    def _note(self, call: str, **facts: object) -> None:
        super()._note(call, **facts)
        if call == self._at:
            getattr(self, f"_{self._deed}")()

    def _none(self) -> None:
        pass

    def _raise(self) -> None:
        raise SystemExit("enough")

    def _exit(self) -> None:
        os._exit(0)

    def _crash(self) -> None:
        ctypes.string_at(0)

    def _hang(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)

    def _fork(self) -> None:
        """Leaves a child, a daemon in a session of its own, and a thread, then hangs."""
        threading.Thread(target=time.sleep, args=[600]).start()
        for session in (False, True):
            child = subprocess.Popen(DAEMON, start_new_session=session)
            super()._note("process", pid=child.pid)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                super()._note("process", pid=os.getpid())
                time.sleep(600)
            os._exit(0)
        self._hang()

    def _print(self) -> None:
        """Prints a gigabyte."""
        for _ in range(1 << 10):
            os.write(1, b"x" * (1 << 20))

    def _garble(self) -> None:
        """Writes into every socket that it finds, as a library that closes and opens descriptors might."""
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"\xff" * 100)


def __getattr__(name: str) -> type[OddTracker]:
    """Makes the class `DEED_at_CALL` with a file of its own, so that one run has several deeds."""
    deed, _, at = name.partition("_at_")
    if not at:
        raise AttributeError(name)

    class OneDeed(OddTracker):
        def __init__(self, file: str) -> None:
            super().__init__(f"{file}.{name}", deed, at)

    return OneDeed


class HangingTracker(WritingTracker):
    """Hangs at its fourth step."""

    def __init__(self, file: str) -> None:
        super().__init__(f"{file}.hanging")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= 3:
            time.sleep(600)


class IncompleteTracker:
    def open(self, run: TrackedRun) -> None:
        pass


class SlowToMake(WritingTracker):
    def __init__(self) -> None:
        time.sleep(600)
