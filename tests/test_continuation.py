"""`run.resume=auto`: the same command again goes on with its run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, SIMULATED

from configs.load import load_config, to_yaml
from slipstream.continuation import COMMAND_FILE, AlreadyFinished, continue_run, note_command
from slipstream.preparation import prepare_run

NAMED = ["run.name=long", "run.resume=auto"]


def name_run(folder: Path, *more: str) -> list[str]:
    return [f"run.outputs={folder}", *NAMED, *more]


def make_run(folder: Path, *begun_with: str, **summary: Any) -> Path:
    run = folder / "long"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(load_config(["run.steps=7", "run.name=long"])))
    note_command(run, name_run(folder, *begun_with))
    if summary:
        (run / "summary.json").write_text(json.dumps(summary))
    return run


def test_a_command_without_auto_is_left_alone() -> None:
    assert continue_run(["run.steps=3", "run.resume=outputs/x"]) == ["run.steps=3", "run.resume=outputs/x"]


def test_a_run_begins_where_there_is_none_and_may_take_the_folder_of_one_that_never_began(
    tmp_path: Path,
) -> None:
    begun = continue_run(name_run(tmp_path, "+experiment=smoke"))
    assert begun == [f"run.outputs={tmp_path}", "run.name=long", "+experiment=smoke", "run.overwrite=true"]
    assert load_config(begun).run.resume is None


def test_a_run_goes_on_with_what_has_changed_in_its_command_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, "+experiment=smoke", "model.path=tiny", "learner.lr=0.1")
    again = name_run(tmp_path, "+experiment=smoke", "model.path=tiny", "learner.lr=0.2")
    assert continue_run(again) == ["learner.lr=0.2", f"run.resume={run}"]
    note_command(run, again)
    assert continue_run(again) == [f"run.resume={run}"]
    back = name_run(tmp_path, "+experiment=smoke", "model.path=tiny", "learner.lr=0.1")
    assert continue_run(back) == ["learner.lr=0.1", f"run.resume={run}"]
    with pytest.raises(ValueError, match="overrides of a resumed run must be single keys"):
        continue_run(name_run(tmp_path, "+experiment=guess_number"))


def test_a_run_that_has_trained_all_its_steps_is_over_until_it_is_given_more(tmp_path: Path) -> None:
    run = make_run(tmp_path, status="finished", steps=7)
    with pytest.raises(AlreadyFinished, match="long has trained its 7 steps already"):
        continue_run(name_run(tmp_path))
    more = name_run(tmp_path, "run.steps=9")
    assert continue_run(more) == ["run.steps=9", f"run.resume={run}"]
    (run / "summary.json").write_text('{"status": "interrupted", "steps": 7}')
    assert continue_run(name_run(tmp_path)) == [f"run.resume={run}"]


@pytest.mark.parametrize("unfinished", ["config.yaml", "command.json", "data.json", "parcels.json", "model"])
def test_a_run_begins_in_the_folder_of_one_that_ended_while_it_wrote_its_first_files(
    tmp_path: Path, unfinished: str
) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / f"{unfinished}.unfinished").write_text("the disk is fu")
    config = load_config([*SIMULATED, *continue_run(name_run(tmp_path))])
    assert prepare_run(config)[2] is None
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "config.yaml", "parcels.json"]


def test_auto_needs_a_name() -> None:
    with pytest.raises(ValueError, match=r"^run\.name must be set with run\.resume=auto .*, got none$"):
        continue_run(["run.resume=auto"])


@pytest.mark.whole_run
def test_the_same_command_starts_a_run_goes_on_with_it_and_ends_well_when_it_is_over(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))}

    def launch(*more: str) -> str:
        command = [sys.executable, "-P", "-m", "slipstream.train", *SIMULATED, *name_run(tmp_path, *more)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (tmp_path / "long").mkdir()
    (tmp_path / "long" / ".lock").touch()  # of a command that was killed at its start
    launch("run.steps=2")
    assert "overwrite: false" in (tmp_path / "long" / "config.yaml").read_text()
    assert len(json.loads((tmp_path / "long" / COMMAND_FILE).read_text())) >= 3
    launch("run.steps=4")
    assert json.loads((tmp_path / "long" / "summary.json").read_text())["steps"] == 4
