"""Commands on the hosts of one machine (`network_hosts.py`), as a user gives them."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.nursery import FOLDER
from slipstream_bench.network_hosts import HostProcess, NetworkHost

ROOT = Path(__file__).parents[3]
PYTHONPATH = os.pathsep.join(map(str, (ROOT, ROOT / "scripts", ROOT / "scripts/bench")))


class CommandOnHost:
    """`scripts/launch.sh` on a host, less the preparation of its environment."""

    def __init__(
        self,
        host: NetworkHost,
        folder: Path,
        name: str,
        *overrides: str,
        outputs: Path | None = None,
        cache: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Its output goes to a file `name`.txt in `folder`, which is the folder of all runs too unless
        `outputs` is another. `cache`: the host's own, in the place of this machine's."""
        self.host, self.output = host, folder / f"{name}.txt"
        environment = dict(leave_out_nursery() if environment is None else environment)
        environment |= {"PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "1"}
        if cache is not None:
            environment["SLIPSTREAM_CACHE"] = str(cache)
        overrides = (f"run.outputs={outputs or folder}", *overrides)
        command = [sys.executable, "-P", "-m", "slipstream.train", *overrides]
        with open(self.output, "w") as output:
            self.started: HostProcess = host.start_program(
                *command, environment=environment, output=output, folder=ROOT
            )

    @property
    def said(self) -> str:
        return self.output.read_text()

    def wait_for(self, holds: Callable[[], Any], what: str, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert self.started.popen.poll() is None, f"it ended before {what}:\n{self.said}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s:\n{self.said}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        self.started.send_signal(signal.SIGINT)

    def finish(self, timeout_s: float = 120) -> int:
        """Returns the exit status."""
        return self.started.popen.wait(timeout_s)


def leave_out_nursery() -> dict[str, str]:
    """Returns this process's environment for programs of a host: a nursery outside is on no host."""
    return {name: value for name, value in os.environ.items() if name != FOLDER}
