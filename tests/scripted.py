"""A role that Ray starts in a process of its own for a test. Each such process reads this file, so it imports
little."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from slipstream.role_failures import RankFailure


class ScriptedRole:
    """A rank that does what a file of its name in the folder `script` says."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_pid(self) -> int:
        return os.getpid()

    def run(
        self, config: Any, script: Path, address: str, rank: int, rendezvous: str, step: int | None
    ) -> Any:
        match (script / self.name).read_text():
            case "train":
                time.sleep(60)
            case "die":
                (script / "lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                (script / "lost").touch()
                return RankFailure(
                    "RuntimeError: out of memory", " has failed:\na traceback", final=False, at=1.0
                )
            case "notice":
                while not (script / "lost").exists():
                    time.sleep(0.01)
                return RankFailure(
                    "RuntimeError: connection reset", " has failed:\na traceback", final=False, at=2.0
                )
            case "refuse":
                (script / "lost").touch()
                return RankFailure("ValueError: the task is wrong", ": the task is wrong", final=True, at=1.0)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        return None
