"""A role that cannot go on for a reason that another life would meet again ends the run with one sentence."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import SIMULATED, StartedRun, assert_accounts_close

SENTENCE = "there must be room for what is written, got none"
FAULTS = {
    # in the thread of a learner's rank that writes checkpoints
    "learner-0": """
import os
replace = os.replace
def fails(source, target, **other):
    if "/checkpoints/step_" in str(target):
        raise Full(SENTENCE, 28)
    replace(source, target, **other)
os.replace = fails
""",
    # while a generator makes its engine
    "generator-0": """
import math, sys
log1p = math.log1p
def fails(x):
    if sys._getframe(1).f_code.co_filename.endswith("simulated_engine.py"):
        raise Full(SENTENCE, 28)
    return log1p(x)
math.log1p = fails
""",
}


@pytest.mark.timeout(600)
def test_an_error_that_another_life_would_meet_again_ends_the_run_with_its_sentence(
    start: Callable[..., StartedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error's class is a ValueError, and cannot be pickled. A run for each role, side by side."""
    head = (
        f"SENTENCE = {SENTENCE!r}\nclass Full(ValueError):\n"
        "    def __init__(self, text, number):\n        super().__init__(text)\n"
    )
    runs: dict[str, StartedRun] = {}
    for role, fault in FAULTS.items():
        (tmp_path / role).mkdir()
        (tmp_path / role / "sitecustomize.py").write_text(head + fault)
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", str(tmp_path / role), prepend=os.pathsep)
            few = ["run.steps=30", "learner.checkpoint_every=3", "generators.count=1"]
            runs[role] = start(*SIMULATED, *few, outputs=tmp_path / role)
    for run in runs.values():
        run.wait_for(run.descendants, "processes")
    for role, run in runs.items():
        status, said = run.finish()
        assert status == 1, said
        assert f"\n{role}: {SENTENCE}\nThe run has failed. Logs: " in said, said
        assert "Traceback" not in said and "goes on" not in said, "nothing was started again"
        run.assert_nothing_left()
        assert "Traceback" in (run.folder / "logs" / f"{role}.log").read_text(), "where, is in the log"


@pytest.mark.timeout(300)
def test_a_run_that_fills_its_disk_says_where_and_goes_on_when_there_is_room(
    small_disk: Path, start: Callable[..., StartedRun]
) -> None:
    fast = [
        "generators.simulated.mean_tokens=100",
        "generators.simulated.tokens_per_s=20000",
        "generators.count=1",
    ]
    run = start(
        *SIMULATED,
        *fast,
        "generators.simulated.train_tokens_per_s=200000",
        "run.steps=3000",
        "learner.checkpoint_every=2",
        outputs=small_disk,
    )
    run.wait_for(run.descendants, "processes")
    status, said = run.finish()
    assert status == 1 and "Traceback" not in said, said
    assert re.search(
        rf"\n(\S+: )?the disk of {run.folder}/\S+ must have room for [\d,]+ bytes more, "
        r"got [\d,]+ bytes free",
        said,
    )
    run.assert_nothing_left()
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    whole = (run.folder / "checkpoints").glob("step_*/manifest.json")
    saved = [int(path.parent.name.removeprefix("step_")) for path in whole]
    steps = max([run.summary()["steps"], *saved])  # the summary may have found no room
    again = start(f"run.resume={run.folder}", f"run.steps={steps + 5}", outputs=small_disk)
    status, said = again.finish()
    assert status == 0, said
    assert_accounts_close(again.summary())
    assert again.summary()["steps"] == steps + 5


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_run_whose_ray_dies_ends_with_a_sentence_leaves_nothing_and_is_resumed(
    start: Callable[..., StartedRun], name: str
) -> None:
    """Workers that a nursery has forked are no children of the raylet, and would go on without it."""
    run = start(*SIMULATED, "run.steps=100000", "learner.checkpoint_every=1")
    run.wait_for(lambda: run.steps() >= 2, "second step")
    (control,) = [one for one in run.descendants() if one.name() == name]
    control.kill()
    status, said = run.finish()
    assert status == 1, said
    assert f"\nRay's own process on this host ({name}) has died: no role can be started again\n" in said, said
    run.assert_nothing_left()
    again = start(f"run.resume={run.folder}", f"run.steps={run.steps() + 3}")
    status, said = again.finish()
    assert status == 0, said
    assert_accounts_close(again.summary())
