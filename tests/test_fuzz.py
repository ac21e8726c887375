"""A short fuzz: a run goes on while its sockets receive thousands of broken messages (`scripts/fuzz.sh`: a
million)."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_broken_messages_stop_no_server_and_disturb_no_honest_role(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/bench/fuzz.py", "--messages", "3000", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    for server in ("buffer", "weights"):
        for kind in ("nesting", "a field out of bounds"):
            assert re.search(rf"{server}\W+{kind}", done.stdout), done.stdout
        assert f"{server} with keys" in done.stdout
    assert "messages without a key" in done.stdout and done.stdout.count("the honest roles: ") == 2
