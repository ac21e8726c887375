"""The files in `scripts/cluster/` start what they say they start."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT

from configs.load import load_config
from slipstream.ray_node import parse_arguments

FOLDER = ROOT / "scripts/cluster"
SLURM = FOLDER / "slurm.sh"
SRUN = """#!/usr/bin/env bash
# Starts the two tasks of a step one after the other.
echo "srun ${@:1:5}" >>"$FAKE/said"
for SLURM_PROCID in 0 1; do export SLURM_PROCID; "${@: -3}" || exit; done
"""
NODE = """#!/usr/bin/env bash
echo "node.sh $*" >>"$FAKE/said"
if [ "$1" = head ]; then
  [ ${#RAY_AUTH_TOKEN} = 40 ] && echo token >>"$FAKE/token"
  exit "${STATUS:-0}"
fi
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf 'alpha\\nbeta\\n'; else echo "scontrol $*" >>"$FAKE/said"; fi
"""


def read_documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def list_keys(command: str) -> list[str]:
    """Returns the overrides of `scripts/launch.sh` in a shell command."""
    words = shlex.split(command.partition("scripts/launch.sh")[2].strip('" '))
    return [word for word in words if "=" in word]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_each_script_is_one_that_bash_can_read_and_anyone_may_start(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK) and "set -euo pipefail" in path.read_text()


def test_the_ray_job_launches_with_keys_that_exist_and_shares_no_folder_but_outputs() -> None:
    claim, job = read_documents("kuberay.yaml")
    spec = job["spec"]
    config = load_config([key for key in list_keys(spec["entrypoint"]) if key != "run.resume=auto"])
    assert config.cluster.address == "auto" and config.run.name == job["metadata"]["name"]
    cluster = spec["rayClusterSpec"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    groups = [head, *[group["template"]["spec"] for group in cluster["workerGroupSpecs"]]]
    for pod in groups:
        (container,) = pod["containers"]
        volumes = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(volumes.values()) == {volume["name"] for volume in pod["volumes"]}
        assert volumes["/dev/shm"] == "shared-memory", "Kubernetes gives a pod 64 MB"
    mounted = [volume for volume in head["volumes"] if "persistentVolumeClaim" in volume]
    assert mounted[0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert config.run.outputs == "/outputs"
    patience_s = int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    for pod in groups:
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert (ROOT / command[1].removeprefix("/opt/slipstream/")).exists()
        assert pod["terminationGracePeriodSeconds"] > patience_s


def test_the_versions_in_the_files_are_the_projects() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"', project, re.M)
    (ray,) = re.findall(r'"ray>=([\d.]+),', project)
    for pod in re.findall(r"image: (\S+)", (FOLDER / "kuberay.yaml").read_text()):
        assert pod == f"REGISTRY/slipstream:{version}"
    assert read_documents("kuberay.yaml")[1]["spec"]["rayClusterSpec"]["rayVersion"].startswith(ray)


def run_sky_script(folder: Path, rank: int, hosts: list[str]) -> list[str]:
    """Returns the command to which the host of this rank comes."""
    (task,) = read_documents("skypilot.yaml")
    (folder / "scripts/cluster").mkdir(parents=True, exist_ok=True)
    node = folder / "scripts/cluster/node.sh"
    node.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    node.chmod(0o755)
    environment = {
        "PATH": os.environ["PATH"], "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": str(len(hosts)),
        "SKYPILOT_NODE_IPS": "\n".join(hosts), **task["envs"], "KEYS": "run.steps=3 algo=grpo",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", task["run"]], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_skypilot_starts_the_run_on_its_first_host_and_the_others_join_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ["10.0.0.7", "10.0.0.9"]
    monkeypatch.chdir(ROOT)
    lead, join = (run_sky_script(tmp_path, rank, hosts) for rank in (0, 1))
    monkeypatch.setattr("sys.argv", ["node.sh", *lead])
    options = parse_arguments()
    assert (options.nodes, options.peer, options.command[0]) == (2, "10.0.0.9", "scripts/launch.sh")
    config = load_config([key for key in options.command[1:] if key != "run.resume=auto"])
    assert (config.cluster.address, config.run.steps, config.run.name) == ("auto", 3, "skypilot")
    monkeypatch.setattr("sys.argv", ["node.sh", *join])
    assert parse_arguments().head == "10.0.0.7:6379"
    assert "--peer" not in " ".join(run_sky_script(tmp_path, 0, hosts[:1]))


# ---- Slurm


def fake_slurm(folder: Path, **environment: str) -> dict[str, str]:
    """Returns an environment with programs that act as Slurm's. `folder` becomes a small project."""
    for name, text in {
        "bin/srun": SRUN,
        "bin/scontrol": SCONTROL,
        "bin/sbatch": '#!/usr/bin/env bash\necho "sbatch $*"\n',
        "scripts/cluster/node.sh": NODE,
        "scripts/cluster/slurm.sh": SLURM.read_text(),
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    known = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return known | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "FAKE": str(folder)} | environment


def call_slurm(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(folder / "scripts/cluster/slurm.sh"), *arguments], cwd=folder, text=True, capture_output=True,
        env=fake_slurm(folder, **environment), timeout=60,
    )  # fmt: skip


IN_JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "alpha,beta", "SLURM_JOB_NUM_NODES": "2"}
LEAD = (
    "node.sh head --nodes=2 --port=20012 --peer=beta scripts/launch.sh cluster.address=auto run.resume=auto"
)


def test_slurm_submits_itself_with_options_for_sbatch_and_keys_for_the_run(tmp_path: Path) -> None:
    fake_slurm(tmp_path)
    options, keys = ["-N", "3", "--export", "ALL,A=b", "--comment=a=b"], ["run.steps=5", "+experiment=smoke"]
    keys += ["++task.args={a: 'b=c'}", "~tracking.trackers", "eval.sets.my-set.task=x"]
    done = call_slurm(tmp_path, *options, *keys, "--time=10:00")
    script = tmp_path / "scripts/cluster/slurm.sh"
    wanted = " ".join(["sbatch", f"--chdir={tmp_path}", *options, "--time=10:00", str(script), *keys])
    assert done.stdout == f"{wanted}\n", done.stderr


def test_a_dry_run_prints_what_a_job_would_do_and_starts_nothing(tmp_path: Path) -> None:
    fake_slurm(tmp_path)
    said = call_slurm(tmp_path, "--dry-run", "--nodes=2", "task.args={a: 'b c'}", **IN_JOB).stdout
    commands = [line for line in said.splitlines() if not line.startswith("#")]
    assert commands[0].startswith(f"sbatch --chdir={tmp_path} --nodes=2 ")
    lead = shlex.split(commands[2])
    assert " ".join(lead).startswith(f"scripts/cluster/{LEAD}")
    assert lead[-2:] == ["task.args={a: 'b c'}", "run.name=slurm-12"]
    assert commands[3].split() == ["scripts/cluster/node.sh", "join", "alpha:20012"]
    assert commands[4].split() == ["scontrol", "requeue", "12"]
    assert commands[5].startswith("sbatch --test-only ") and not (tmp_path / "said").exists()


@pytest.mark.parametrize(("status", "name"), [("0", None), ("3", "mine")])
def test_a_job_leads_on_its_first_host_and_has_the_status_of_the_run(
    tmp_path: Path, status: str, name: str | None
) -> None:
    fake_slurm(tmp_path)
    keys = ["learner.ranks=2", *([] if name is None else [f"run.name={name}"])]
    done = call_slurm(tmp_path, *keys, STATUS=status, **IN_JOB)
    assert done.returncode == int(status), done.stderr
    said = (tmp_path / "said").read_text().splitlines()
    assert said[0].startswith("srun --ntasks-per-node=1 ")
    assert said[1] == f"{LEAD} learner.ranks=2 run.name={name or 'slurm-12'}"
    if status == "0":
        assert said[2:] == ["node.sh join alpha:20012"]


def test_a_script_that_sbatch_has_copied_away_says_where_it_must_be_submitted(tmp_path: Path) -> None:
    copy = tmp_path / "spool/job12/slurm_script"
    copy.parent.mkdir(parents=True)
    copy.write_text(SLURM.read_text())
    environment = fake_slurm(tmp_path / "project", **IN_JOB)
    for folder, status in ((tmp_path / "project", 0), (tmp_path, 2)):
        done = subprocess.run(
            ["bash", str(copy)], cwd=tmp_path, text=True, capture_output=True,
            env=environment | {"SLURM_SUBMIT_DIR": str(folder)},
        )  # fmt: skip
        assert done.returncode == status, done.stderr
    assert done.stderr == f"sbatch must run in the project's folder, got {tmp_path}\n"
