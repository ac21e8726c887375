"""Finds the processes that a player of `chaos.py` leaves behind."""

import os
from pathlib import Path

import psutil

FOLDER_MARK = "SLIPSTREAM_CHAOS_FOLDER"
"""Environment variable that names the run's folder. All processes of the run inherit it, and so are found."""


def list_workers(folder: Path) -> list[int]:
    """Returns the processes of this run that are alive, this one left out."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            is_marked = process.environ().get(FOLDER_MARK) == str(folder)
        except (psutil.Error, OSError):
            continue
        if is_marked and process.pid != os.getpid() and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found
