"""A command goes on when nobody takes what it prints."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PRINTS = """
import sys, time
from pathlib import Path
from rich.console import Console
from rich.live import Live
from slipstream.console import outlast_console

outlast_console()
with Live(console=Console(), refresh_per_second=50) as live:
    for line in range(300):
        print("line", line, flush=line % 2 == 0)
        Console().print("line", line)
        print("line", line, file=sys.stderr)
        live.update(f"line {line}")
Path(sys.argv[1]).write_text("went on")
"""


def open_console(kind: str) -> int:
    """Returns a descriptor at which nobody reads."""
    if kind == "full disk":
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = pty.openpty() if kind == "terminal" else os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("kind", ["terminal", "pipe", "full disk"])
def test_a_command_outlives_its_console(tmp_path: Path, kind: str) -> None:
    console = open_console(kind)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PRINTS, tmp_path / "end"]
    try:
        done = subprocess.run(command, stdout=console, stderr=console, env=environment, timeout=120)
    finally:
        os.close(console)
    assert done.returncode == 0
    assert (tmp_path / "end").read_text() == "went on"
