"""A run moves to another host: it is stopped, its folder is copied, and the copy is resumed there."""

import json
import shutil
from pathlib import Path

import pytest
from host_runs import PORT
from runs import SIMULATED, assert_accounts_close

from buffers import events as e
from buffers.event_log import read_events
from buffers.keys import KeyRole, make_keys
from slipstream_bench.host_commands import CommandOnHost
from slipstream_bench.network_hosts import NetworkHosts, find_obstacle

pytestmark = [pytest.mark.whole_run, pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())]


def test_a_run_that_was_stopped_and_copied_goes_on_on_another_host(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    make_keys(tmp_path / "keys", list(KeyRole))
    keys = f"buffer.keys={tmp_path / 'keys'}"
    with NetworkHosts(2) as (here, there):
        run = CommandOnHost(
            here, old, "run", "run.name=run", *SIMULATED, keys, "run.steps=100000",
            f"buffer.address=tcp://{here.address}:{PORT}", "learner.checkpoint_every=1000",
        )  # fmt: skip
        run.wait_for(lambda: (old / "run" / "summary.json").exists(), "step")
        run.interrupt()
        assert run.finish() == 130, run.said
        before = json.loads((old / "run" / "summary.json").read_text())
        shutil.copytree(old / "run", new / "run")
        there.run("mount", "-t", "tmpfs", "none", old)
        here.run("mount", "-t", "tmpfs", "none", new)
        steps = before["steps"] + 5
        moved = CommandOnHost(
            there, new, "moved", f"run.resume={new / 'run'}", f"run.steps={steps}", "generators.count=0",
            f"buffer.address=tcp://{there.address}:{PORT}",
        )  # fmt: skip
        moved.wait_for(lambda: "the buffer answers at" in moved.said, "buffer")
        fleet = CommandOnHost(
            here, tmp_path, "fleet", "role=generators", "generators.count=1", keys,
            f"buffer.address=tcp://{there.address}:{PORT}",
        )  # fmt: skip
        assert (moved.finish(), fleet.finish()) == (0, 0), moved.said + fleet.said
    summary = json.loads((new / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", steps)
    assert summary["groups"]["trained"] == 4 * steps
    assert_accounts_close(summary)
    trained = [event.step for event in read_events(new / "run" / "journal") if isinstance(event, e.Trained)]
    assert trained == list(range(steps)), "the last checkpoint was of the last step"
