"""The address of a run that goes on: a file in its folder, for commands that speak to its buffer.

The driver writes the file once the buffer answers, and removes it at the end. A driver that is killed leaves
it behind: then its process is gone.
"""

import json
import os
import socket
from pathlib import Path
from typing import NamedTuple

import psutil

from buffers.files import replace_file

ADDRESS_FILE = "address.json"


class RunAddress(NamedTuple):
    buffer: str
    """The buffer's address."""
    keys: str | None
    """The folder of keys; None where sockets have none."""


def write_address(folder: Path, address: str, keys: str | None) -> None:
    """Raises DiskFull."""
    facts = {"buffer": address, "keys": keys, "host": socket.gethostname(), "pid": os.getpid()}
    replace_file(folder / ADDRESS_FILE, json.dumps(facts).encode())


def remove_address(folder: Path) -> None:
    (folder / ADDRESS_FILE).unlink(missing_ok=True)


def read_address(folder: Path) -> RunAddress:
    """Raises ValueError where no run goes on in the folder."""
    if not (folder / "config.yaml").exists():
        raise ValueError(f"RUN must be the folder of a run that goes on, or its buffer.address, got {folder}")
    try:
        facts = json.loads((folder / ADDRESS_FILE).read_text())
    except FileNotFoundError:
        raise ValueError(f"the run in {folder} has ended, or its buffer does not answer yet") from None
    if facts["host"] == socket.gethostname() and not _is_alive(facts["pid"]):
        raise ValueError(f"the run in {folder} has ended: its driver, process {facts['pid']}, is gone")
    return RunAddress(facts["buffer"], facts["keys"])


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
