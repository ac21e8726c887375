"""`scripts/cluster/node.sh`: what a user has said wrongly is a sentence, before Ray starts."""

import os
import signal
import subprocess
import sys

import pytest

from slipstream import ray_node
from slipstream.ray_node import NodeFailed, find_address


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["join", "nonsense"], "the head must be HOST:PORT, got nonsense"),
        (["join", "host:6379", "--label=gpu"], "--label must be KEY=VALUE, got gpu"),
        (["head"], "the head must have a command that can be run, got none"),
        (["head", "no-such-program", "-x"], "a command that can be run, got no-such-program -x"),
    ],
)
def test_a_wrong_argument_is_answered_with_rule_and_value(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["node.sh", *arguments])
    with pytest.raises(SystemExit) as ended:
        ray_node.main()
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_a_node_without_a_token_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["node.sh", "head", "true"])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # `main` sets it
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    assert ray_node.main() == 2
    assert "RAY_AUTH_TOKEN must be set, the same on every host" in capsys.readouterr().err


def test_the_address_of_a_host_is_the_one_on_the_way_to_its_peer_or_of_an_interface() -> None:
    assert (
        find_address(None, None) == find_address("lo", None) == find_address(None, "127.0.0.1") == "127.0.0.1"
    )
    with pytest.raises(
        NodeFailed, match=r"--interface must have an IPv4 address, got eth77 \(there are .*lo"
    ):
        find_address("eth77", None)
    with pytest.raises(
        NodeFailed, match="--peer must be a host that this one reaches, got no.such.host.invalid"
    ):
        find_address(None, "no.such.host.invalid")


COUNTS = """
import os, signal, sys, time
received = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
print("ready", flush=True)
while not received:
    time.sleep(0.01)
time.sleep(1.0)
print(*received)
"""


def start_node_with_command() -> "subprocess.Popen[str]":
    """Starts what `node.sh head` does once Ray is there, with a command that prints the signals that it
    gets."""
    lead = (
        "import signal, sys; from slipstream import ray_node; "
        "signal.pthread_sigmask(signal.SIG_BLOCK, ray_node.FORWARDED); "
        f"sys.exit(ray_node.run_command([sys.executable, '-c', {COUNTS!r}], '127.0.0.1:1'))"
    )
    node = subprocess.Popen(
        [sys.executable, "-c", lead], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert node.stdout is not None and node.stdout.readline() == "ready\n"
    return node


def test_ctrl_c_reaches_the_command_once() -> None:
    """The terminal sends it to the command too: twice would mean "at once", without a checkpoint."""
    node = start_node_with_command()
    os.killpg(node.pid, signal.SIGINT)
    assert node.communicate(timeout=60)[0] == "SIGINT\n" and node.returncode == 0


def test_a_command_whose_node_is_killed_is_told_to_stop() -> None:
    node = start_node_with_command()
    node.kill()
    assert node.communicate(timeout=60)[0] == "SIGTERM\n"
