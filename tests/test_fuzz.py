"""A short fuzz: thousands of broken messages to the sockets of a run that goes on meanwhile (`scripts/fuzz.sh` sends a million)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("server", ["buffer", "weights"])
def test_nothing_that_is_sent_stops_a_server_or_is_noticed_by_the_honest(server: str, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/fuzz.py", "--only", server, "--messages", "6000", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "nesting" in done.stdout and "a field out of bounds" in done.stdout and "the honest: " in done.stdout
