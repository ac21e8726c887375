"""Stands in for Ray's dashboard agent, of which a raylet asks that it lives and says where it listens: nowhere. The agent itself takes
two seconds of a processor at each start, and serves a dashboard that a run does not have.

python -S scripts/no_agent.py SESSION_FOLDER NODE
"""

import os
import sys
import time

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
UNUSED = "-1"
"""What Ray's own agent writes for what it does not serve (`--minimal`)."""


def main(folder: str, node: str) -> None:
    raylet = os.getppid()
    for port in PORTS:
        path = os.path.join(folder, f"{port}_{node}")
        with open(f"{path}.new", "w") as file:
            file.write(UNUSED)
        os.rename(f"{path}.new", path)
    while os.getppid() == raylet:
        time.sleep(0.5)


if __name__ == "__main__":
    main(*sys.argv[1:])
