"""A raylet starts its agents through this file, so that they end with it: Ray's own outlive a killed raylet
by a minute, and look for its cluster.

    python -S scripts/slipstream/agent.py SESSION_FOLDER NODE            stands in for the dashboard agent
    python -S scripts/slipstream/agent.py SESSION_FOLDER NODE COMMAND... becomes that agent

A raylet asks of its dashboard agent that it lives, and says where it listens: nowhere. Ray's own takes two
seconds of a processor at each start, and serves a dashboard that a run does not have.
"""

import ctypes
import os
import signal
import sys

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
UNUSED = "-1"
"""Ray's own agent writes this for what it does not serve (`--minimal`)."""
SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2); it outlasts an exec."""


def main(folder: str, node: str, *command: str) -> None:
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ["RAY_RAYLET_PID"]):  # it has ended meanwhile
        return
    if command:
        os.execv(command[0], command)
    for port in PORTS:
        path = os.path.join(folder, f"{port}_{node}")
        with open(f"{path}.new", "w") as file:
            file.write(UNUSED)
        os.rename(f"{path}.new", path)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
