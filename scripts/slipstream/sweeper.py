"""Removes from a node's shared memory what the roles of a run have left there, however they ended.

It outlives the process that has started it by a moment: Ray kills the roles of other nodes within
milliseconds of their driver, and they cannot clean up themselves.
"""

import os
import signal
import subprocess
import sys
import time
from typing import IO

from sync.folders import SHARED_MEMORY, sweep_folders

ENDING_S = 1.0
"""Seconds between two looks. Those whose folders are looked for end at the same time as the starter."""
NUM_LOOKS = 5


def start_sweeper() -> IO[bytes]:
    """Starts the process, which waits until this one has ended, or has closed the pipe that is returned."""
    # It holds no output open: a reader of this process's has its end when this process ends.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "slipstream.sweeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    process.wait()
    assert process.stdin is not None, "it is a pipe"
    return process.stdin


def main() -> None:
    # Ray's workers kill their children when they end; a grandchild they leave alone.
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()  # nothing comes: the pipe closes
    for _ in range(NUM_LOOKS):
        time.sleep(ENDING_S)
        sweep_folders(SHARED_MEMORY)


if __name__ == "__main__":
    main()
