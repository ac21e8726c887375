"""Stands in for a Ray worker while there is a nursery: asks the nursery to fork the worker, and ends with it.

python scripts/slipstream/newborn.py SCRIPT ARGUMENTS... --serialized-runtime-env-context={...} --language=...
"""

import json
import os
import socket
import sys

CONTEXT = "--serialized-runtime-env-context="
STAGE = "SLIPSTREAM_STAGE"
"""Environment variable that an actor asks for: the stage of the nursery that has its imports."""
NAMED = "worker "
"""Begins the name of this process; the worker's process number follows."""


def main(arguments: list[str]) -> None:
    context = next((a.removeprefix(CONTEXT) for a in arguments if a.startswith(CONTEXT)), "{}")
    added = json.loads(context).get("env_vars", {})
    asked = {
        "environment": dict(os.environ) | added,
        "folder": os.getcwd(),
        "arguments": [a for a in arguments if not a.startswith((CONTEXT, "--language=", "-s", "-S"))],
    }
    try:
        nursery = socket.socket(socket.AF_UNIX)
        nursery.connect(f"{os.environ['SLIPSTREAM_NURSERY']}/{added.get(STAGE, 'buffer')}")
        socket.send_fds(nursery, [b" "], [0, 1, 2])
        nursery.sendall(json.dumps(asked).encode() + b"\n")
        worker = nursery.recv(32).decode()
    except OSError:
        worker = ""
    if worker:
        with open("/proc/self/comm", "w") as name:
            # So that whoever looks for the processes of a run finds the worker, which is no child of this
            # one.
            name.write(f"{NAMED}{worker}")
        # No byte comes: the connection ends with the worker.
        nursery.recv(1)
        return
    import ray._private.workers.setup_worker as setup

    os.execv(sys.executable, [sys.executable, setup.__file__, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
