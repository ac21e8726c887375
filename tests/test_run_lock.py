"""A run that lives is not taken up, nor deleted, by another command."""

import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import SIMULATED

from buffers.journal import lock_journal
from configs.disk import DiskFull
from configs.load import load_config, load_resumed_config, to_yaml
from generators.tasks import sorting
from slipstream import preparation
from slipstream.role_logs import show_stacks_of_driver


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, as its files lie."""
    folder = tmp_path / "run"
    (folder / "journal/log").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load_config(SIMULATED)))
    (folder / "journal/log/000000.jsonl").write_text("what a living buffer is writing")
    (folder / "journal/.lock").write_text("mark")
    (folder / ".lock").write_text("process 1 of elsewhere")
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("setting", ["run.resume", "run.overwrite"])
@pytest.mark.parametrize("who", ["command", "buffer"])
def test_a_run_that_lives_is_refused_by_name_and_nothing_in_it_is_touched(
    run: Path, setting: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "PREDECESSOR_S", 0.2)
    if who == "command":
        lock = os.open(run / ".lock", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
    else:
        lock = lock_journal(run / "journal")
    before = contents(run)
    if setting == "run.resume":
        config = load_resumed_config(run, [f"run.resume={run}"])
    else:
        config = load_config([*SIMULATED, f"run.outputs={run.parent}", "run.name=run", "run.overwrite=true"])
    with pytest.raises(
        ValueError,
        match=f"{setting} must name a run that has ended, got {run}, where process 1 of elsewhere is at work",
    ):
        preparation.prepare_run(config)
    os.close(lock)
    assert contents(run) == before


@pytest.mark.parametrize("damaged", [True, False])
def test_a_run_goes_on_from_the_beginning_where_it_has_no_checkpoint_but_not_where_it_has_a_damaged_one(
    run: Path, damaged: bool
) -> None:
    config = load_resumed_config(run, [f"run.resume={run}"])
    if not damaged:
        assert preparation.prepare_run(config) == (config, run, 0)
        return
    (run / "checkpoints/step_4").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=f"run.resume must hold a whole checkpoint, .* got {run}, whose step_4 is damaged"
    ):
        preparation.prepare_run(config)


def test_what_a_resumed_run_has_changed_holds_when_it_is_resumed_once_more(run: Path) -> None:
    first = (run / "config.yaml").read_bytes()
    changed = load_resumed_config(run, [f"run.resume={run}", "run.steps=77", "learner.lr=3e-4"])
    preparation.prepare_run(changed)
    again = load_resumed_config(run, [f"run.resume={run}"])
    assert (again.run.steps, again.learner.lr) == (77, 3e-4) and again == changed
    assert load_resumed_config(run, []).run.resume is None, "the folder can be moved"
    assert (run / "config.until_step_0.yaml").read_bytes() == first


def begin(folder: Path, *settings: str) -> Path:
    """Leaves the configuration of a run of a task with sources, and returns the run's folder."""
    (folder / "journal/log").mkdir(parents=True)
    config, _ = preparation.resolve_config(load_config([*settings, f"model.path={folder}"]))
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder


def test_a_resumed_run_whose_task_makes_other_prompts_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    same = "task.args.datasets=[{name:gcd,weight:3},{name:lcm}]"
    run = begin(tmp_path, "task=reasoning_gym", same)
    kept = load_resumed_config(run, [f"run.resume={run}", same])
    assert preparation.prepare_run(kept) == (kept, run, 0)
    changes = {
        "{name:gcd,weight:3},{name:lcm},{name:chain_sum}": "must stay gcd, lcm .*, got gcd, lcm, chain_sum",
        "{name:lcm},{name:gcd,weight:3}": "sources of prompts must stay gcd, lcm .*, got lcm, gcd",
        "{name:gcd},{name:lcm}": "weight of the source 'gcd' must stay 3.0 .*, got 1.0",
        "{name:gcd,weight:3,size:9},{name:lcm}": "size of the source 'gcd' must stay None .*, got 9",
        "{name:gcd,weight:3,settings:{max_value:7}},{name:lcm}": "task.args must make the source 'gcd' of "
        'gcd with {} in a resumed run, got gcd with {"max_value": 7}',
        "{name:gcd,weight:3},{name:products,label:lcm}": "task.args must make the source 'lcm' of lcm with "
        "{} in a resumed run, got products with {}",
    }
    for datasets, problem in changes.items():
        (run / ".lock").unlink()  # this process holds it
        changed = load_resumed_config(run, [f"run.resume={run}", f"task.args.datasets=[{datasets}]"])
        with pytest.raises(ValueError, match=problem):
            preparation.prepare_run(changed)


def test_a_resumed_run_has_no_more_held_out_prompts_than_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = begin(tmp_path, "task=sorting")
    monkeypatch.setattr(sorting.Task, "num_eval_prompts", 5, raising=False)
    config = load_resumed_config(run, [f"run.resume={run}", "eval.prompts=9"])
    assert preparation.prepare_run(config)[0].eval.prompts == 5


def test_a_folder_that_is_no_runs_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("theirs")
    config = load_config([*SIMULATED, f"run.outputs={tmp_path}", "run.name=run", "run.overwrite=true"])
    with pytest.raises(ValueError, match=f"run.overwrite must name the folder of a run, got {tmp_path}/run"):
        preparation.prepare_run(config)
    assert contents(tmp_path) == {tmp_path / "run/thesis.tex": b"theirs"}


@contextmanager
def full_disk() -> Iterator[None]:
    """Lets this process write to no file. The block must be short: pytest itself may write to one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_any_room_is_named_before_anything_else_is_written(run: Path) -> None:
    with pytest.raises(DiskFull, match=r"the disk of .*/run/\.lock must have room for"), full_disk():
        preparation.claim_folder(run, "run.resume")


def test_a_fleet_whose_disk_has_no_room_for_its_logs_says_so(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=r"the disk of .*/logs/driver\.log must have room for"), full_disk():
        show_stacks_of_driver(tmp_path / "logs")
