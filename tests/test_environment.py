"""`scripts/env.sh`: what it installs, once; what it does when that fails; and that it lets go of its lock."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/bash
case "$*" in
  *slipstream.train*) flock --nonblock "$SLIPSTREAM_VENV/.slipstream-lock" true && echo "runs with: ${@:4}" ;;
  *slipstream.plan*) echo "plans with: ${@:4}" ;;
esac
"""
UV = """#!/bin/bash
[ -e "$SLIPSTREAM_VENV/broken" ] && { echo "no route to the index" >&2; exit 1; }
echo "${@: -1}" >> "$SLIPSTREAM_VENV/installed"
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose python and uv only take notes."""
    for name, text in (("python", PYTHON), ("uv", UV)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def launch(venv: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SLIPSTREAM_VENV": str(venv)}
    return subprocess.run(
        ["scripts/launch.sh", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_the_environment_is_made_once_whatever_the_arguments_and_its_lock_is_free_during_the_run(
    venv: Path,
) -> None:
    for arguments in (["run.steps=1"], ["role=generators"], ["run.steps=1"]):
        done = launch(venv, *arguments)
        assert (done.returncode, done.stdout) == (0, f"runs with: {arguments[0]}\n"), done.stderr
    (installed,) = (venv / "installed").read_text().splitlines()
    assert installed in (f"{ROOT}[cpu]", f"{ROOT}[cuda]")


def test_a_plan_is_another_program_wherever_the_word_stands(venv: Path) -> None:
    for arguments in (["--plan", "model.path=a b"], ["learner.ranks=2", "--plan", "--gpus", "8"]):
        assert launch(venv, *arguments).stdout == f"plans with: {' '.join(arguments)}\n"
    assert launch(venv, "run.name=--plans").stdout == "runs with: run.name=--plans\n"


def test_an_installation_that_fails_is_not_called_ready_and_is_tried_again(venv: Path) -> None:
    (venv / "broken").touch()
    done = launch(venv)
    assert done.returncode != 0 and not done.stdout
    assert "no route to the index" in done.stderr and "could not be prepared" in done.stderr
    assert "is ready" not in done.stderr
    (venv / "broken").unlink()
    assert launch(venv).returncode == 0 and (venv / "installed").exists()
