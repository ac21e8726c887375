"""A whole run with trackers, one of which hangs, that loses its driver and goes on."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import SIMULATED, StartedRun


def test_a_run_whose_tracker_hangs_goes_on_and_after_a_sigkill_the_other_tracker_has_each_step_once(
    start: Callable[..., StartedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    file, steps = tmp_path / "calls.jsonl", 40
    own = ["odd_trackers:WritingTracker", "odd_trackers:HangingTracker"]
    run = start(
        *SIMULATED,
        f"run.steps={steps}",
        "learner.checkpoint_every=5",
        f"tracking.trackers=[tensorboard,{','.join(own)}]",
        f"tracking.args.file={file}",
        "tracking.timeout_s=30",
    )
    run.wait_for(lambda: run.steps() >= 12, "twelfth step")
    run.wait_for(lambda: file.exists() and '"step": 9' in file.read_text(), "metrics of step 9")
    run.process.kill()
    again = start(f"run.resume={run.folder}")
    code, out = again.finish()
    assert code == 0, out
    for one in (run, again):
        one.assert_nothing_left()
    calls = [json.loads(line) for line in file.read_text().splitlines()]
    logged = [one["step"] for one in calls if one["call"] == "metrics"]
    assert sorted(set(logged)) == logged, "no step twice, and in order"
    # The last steps before the kill may have been on their way.
    assert len(logged) >= steps - 3 and logged[-1] == steps - 1
    assert [one["id"] for one in calls if one["call"] == "open"] == [None, "first"]
    assert [one["status"] for one in calls if one["call"] == "close"] == ["killed", "finished"]
    writing, hanging = (again.summary()["trackers"][name] for name in own)
    assert (writing["status"], hanging["status"]) == ("ok", "dropped") and hanging["lost"] > 0
    assert "odd_trackers:HangingTracker is dropped, and the run goes on without it" in out
    assert "odd_trackers:HangingTracker was dropped" in "".join(out.splitlines()[-1:]), out
