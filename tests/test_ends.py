"""Whatever role cannot go on for a reason that another life would meet again ends the run with that one sentence."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import SIMULATED, Started

SENTENCE = "there must be room for what is written, got none"
FAULTS = {
    # in the buffer's loop
    "buffer": """
class Sampler:
    def choose(self, candidates, count, rng):
        raise Full(SENTENCE, 28)
""",
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


@pytest.mark.parametrize("role", FAULTS)
def test_an_error_that_another_life_would_meet_again_ends_the_run_with_its_sentence(
    role: str, start: Callable[..., Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error's class cannot be pickled, and is a ValueError: `configs.disk.DiskFull` may be such a one."""
    head = f"SENTENCE = {SENTENCE!r}\nclass Full(ValueError):\n    def __init__(self, text, number):\n        super().__init__(text)\n"
    name = "broken.py" if role == "buffer" else "sitecustomize.py"
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / name).write_text(head + FAULTS[role])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "faults"), prepend=os.pathsep)
    sampler = ["buffer.sampler=broken:Sampler"] if role == "buffer" else []
    run = start(*SIMULATED, *sampler, "run.steps=30", "learner.checkpoint_every=3", "generators.count=1")
    run.wait_for(run.descendants, "processes")
    status, said = run.finish()
    assert status == 1, said
    assert f"\n{role}: {SENTENCE}\nThe run has failed. Logs: " in said, said
    assert "Traceback" not in said and "goes on" not in said, "nothing was started again"
    run.assert_nothing_left()
    assert "Traceback" in (run.folder / "logs" / f"{role}.log").read_text(), "where, is in the log"
