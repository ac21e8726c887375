"""Checks that end in each way that a check can end, for `test_check.py`. The process of a check imports this
file."""

import os
import signal
import subprocess
import sys
import time

from slipstream.check_machine import Check, NotHere


def works() -> str:
    return "as it should [in brackets]"


def lacks() -> str:
    raise NotHere("no such device")


def raises() -> str:
    print("before the end")
    raise ValueError("the field must be 1, got 2")


def crashes() -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "never"


def exits() -> str:
    os._exit(3)


def hangs() -> str:
    """With a child of its own, and one that has left its session."""
    for own in (False, True):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=own)
    time.sleep(1000)
    return "never"


CHECKS = [
    Check("works", works),
    Check("lacks", lacks),
    Check("needs a GPU", raises, gpu=True),
    Check("raises", raises),
    Check("crashes", crashes),
    Check("exits", exits),
    Check("hangs", hangs, deadline_s=3.0),
]
