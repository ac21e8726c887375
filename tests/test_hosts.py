"""A run over two hosts: a generator joins from the second, is cut off, and comes back; the buffer dies, and
comes back too."""

import json
import time
from pathlib import Path

import pytest
from host_runs import PORT, ask_status
from runs import SIMULATED, assert_accounts_close

from buffers.keys import KeyRole, make_keys
from slipstream_bench.host_commands import CommandOnHost
from slipstream_bench.network_hosts import NetworkHosts, find_obstacle

pytestmark = [pytest.mark.whole_run, pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())]
LEASE_S = 2.0


def test_a_generator_on_another_host_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, list(KeyRole))
    address = [f"buffer.address=tcp://10.77.0.1:{PORT}", f"buffer.keys={keys}"]
    with NetworkHosts(2) as hosts:
        here, there = hosts
        run = CommandOnHost(
            here, tmp_path, "run", "run.name=run", *SIMULATED, *address, "run.steps=100000",
            f"buffer.lease_s={LEASE_S}", "staleness.max_versions=2",
        )  # fmt: skip
        run.wait_for(lambda: (tmp_path / "run" / "summary.json").exists(), "step")
        fleet = CommandOnHost(there, tmp_path, "fleet", "role=generators", *SIMULATED, *address)
        fleet.wait_for(lambda: "generates with version" in fleet.said, "generator on the second host")
        (name,) = (one for one in ask_status(here, keys)["generators"] if one.startswith("host-2"))

        def count_tokens() -> int:
            return ask_status(here, keys)["generators"][name]["sampled_tokens"]

        first = count_tokens()
        run.wait_for(lambda: count_tokens() > first, "tokens of the second host")
        hosts.cut_link(there)
        time.sleep(2 * LEASE_S)  # its leases are given to the other generator
        before = ask_status(here, keys)
        run.wait_for(
            lambda: ask_status(here, keys)["num_trained_steps"] > before["num_trained_steps"] + 5,
            "step without the second host",
        )
        cut = count_tokens()
        assert ask_status(here, keys)["roles"][name]["last_heard_s"] > LEASE_S
        hosts.mend_link(there)
        run.wait_for(lambda: count_tokens() > cut, "tokens of the second host after the cut", 60)
        (buffer,) = [one for one in here.list_processes() if "ray::BufferRole" in " ".join(one.cmdline())]
        buffer.kill()
        run.wait_for(lambda: "the buffer answers again" in run.said, "next life of the buffer")
        lost = count_tokens()
        run.wait_for(lambda: count_tokens() > lost, "tokens of the second host for the buffer's next life")
        run.interrupt()
        assert run.finish() == 130, run.said
        assert fleet.finish() == 1 and "ended before its last step" in fleet.said, fleet.said
        deadline = time.monotonic() + 60
        while left := [one for host in hosts for one in (*host.list_processes(), *host.list_shared_memory())]:
            assert time.monotonic() < deadline, f"nothing is left on any host: {left}"
            time.sleep(0.1)
    assert_accounts_close(json.loads((tmp_path / "run" / "summary.json").read_text()))
