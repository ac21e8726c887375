"""Whole runs over several hosts of this machine (`slipstream_bench.network_hosts`)."""

import contextlib
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from runs import ROOT

from slipstream.nursery import FOLDER
from slipstream_bench.host_commands import PYTHONPATH, CommandOnHost
from slipstream_bench.network_hosts import NetworkHost, NetworkHosts

PORT, RAY_PORT = 5555, 6390
ASK = """
import sys
from buffers import messages as m
from buffers.client import BufferClient
from buffers.keys import KeyRole
import msgspec
client = BufferClient(sys.argv[1], keys=sys.argv[2], role=KeyRole.operator, timeout_s=10.0)
request = m.WatchRun(after=sys.maxsize, wait_s=0.0, after_evaluation=sys.maxsize)
print(msgspec.json.encode(client.call(request, m.RunNews).status).decode())
"""


def ask_status(host: NetworkHost, keys: Path) -> dict[str, Any]:
    """Returns the buffer's `RunStatus`, asked for on a host."""
    address = f"tcp://10.77.0.1:{PORT}"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))
    said = host.run("env", f"PYTHONPATH={paths}", sys.executable, "-c", ASK, address, str(keys), timeout_s=60)
    return dict(json.loads(said))


class RayOnHosts:
    """A Ray cluster with a node on each of several hosts, for a `with` block. The first host has the head."""

    def __init__(self, hosts: NetworkHosts, folder: Path, num_cpus: int = 4) -> None:
        """Each node has the label `host`, its host's name, and `pool`, `head` or `workers`. What Ray prints
        goes to `folder`."""
        self.hosts, self.folder, self._num_cpus = hosts, folder, num_cpus
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        kept.pop(FOLDER, None)  # the tests' nursery is on no host
        self.environment = kept | {
            "PYTHONPATH": PYTHONPATH,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(20),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "300",  # on a busy machine its 30 s are too few
        }

    def __enter__(self) -> "RayOnHosts":
        for host in self.hosts:
            self.start_node(host)
        return self

    def __exit__(self, *_: object) -> None:
        """The hosts end the nodes."""

    def start_node(self, host: NetworkHost) -> None:
        head = self.hosts[0]
        where = (
            ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
            if host is head
            else [f"--address={head.address}:{RAY_PORT}"]
        )
        output, pool = self.folder / f"ray-{host.name}.txt", "head" if host is head else "workers"
        with open(output, "w") as file:
            started = host.start_program(
                str(Path(sys.executable).with_name("ray")), "start", *where,
                f"--node-ip-address={host.address}", f"--num-cpus={self._num_cpus}",
                f"--labels=host={host.name},pool={pool}", "--object-store-memory=100000000",
                "--disable-usage-stats", environment=self.environment, output=file,
            )  # fmt: skip
            assert started.popen.wait(330) == 0, output.read_text()

    def launch(self, name: str, *overrides: str) -> CommandOnHost:
        """Starts a run on the head's host, in the cluster."""
        return CommandOnHost(
            self.hosts[0], self.folder, name, "cluster.address=auto", *overrides, environment=self.environment
        )

    def list_roles(self, host: NetworkHost) -> dict[str, psutil.Process]:
        """Returns the processes on a host that are actors of ours, by Ray's title of the process."""
        found = {}
        for process in host.list_processes():
            with contextlib.suppress(psutil.Error):
                if (title := " ".join(process.cmdline())).startswith("ray::") and "Agent" not in title:
                    found[title.removeprefix("ray::").partition(".")[0].strip()] = process
        return found

    def wait_until_clean(self, timeout_s: float = 60) -> None:
        """Returns once no role and no shared memory of a run is left on any host."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = {
                host.name: (host.list_shared_memory(), self.list_ours(host))
                for host in self.hosts
                if host.list_shared_memory() or self.list_ours(host)
            }
            if not left:
                return
            assert time.monotonic() < deadline, left
            time.sleep(0.2)

    def list_ours(self, host: NetworkHost) -> list[str]:
        """Returns the command lines of our processes on a host: roles, drivers and their helpers."""
        found = []
        for process in host.list_processes():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                is_role = line.startswith("ray::") and "Agent" not in line and "IDLE" not in line
                if is_role or "-m slipstream" in line:
                    found.append(line[:80])
        return found
