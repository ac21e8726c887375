"""Clients of the buffer find out what was lost while a link was down, and ask again."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from buffers.keys import KeyRole, make_keys
from slipstream_bench.network_hosts import HostProcess, NetworkHost, NetworkHosts, find_obstacle

PORT = 5555
SERVER = """
import sys
from pathlib import Path
from buffers.server import BufferServer
from configs.load import load_config
settings = ["eval.prompts=0", f"buffer.address={sys.argv[1]}", f"buffer.keys={sys.argv[2]}"]
server = BufferServer(load_config(settings), Path(sys.argv[3]))
print("listens", flush=True)
server.run()
"""
ASKING = """
import sys
import zmq
from buffers import client, messages as m
client.PROBES |= {zmq.TCP_KEEPALIVE_IDLE: 1, zmq.TCP_KEEPALIVE_INTVL: 1}
asking = client.BufferClient(sys.argv[1], timeout_s=60.0, keys=sys.argv[2])
asking.call(m.JoinRun(generator="g"), m.JoinedRun)
number = asking.send_request(m.RequestLeases(generator="g", count=1, wait_s=5.0))
asking.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)  # the request before it has come, too
print("waits", flush=True)
while not any(answer.number == number for answer in asking.receive_answers(1.0)):
    pass
print("is answered", flush=True)
"""


def has_connections(host: NetworkHost) -> bool:
    """True while the kernel of the host tries to tell somebody that a connection has ended."""
    rows = [line.split() for line in host.run("cat", "/proc/net/tcp").splitlines()[1:]]
    return any(row[1].endswith(f":{PORT:04X}") and row[3] != "0A" for row in rows)


@pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())
def test_who_only_waits_for_an_answer_hears_of_a_buffer_that_has_died_while_the_link_was_down(
    tmp_path: Path,
) -> None:
    """Nothing that the client sends would tell it that its connection is no more."""
    keys, environment = tmp_path / "keys", os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    make_keys(keys, list(KeyRole))
    with NetworkHosts(2) as hosts:
        here, there = hosts
        here.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/tcp_orphan_retries")  # else it tries for minutes
        address = f"tcp://{here.address}:{PORT}"

        def start_buffer() -> HostProcess:
            command = (sys.executable, "-c", SERVER, address, keys, tmp_path / "journal")
            started = here.start_program(*command, environment=environment)
            assert started.popen.stdout is not None and started.popen.stdout.readline() == "listens\n"
            return started

        first = start_buffer()
        asking = there.start_program(sys.executable, "-c", ASKING, address, keys, environment=environment)
        assert asking.popen.stdout is not None and asking.popen.stdout.readline() == "waits\n"
        hosts.cut_link(there)
        first.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 60
        while has_connections(here):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        start_buffer()
        hosts.mend_link(there)
        out, _ = asking.popen.communicate(timeout=60)
        assert out == "is answered\n"
