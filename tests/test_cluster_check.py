"""A Ray cluster that cannot be joined is refused in a sentence, before anything starts."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.cluster_check import check_cluster
from slipstream.stop_signals import StopSignals

HEAD = """
import sys, ray
ray.__version__ = sys.argv[1] or ray.__version__
from slipstream.cluster import start_node
node = start_node(num_cpus=2)
print(node.gcs_address, flush=True)
sys.stdin.read()
node.kill_all_processes(check_alive=False, allow_graceful=True)
"""
TOKEN, OTHER = ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": digit * 40} for digit in "ab")
RULE = "^cluster.address must be a Ray cluster that this host can join, got {}: {}"


@contextmanager
def start_head(environment: Mapping[str, str], version: str = "") -> Iterator[str]:
    """Starts a cluster that says it is of this version of Ray; yields its address."""
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, version],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment,
    )  # fmt: skip
    assert head.stdin is not None and head.stdout is not None
    try:
        yield head.stdout.readline().strip()
    finally:
        head.stdin.close()
        head.wait(60)


def assert_refused(address: str, why: str, answered_s: float = 300.0) -> None:
    with pytest.raises(ValueError, match=RULE.format(re.escape(address), why)):
        check_cluster(address, StopSignals(), answered_s)


def test_an_address_where_no_cluster_answers_is_refused() -> None:
    assert_refused("nonsense", "Invalid address format: nonsense")
    with socket.socket() as deaf:
        deaf.bind(("", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        assert_refused(address, r"\S+ cannot be reached: Connection refused")
        deaf.listen()
        began = time.monotonic()
        assert_refused(address, "it has not answered within 4 s", answered_s=4.0)
        assert time.monotonic() - began < 60, "Ray itself waits for longer"


def test_a_cluster_with_another_token_or_of_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def show(environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    with start_head(TOKEN) as address:
        assert_refused(address, "it asks for another token than this command has")
        show(OTHER)
        assert_refused(address, "it asks for another token than this command has")
        show(TOKEN)
        check_cluster(address, StopSignals(), 300.0)
    with start_head(TOKEN, version="2.1.0") as address:
        assert_refused(address, r"Version mismatch: The cluster was started with: Ray: 2.1.0")


def test_a_run_whose_cluster_does_not_answer_leaves_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "slipstream.train", "cluster.address=127.0.0.1:9"]
    done = subprocess.run([*command, f"run.outputs={tmp_path}/outputs"], capture_output=True, text=True)
    assert done.returncode == 2 and "127.0.0.1:9: " in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
