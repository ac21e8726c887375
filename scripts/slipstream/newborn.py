"""What a raylet starts for a worker while there is a nursery: has one forked there, and ends with it.

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
"""How the name of this process begins; the worker's number follows."""


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
            name.write(f"{NAMED}{worker}")  # who looks for the processes of a run finds the worker too
        nursery.recv(1)  # nothing comes: the connection ends with the worker
        return
    import ray._private.workers.setup_worker as setup

    os.execv(sys.executable, [sys.executable, setup.__file__, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
