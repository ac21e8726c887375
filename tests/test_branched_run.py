"""A whole run whose episodes have several branches: it is killed, goes on, and is trained again from its
journal."""

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from runs import ROOT, StartedRun, assert_accounts_close

from buffers import events as e
from buffers.event_log import read_events
from buffers.segments import Reader
from slipstream.nursery import FOLDER

NUM_STEPS, GROUPS = 4, 4
SETTINGS = [
    "task.name=agent_tasks:ForgetfulAgent", f"run.steps={NUM_STEPS}", f"learner.groups_per_step={GROUPS}",
    "learner.samples_per_prompt=4", "generators.count=1", "eval.prompts=0", "sampling.max_tokens=8",
    "learner.checkpoint_every=1", "learner.minibatches=2", "algo=gspo", "algo.entropy_coef=0.001",
    # The branches of most episodes do not fit into one microbatch together.
    "learner.tokens_per_microbatch=20",
]  # fmt: skip


@pytest.mark.whole_run
def test_a_killed_run_of_branched_episodes_goes_on_and_is_trained_again_to_the_same_bits(
    tmp_path: Path,
) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    # A nursery that other tests have started imports from their path.
    environment = {name: value for name, value in os.environ.items() if name != FOLDER} | {"PYTHONPATH": path}
    run = StartedRun(tmp_path, *SETTINGS, environment=environment)
    try:
        run.wait_for(lambda: run.steps() >= 2, "second step")
    finally:
        run.kill()
    run.process.wait()
    accepted = list_accepted(run.folder)
    again = StartedRun(tmp_path, f"run.resume={run.folder}", environment=environment)
    try:
        code, out = again.finish()
    finally:
        again.kill() if again.process.poll() is None else None
    assert code == 0, out
    again.assert_nothing_left()
    summary = again.summary()
    assert_accounts_close(summary)
    assert (summary["steps"], summary["groups"]["trained"]) == (NUM_STEPS, NUM_STEPS * GROUPS)
    assert "damaged" not in summary["groups"]["rejected"]
    assert_rows_are_whole(run.folder, accepted)

    # As in a run that was resumed for more steps than it was started with.
    config = run.folder / "config.yaml"
    text = config.read_text()
    assert f"\n  steps: {NUM_STEPS}\n" in text
    config.write_text(text.replace(f"\n  steps: {NUM_STEPS}\n", "\n  steps: 1\n"))
    replay = subprocess.run(
        ["scripts/replay.sh", str(run.folder)], cwd=ROOT, env=environment, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert replay.returncode == 0, replay.stdout
    assert (
        f"bit for bit the same as the run in its checkpoints of steps {NUM_STEPS - 1}, {NUM_STEPS}"
        in replay.stdout
    )


def list_accepted(run: Path) -> list[e.Accepted]:
    return [event for event in read_events(run / "journal") if isinstance(event, e.Accepted)]


def assert_rows_are_whole(run: Path, before: list[e.Accepted]) -> None:
    """Asserts that the groups of before and all others are in the journal with all their branches."""
    events, reader = list_accepted(run), Reader(run / "journal")
    assert len(before) >= 2 * GROUPS and events[: len(before)] == before
    for event in events:
        rows = reader.read(event).to_pylist()
        assert len(rows) == event.rows and {row["group"] for row in rows} == {event.group}
        branches = Counter(row["sample"] for row in rows)
        assert set(branches) == {0, 1, 2, 3}
        for row in rows:
            assert branches[row["sample"]] == dict(row["rewards"])["sums"] in (2, 3)
            assert set(row["turn"]) == {-1, row["branch"]}
