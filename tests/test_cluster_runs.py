"""A run over the nodes of a Ray cluster: every role has a place, sockets have keys, and nothing is left."""

import json
import re
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_runs import RayOnHosts
from runs import SIMULATED, assert_accounts_close

from slipstream.timeline import read_timeline
from slipstream_bench.host_commands import PYTHONPATH
from slipstream_bench.network_hosts import NetworkHosts, find_obstacle

pytestmark = [pytest.mark.whole_run, pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())]
SMALL = [
    "generators.max_sequences=8", "generators.max_model_len=64", "eval.prompts=0",
    "sampling.max_tokens=8", "learner.groups_per_step=2", "learner.samples_per_prompt=2",
]  # fmt: skip


def find_newest_step(checkpoints: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*")), default=0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayOnHosts]:
    folder = tmp_path_factory.mktemp("cluster")
    with NetworkHosts(3) as hosts, RayOnHosts(hosts, folder) as cluster:
        yield cluster


def test_a_run_has_its_learner_on_one_host_and_its_generators_on_others(
    cluster: RayOnHosts, tiny_model: Path
) -> None:
    run = cluster.launch(
        "main", "run.name=main", *SMALL, f"model.path={tiny_model}", "run.steps=4", "generators.count=2",
        "placement.strategy=spread", "placement.generators.pool=workers", "cluster.ports=7000-7020",
    )  # fmt: skip
    assert run.finish(300) == 0, run.said
    folder = cluster.folder / "main"
    for place in (
        "host-1 (10.77.0.1): driver, buffer at tcp://10.77.0.1:7000; learner-0",
        "host-2 (10.77.0.2): generator-0",
        "host-3 (10.77.0.3): generator-1",
    ):
        assert place in run.said
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["groups"]["trained"]) == ("finished", 4, 8)
    assert_accounts_close(summary)
    assert "weights are served at tcp://10.77.0.1:70" in (folder / "logs" / "learner-0.log").read_text()
    for host, name in (("host-2", "generator-0"), ("host-3", "generator-1")):
        assert f" on {host} begins" in (folder / "logs" / f"{name}.log").read_text()
    assert list(read_timeline(folder)) == ["learner-0", "generator-0", "generator-1"]
    # These hosts share a disk, so nothing is there twice.
    assert all(path.suffix == ".json" for path in (folder / "timeline").iterdir())
    cluster.wait_until_clean()
    # Keys were made, for their owner alone, and stand in nothing that was written or printed.
    secrets = [path for path in (folder / "keys").rglob("*") if path.name.endswith("_secret")]
    assert stat.S_IMODE((folder / "keys").stat().st_mode) == 0o700 and len(secrets) == 5
    for path in secrets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secret = path.read_text().rpartition("secret-key = ")[2].strip().strip('"')
        assert len(secret) == 40
        for text in [run.output, folder / "config.yaml", *(folder / "logs").iterdir()]:
            assert secret not in text.read_text(errors="replace"), text


def test_a_killed_driver_leaves_nothing_on_any_host_and_the_run_goes_on_elsewhere(
    cluster: RayOnHosts,
) -> None:
    words = [*SIMULATED, "run.steps=100000", "learner.checkpoint_every=5"]
    places = ["placement.learner.host=host-2", "placement.generators.host=host-3"]
    run = cluster.launch("killed", "run.name=killed", *words, *places)
    checkpoints = cluster.folder / "killed" / "checkpoints"
    run.wait_for(lambda: list(checkpoints.glob("step_*")), "checkpoint")
    run.started.send_signal(signal.SIGKILL)
    run.finish()
    cluster.wait_until_clean()
    again = cluster.launch(
        "again", f"run.resume={cluster.folder / 'killed'}", "placement.generators.host=host-2"
    )
    again.wait_for(lambda: "step " in again.said, "step")
    again.interrupt()
    assert again.finish() == 130, again.said
    cluster.wait_until_clean()
    summary = json.loads((cluster.folder / "killed" / "summary.json").read_text())
    assert_accounts_close(summary)


def test_more_generators_start_on_other_hosts_and_fewer_leave(cluster: RayOnHosts) -> None:
    run = cluster.launch(
        "scaled", "run.name=scaled", *SIMULATED, "run.steps=100000", "placement.strategy=spread",
        "placement.learner.host=host-1", "placement.generators.pool=workers",
    )  # fmt: skip
    folder = cluster.folder / "scaled"
    run.wait_for(lambda: "step " in run.said, "step")
    assert scale_on_host(cluster, folder, 3).endswith("generators of the run: 3\n")
    begun = [(folder / "logs" / f"generator-{number}.log").read_text() for number in (1, 2)]
    assert sorted(re.findall(r" on (\S+) begins", "".join(begun))) == ["host-2", "host-3"]
    assert "at most 5" in scale_on_host(cluster, folder, 9), "the nodes have four processors each"
    assert scale_on_host(cluster, folder, 1).endswith("generators of the run: 1\n")
    assert [name for name in cluster.list_roles(cluster.hosts[2])] == []
    run.interrupt()
    assert run.finish() == 130, run.said
    cluster.wait_until_clean()
    summary = json.loads((folder / "summary.json").read_text())
    assert_accounts_close(summary)
    assert summary["groups"]["rejected"]["failed"] == 0


def scale_on_host(cluster: RayOnHosts, folder: Path, number: int) -> str:
    """Runs `scripts/scale.sh` on the run's host; returns what it has printed."""
    command = f"{sys.executable} -P -m slipstream.scale {folder} {number} 2>&1 || true"
    return cluster.hosts[0].run("env", f"PYTHONPATH={PYTHONPATH}", "bash", "-c", command, timeout_s=120)


# The tests from here on take nodes from the cluster.


def test_a_learner_on_a_host_that_is_lost_goes_on_from_its_checkpoint_on_another(
    cluster: RayOnHosts,
) -> None:
    run = cluster.launch(
        "moved", *SIMULATED, "run.name=moved", "run.steps=100000", "learner.checkpoint_every=5",
        "placement.learner.pool=workers", "placement.generators.pool=head",
    )  # fmt: skip
    checkpoints = cluster.folder / "moved" / "checkpoints"
    run.wait_for(lambda: list(checkpoints.glob("step_*")), "checkpoint")
    # A rank on another node that dies: Ray tells. The driver's helper there has died before, and is back.
    second, third = cluster.hosts[1:]
    (helper,) = [one for one in second.list_processes() if "ray::NodeAgent" in " ".join(one.cmdline())]
    helper.kill()
    cluster.list_roles(second)["LearnerRole"].kill()
    run.wait_for(lambda: "restart 1 of" in run.said, "second life of the learner")
    assert "learner-0 has died: the learner goes on from step" in run.said
    run.wait_for(lambda: "LearnerRole" in cluster.list_roles(second), "learner on its host")
    newest = find_newest_step(checkpoints)
    run.wait_for(lambda: find_newest_step(checkpoints) > newest, "checkpoint of the second life")
    # Its host is out of reach, and nobody is told.
    cluster.hosts.cut_link(second)
    run.wait_for(lambda: "restart 2 of" in run.said, "third life of the learner")
    assert "learner-0 moves to host-3 (10.77.0.3)" in run.said
    newest = find_newest_step(checkpoints)
    run.wait_for(lambda: find_newest_step(checkpoints) > newest, "checkpoint from the other host")
    assert "LearnerRole" in cluster.list_roles(third)
    cluster.hosts.mend_link(second)
    run.interrupt()
    assert run.finish() == 130, run.said
    cluster.wait_until_clean()
    summary = json.loads((cluster.folder / "moved" / "summary.json").read_text())
    assert_accounts_close(summary)


def test_generators_whose_host_is_lost_are_replaced_as_soon_as_a_node_has_room(cluster: RayOnHosts) -> None:
    run = cluster.launch(
        "replaced", *SIMULATED, "run.name=replaced", "run.steps=100000", "learner.checkpoint_every=5",
        "placement.generators.host=host-3", "generators.max_restarts=0",
        "eval.prompts=4", "eval.every=5", "eval.generators=1",
    )  # fmt: skip
    checkpoints, third = cluster.folder / "replaced" / "checkpoints", cluster.hosts[2]
    run.wait_for(lambda: list(checkpoints.glob("step_*")), "checkpoint")
    for process in third.list_processes():
        if process.name() == "raylet":
            process.kill()
    for name in ("generator-0", "evaluator-0"):
        run.wait_for(
            lambda name=name: f"{name} is lost with host-3 (10.77.0.3)" in run.said, "word of a loss"
        )
    cluster.start_node(third)
    for name in ("generator-1", "evaluator-1"):
        joined = re.compile(f"generators joined: .*{name}")
        run.wait_for(lambda joined=joined: joined.search(run.said), f"word of {name}")
        assert f"{name} starts on host-3 (10.77.0.3)" in run.said
    newest = find_newest_step(checkpoints)
    run.wait_for(lambda: find_newest_step(checkpoints) > newest + 10, "steps with it")
    run.interrupt()
    assert run.finish() == 130, run.said
    cluster.wait_until_clean()
    summary = json.loads((cluster.folder / "replaced" / "summary.json").read_text())
    assert_accounts_close(summary)
    assert max(one["version"] for one in summary["evaluations"]) > newest, "by the other evaluator"
    log = (cluster.folder / "replaced" / "logs" / "driver.log").read_text()
    assert "raylet" in log and "raylet" not in run.said, "Ray's pages of stacks are in the log alone"
