"""Whole runs, as a user starts them: real processes, and for the main job real vLLM and real Ray."""

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import export
import pytest
import torch
from runs import ROOT, SIMULATED, Started, assert_accounts_close
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffers.journal import read_groups

SUMMARY = {
    "mode": None, "status": None, "steps": None, "version": None, "wall_s": None, "restarts": {"learner"},
    "reward": {"first", "last"},
    "tokens": {"generated", "trained", "masked", "rejected", "in_flight"},
    "groups": {"leased", "trained", "rejected", "in_flight", "trained_twice"},
    "staleness": {"bound", "admitted", "max", "mean", "histogram"},
    "throughput": {"generated_tokens_per_s", "trained_tokens_per_s", "steps_per_s"},
    "idle": {"learner", "generators"}, "weights": {
        "updates", "bytes", "fetched_bytes", "gb_per_s", "prepare_s_mean", "pause_s_mean", "publish_s_mean", "lag",
        "digest_checks", "digest_mismatches",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Started, str]]:
    """A smoke run in which a generator was killed, and what it printed."""
    run = Started(tmp_path_factory.mktemp("main"), "+experiment=smoke")
    try:
        run.wait_for(lambda: run.steps() >= 3, "third step")
        run.roles("GeneratorRole")[0].send_signal(signal.SIGKILL)
        code, out = run.finish()
        assert code == 0, out
        yield run, out
    finally:
        run.kill() if run.process.poll() is None else None


def test_the_main_job_learns_survives_a_killed_generator_and_accounts_for_every_token(
    main_job: tuple[Started, str],
) -> None:
    run, out = main_job
    summary = run.summary()
    assert {key: set(value) if isinstance(value, dict) else None for key, value in summary.items()} == SUMMARY
    assert (summary["status"], summary["mode"], summary["steps"]) == ("finished", "async", 40)
    assert_accounts_close(summary)
    assert summary["reward"]["last"] > summary["reward"]["first"] + 0.1
    assert summary["weights"]["digest_mismatches"] == 0 and summary["weights"]["updates"] > 10
    assert summary["staleness"]["bound"] == 2 and summary["staleness"]["mean"] > 0, "it was asynchronous"
    assert "held-out reward" in out
    logs = {path.name for path in (run.folder / "logs").iterdir()}
    assert logs == {"buffer.log", "learner-0.log", "generator-0.log", "generator-1.log"}
    assert "parity probe" in (run.folder / "logs" / "learner-0.log").read_text()
    for name in ("config.yaml", "journal", "checkpoints/step_40/manifest.json"):
        assert (run.folder / name).exists()
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("reward/mean")) == 40 and len(events.Scalars("eval/reward")) == 2
    assert {"staleness/mean", "throughput/trained_tokens_per_s", "offpolicy/ess"} <= set(events.Tags()["scalars"])
    run.assert_nothing_left()


def test_the_run_is_trained_again_from_its_journal_to_the_same_bits(main_job: tuple[Started, str]) -> None:
    run, _ = main_job
    command = ["scripts/replay.sh", str(run.folder)]
    same = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert same.returncode == 0, same.stdout + same.stderr
    assert "bit for bit the same as the run in its checkpoints of steps 40" in same.stdout
    other = [*command, "--to-step", "3", "algo=rloo", "learner.lr=1e-3"]
    study = subprocess.run(other, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert study.returncode == 0 and "trained 3 steps" in study.stdout, study.stdout + study.stderr
    checkpoint = next((run.folder / "replays" / "same" / "checkpoints" / "step_40" / "engine").glob("*.safetensors"))
    tensors = load_file(checkpoint)
    tensors[min(tensors)].view(torch.uint8).flatten()[0] ^= 1
    save_file(tensors, checkpoint)
    from replay import compare

    steps, different = compare(run.folder, run.folder / "replays" / "same")
    assert steps == [40] and different == [f"step 40: {min(tensors)}"], "a single bit is noticed"


def test_a_checkpoint_is_exported_as_a_model_that_transformers_loads(
    main_job: tuple[Started, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = main_job
    command = ["scripts/export.sh", str(run.folder), str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "step 40 of" in done.stdout, done.stdout + done.stderr
    held = load_file(next((run.folder / "checkpoints" / "step_40" / "engine").glob("*.safetensors")))
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert {f"model.{name}" for name in weights} == {name for name in held if name.startswith("model.")}
    assert all(torch.equal(tensor, held[f"model.{name}"]) for name, tensor in weights.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode("3 + 7")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    refused = {
        (str(tmp_path / "model"),): "the folder must be new or empty",
        (str(tmp_path / "other"), "--step", "7"): "--step must be one of [40] (the checkpoints kept), got 7",
    }
    for arguments, message in refused.items():
        assert export.main([str(run.folder), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_run_that_is_stopped_leaves_a_checkpoint_and_no_process_and_goes_on_from_it(
    start: Callable[..., Started],
) -> None:
    """By either signal: the second stops what goes on from the first."""
    run, steps = start(*SIMULATED, "run.steps=1000"), 0
    for number in (signal.SIGINT, signal.SIGTERM):
        run.wait_for(lambda run=run, least=steps + 2: run.steps() >= least, "second step")
        run.process.send_signal(number)
        code, out = run.finish()
        assert code == 130 and "did not stop in time" not in out, out
        run.assert_nothing_left()
        before = run.summary()
        assert before["status"] == "interrupted" and f"run.resume={run.folder}" in out
        assert_accounts_close(before)
        assert before["steps"] > steps
        steps = before["steps"]
        last = [f"run.steps={steps + 3}"] if number == signal.SIGTERM else []
        run = start(f"run.resume={run.folder}", *last)
    code, out = run.finish()
    assert code == 0, out
    after = run.summary()
    assert (after["steps"], after["version"], after["status"]) == (steps + 3, steps + 3, "finished")
    assert after["groups"]["trained"] == 4 * (steps + 3)
    assert_accounts_close(after)


def test_a_run_with_critic_reference_and_controlled_lag_goes_on_from_its_checkpoint(
    start: Callable[..., Started], tiny_model: Path
) -> None:
    small = ["learner.groups_per_step=8", "learner.samples_per_prompt=4", "generators.count=1", "eval.prompts=0"]
    run = start(*small, "algo=ppo", "staleness.controller=ess", "learner.minibatches=2", "run.steps=3")
    code, out = run.finish()
    assert code == 0, out
    kept = run.folder / "checkpoints" / "step_3"
    assert {path.name for path in kept.iterdir()} == {"manifest.json", "engine", "critic"}
    again = start(f"run.resume={run.folder}", "run.steps=5")
    code, out = again.finish()
    assert code == 0, out
    assert_accounts_close(again.summary())
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    for tag in ("critic/explained_variance", "policy/kl_reference", "offpolicy/ess_sequence"):
        assert len(events.Scalars(tag)) == 5, tag
    assert 0.0 <= events.Scalars("staleness_0/clip_fraction")[0].value <= 1.0
    assert [event.value for event in events.Scalars("staleness/admitted")][0] == 1.0, (
        "S is 2; a controlled lag begins at 1"
    )
    assert events.Scalars("critic/loss")[-1].step == 4


@pytest.fixture(scope="module")
def lost() -> Iterator[subprocess.Popen[str]]:
    """Generators that look for a run where there is none; they take ten seconds to be sure, beside the next test."""
    command = ["scripts/launch.sh", "role=generators", "buffer.address=tcp://127.0.0.1:9"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_generators_join_a_run_and_leave_it_and_no_process_outlives_a_driver_that_is_killed(
    start: Callable[..., Started], lost: subprocess.Popen[str]
) -> None:
    run = start(*SIMULATED, "run.steps=1000", "buffer.lease_s=3")
    run.wait_for(lambda: run.steps() >= 1, "first step")
    address = re.search(r"tcp://\S+", (run.folder / "logs" / "buffer.log").read_text())
    assert address is not None
    fleets = [start("role=generators", "generators.count=1", f"buffer.address={address[0]}") for _ in range(2)]

    def makers() -> set[str]:
        return {name for batch in read_groups(run.folder / "journal") for name in batch.column("generator").to_pylist()}

    run.wait_for(lambda: len(makers()) == 3, "group from either fleet")
    fleets[0].process.send_signal(signal.SIGINT)
    code, out = fleets[0].finish()
    assert code == 130 and "SIGINT: the generators have left" in out, out
    fleets[0].assert_nothing_left()
    steps = run.steps()
    run.wait_for(lambda: run.steps() >= steps + 3, "step without those who left")
    assert len(run.descendants()) >= 4
    run.process.kill()
    run.process.wait()
    run.assert_nothing_left()
    code, out = fleets[1].finish()
    assert code == 1 and "has been silent for" in out, out
    fleets[1].assert_nothing_left()


def test_generators_that_find_no_run_to_join_say_so(lost: subprocess.Popen[str]) -> None:
    _, said = lost.communicate(timeout=300)
    assert lost.returncode == 2 and "buffer.address must be a running buffer's, got tcp://127.0.0.1:9" in said


def test_a_role_that_fails_ends_the_run_with_its_traceback(start: Callable[..., Started]) -> None:
    run = start(*SIMULATED, "run.steps=1000", "learner.max_restarts=0")
    run.wait_for(lambda: run.steps() >= 1, "first step")
    run.roles("LearnerRole")[0].send_signal(signal.SIGKILL)
    code, out = run.finish()
    assert code == 1 and "learner-0 has died" in out and "The run has failed" in out
    assert run.summary()["status"] == "failed"
    run.assert_nothing_left()
