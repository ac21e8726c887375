"""Ray's processes of a run, however it ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray._private import services

from slipstream.cluster import AGENT, start_node
from slipstream.role_failures import RoleFailed


def test_agents_end_with_a_raylet_that_is_killed() -> None:
    node = start_node(num_cpus=1)
    try:
        (raylet,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
        deadline = time.monotonic() + 60
        agents: list[psutil.Process] = []
        while len(agents) != 2 or sum(str(AGENT) in one.cmdline() for one in agents) != 1:
            assert time.monotonic() < deadline, f"no agents: {agents}"
            time.sleep(0.1)
            agents = raylet.children()
        os.kill(raylet.pid, 9)
        _, alive = psutil.wait_procs(agents, timeout=10)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=True)


def test_an_agent_whose_raylet_died_before_it_began_ends_at_once(tmp_path: Path) -> None:
    raylet = subprocess.Popen(["true"])
    raylet.wait()
    environment = os.environ | {"RAY_RAYLET_PID": str(raylet.pid)}
    agent = subprocess.Popen([sys.executable, "-S", AGENT, tmp_path, "node"], env=environment)
    try:
        agent.wait(60)
    finally:
        agent.kill()
    assert not list(tmp_path.iterdir())


def test_a_ray_that_does_not_start_is_told_in_a_sentence_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {process.pid for process in psutil.Process().children(recursive=True)}
    monkeypatch.setattr(services, "RAYLET_EXECUTABLE", "/bin/false")
    with pytest.raises(
        RoleFailed, match="^Ray must start on this host within 120 s, and its raylet has died$"
    ):
        start_node(num_cpus=1)
    left = [one for one in psutil.Process().children(recursive=True) if one.pid not in own]
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


LISTENERS = """
import os, psutil, ray
from configs.load import load_config
from slipstream.cluster import run_cluster

class Role:
    def get_pid(self):
        return os.getpid()

with run_cluster(load_config([])):
    role = ray.remote(Role).remote()
    pid = ray.get(role.get_pid.remote())
    me = psutil.Process()
    for process in [me, *me.children(recursive=True), psutil.Process(pid)]:
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                print(process.name().split()[0], one.laddr.ip.removeprefix("::ffff:"))
"""


def test_the_cluster_of_a_run_of_its_own_listens_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    (tmp_path / "listeners.py").write_text(LISTENERS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "listeners.py")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = [line.split() for line in ran.stdout.splitlines()]
    assert {"gcs_server", "raylet", "ray::Role"} <= {name for name, _ in found}
    assert {ip for _, ip in found} == {"127.0.0.1"}, found
