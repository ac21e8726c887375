"""Whole runs, as a user starts them: real processes, and for the main job real vLLM and real Ray. It comes
last: the tiny model is made meanwhile."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from runs import ROOT, SIMULATED, StartedRun, assert_accounts_close
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffers.journal import read_groups
from buffers.timeline import TimedSpan, Track
from slipstream import export
from slipstream.nursery import FOLDER
from slipstream.timeline import read_timeline

SUMMARY = {
    "mode": None, "status": None, "steps": None, "version": None, "wall_s": None,
    "restarts": {"learner", "buffer"},
    "start_s": {"imports", "cluster", "buffer", "learner", "engines", "first_group", "first_step"},
    "reward": {"first", "last"}, "evaluations": None, "skipped_evaluations": None,
    "tokens": {"generated", "trained", "masked", "rejected", "in_flight"},
    "groups": {"leased", "trained", "rejected", "in_flight", "trained_twice"},
    "staleness": {"max_versions", "admission_lag", "max", "mean", "histogram"},
    "throughput": {"generated_tokens_per_s", "trained_tokens_per_s", "steps_per_s"},
    "data": {"sorting"}, "trackers": {"tensorboard"}, "idle": {"learner", "generators"}, "weights": {
        "updates", "bytes", "fetched_bytes", "gb_per_s", "prepare_s_mean", "pause_s_mean", "publish_s_mean",
        "write_s_mean",
        "lag", "digest_checks", "digest_mismatches",
    },
}  # fmt: skip


def test_a_run_that_is_stopped_in_whatever_way_leaves_no_process_and_goes_on(
    start: Callable[..., StartedRun],
) -> None:
    """One run in four lives: stopped in a step of 7 s, while its learner starts again, by a user without
    patience, and finished."""
    controlled = "staleness.controller=ess"
    run = start(*SIMULATED, controlled, "generators.simulated.train_tokens_per_s=45", "run.steps=1000")
    run.wait_for(lambda: run.steps() >= 1, "first step")
    time.sleep(1.0)  # the second is under way, as the console shows below
    run.process.send_signal(signal.SIGINT)
    out = assert_stopped(run)
    waited = r"stopping: waiting for learner-0: training step \d for \d+ s \(the last took \d+\.\d s\)"
    assert re.search(waited, out) and f"continue with run.resume={run.folder}" in out, out
    assert run.steps() >= 2, "the step under way was trained, and is in a checkpoint"

    steps, fast = run.steps(), ["generators.simulated.train_tokens_per_s=2000", "learner.checkpoint_every=1"]
    run = start(f"run.resume={run.folder}", *fast)
    run.wait_for(lambda: run.steps() >= steps + 2, "second step of this life")
    known = len(run.rewinds())
    run.lose_a_rank(0)
    run.wait_for(lambda: len(run.rewinds()) > known, "rewind")
    run.process.send_signal(signal.SIGTERM)
    assert_stopped(run)

    steps = run.steps()
    run = start(f"run.resume={run.folder}", *fast)
    run.wait_for(lambda: run.steps() > steps, "step of this life")
    while run.process.poll() is None:
        run.process.send_signal(signal.SIGINT)
        run.descendants()
        time.sleep(0.1)
    assert_stopped(run)

    steps = run.steps()
    run = start(f"run.resume={run.folder}", *fast, f"run.steps={steps + 3}")
    code, out = run.finish()
    assert code == 0, out
    last = run.summary()
    assert (last["steps"], last["version"], last["status"]) == (steps + 3, steps + 3, "finished")
    assert last["groups"]["trained"] == 4 * (steps + 3)
    assert_accounts_close(last)
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    admitted = events.Scalars("staleness/admission_lag")
    assert admitted[0].value == 1.0 and events.Tags()["scalars"].count("offpolicy/ess_sequence") == 1, (
        "a controlled lag begins at 1"
    )
    missing = set(range(steps + 3)) - {event.step for event in admitted}
    assert len(missing) <= 1, "who does not wait may lose the record of the step that was trained last"


def assert_stopped(run: StartedRun) -> str:
    """It ends as one that was interrupted, and leaves nothing; returns what it has printed."""
    code, out = run.finish()
    assert code == 130, out
    run.assert_nothing_left()
    assert run.summary()["status"] == "interrupted"
    assert_accounts_close(run.summary())
    return out


@pytest.fixture(scope="module")
def lost() -> Iterator[subprocess.Popen[str]]:
    """Generators that look for a run where there is none; they take ten seconds to be sure, beside the next
    test."""
    command = ["scripts/launch.sh", "role=generators", "buffer.address=tcp://127.0.0.1:9"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_generators_join_a_run_and_leave_it_and_what_a_killed_driver_leaves_goes_on_without_a_checkpoint(
    start: Callable[..., StartedRun], lost: subprocess.Popen[str]
) -> None:
    """No lease ends by itself here: a generator that does not say that it leaves would hold the run."""
    # About a step a second: without a checkpoint all steps are trained again.
    speed = "generators.simulated.train_tokens_per_s"
    waits = ["buffer.lease_s=3600", "buffer.reconnect_s=3", "learner.checkpoint_every=1000"]
    run = start(*SIMULATED, f"{speed}=400", "run.steps=1000", *waits)
    run.wait_for(lambda: run.steps() >= 1, "first step")
    address = re.search(r"tcp://\S+", (run.folder / "logs" / "buffer.log").read_text())
    assert address is not None
    fleets = [
        start("role=generators", "generators.count=1", f"buffer.address={address[0]}") for _ in range(3)
    ]

    def recorded(column: str) -> set[object]:
        return {
            value
            for batch in read_groups(run.folder / "journal")
            for value in batch.column(column).to_pylist()
        }

    run.wait_for(lambda: len(recorded("generator")) == 4, "group from each fleet")
    fleets[0].process.send_signal(signal.SIGINT)
    code, out = fleets[0].finish()
    assert code == 130 and "SIGINT: the generators have left" in out, out
    fleets[0].assert_nothing_left()
    assert len(fleets[1].descendants()) >= 4
    fleets[1].process.kill()
    steps = run.steps()
    run.wait_for(lambda: run.steps() >= steps + 5, "step without those who left")
    fleets[1].assert_nothing_left()
    assert len(run.descendants()) >= 4
    run.process.kill()
    _, out = run.finish()
    assert "generators joined: " in out and "generators left: " in out, out
    run.assert_nothing_left()
    code, out = fleets[2].finish()
    assert code == 1 and "has been silent for" in out, out
    fleets[2].assert_nothing_left()
    steps, groups = run.steps(), recorded("group")
    again = start(f"run.resume={run.folder}", f"run.steps={steps + 2}", f"{speed}=20000")
    code, out = again.finish()
    assert code == 0, out
    assert groups <= recorded("group"), "what was generated before is trained"
    assert (again.summary()["steps"], again.summary()["groups"]["trained"]) == (steps + 2, 4 * (steps + 2))
    assert_accounts_close(again.summary())


def test_generators_that_find_no_run_to_join_say_so(lost: subprocess.Popen[str]) -> None:
    _, said = lost.communicate(timeout=300)
    assert lost.returncode == 2 and "buffer.address must be a running buffer's, got tcp://127.0.0.1:9" in said


def test_roles_print_their_stacks_on_request_and_one_that_fails_ends_the_run_with_its_traceback(
    start: Callable[..., StartedRun],
) -> None:
    run = start(*SIMULATED, "run.steps=1000", "learner.max_restarts=0")
    run.wait_for(lambda: run.steps() >= 1, "first step")
    asked = {
        "driver": (run.process.pid, "slipstream/train.py"),
        "buffer": (run.roles("BufferRole")[0].pid, "buffers/server.py"),
        "learner-0": (run.roles("LearnerRole")[0].pid, "learners/learner.py"),
        "generator-0": (run.roles("GeneratorRole")[0].pid, "generators/worker.py"),
    }
    for pid, _ in asked.values():
        os.kill(pid, signal.SIGUSR1)

    def logged(name: str) -> str:
        return (run.folder / "logs" / f"{name}.log").read_text()

    for name, (_, file) in asked.items():
        run.wait_for(
            lambda name=name, file=file: (
                "most recent call first" in logged(name) and f'{file}", line' in logged(name)
            ),
            f"stacks of {name}",
        )  # type: ignore[misc]
        assert re.search(rf"\bprocess {asked[name][0]} on \S+ begins$", logged(name).splitlines()[0])
    steps = run.steps()
    run.wait_for(lambda: run.steps() > steps, "step after the request")
    run.roles("LearnerRole")[0].send_signal(signal.SIGKILL)
    code, out = run.finish()
    assert code == 1 and "learner-0 has died" in out and "The run has failed" in out
    assert run.summary()["status"] == "failed"
    run.assert_nothing_left()


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[StartedRun, str]]:
    """A smoke run in which a generator was killed, and what it printed. As a user's, it has a nursery of its
    own."""
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    run = StartedRun(
        tmp_path_factory.mktemp("main"),
        "+experiment=smoke",
        "learner.parity_every=10",
        environment=environment,
    )
    try:
        run.wait_for(lambda: run.steps() >= 3, "third step")
        run.roles("GeneratorRole")[0].send_signal(signal.SIGKILL)
        code, out = run.finish()
        assert code == 0, out
        yield run, out
    finally:
        run.kill() if run.process.poll() is None else None


def test_the_main_job_learns_survives_a_killed_generator_and_accounts_for_every_token(
    main_job: tuple[StartedRun, str],
) -> None:
    run, out = main_job
    summary = run.summary()
    assert {key: set(value) if isinstance(value, dict) else None for key, value in summary.items()} == SUMMARY
    assert (summary["status"], summary["mode"], summary["steps"]) == ("finished", "async", 40)
    assert_accounts_close(summary)
    assert summary["reward"]["last"] > summary["reward"]["first"] + 0.1
    assert summary["weights"]["digest_mismatches"] == 0 and summary["weights"]["updates"] > 10
    assert summary["staleness"]["max_versions"] == 2 and summary["staleness"]["mean"] > 0, (
        "it was asynchronous"
    )
    first, last = summary["evaluations"]
    assert (first["version"], last["version"], last["prompts"]) == (0, 40, 64)
    assert first["avg_ci95"][0] < first["avg"] < first["avg_ci95"][1] and last["avg"] <= 1
    assert first["versions"][0] == 0 and last["versions"] == [40, 40] and last["digest"]
    assert re.search(
        rf"held_out: avg@1 {first['avg']:.3f} \[.*\] \(version 0\) → {last['avg']:.3f} \[.*, 64 prompts", out
    )
    assert (run.folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    start_s = [
        summary["start_s"][what]
        for what in ("imports", "cluster", "buffer", "learner", "first_group", "first_step")
    ]
    assert start_s[0] > 0 and start_s == sorted(start_s) and start_s[-1] < summary["wall_s"] + 60
    assert f"first step {start_s[-1]:.1f} s after the command (imports {start_s[0]:.1f}, cluster" in out
    logs = {path.name for path in (run.folder / "logs").iterdir()}
    assert logs == {"driver.log", "buffer.log", "learner-0.log", "generator-0.log", "generator-1.log"}
    assert "parity probe" in (run.folder / "logs" / "learner-0.log").read_text()
    for name in ("config.yaml", "journal", "checkpoints/step_40/manifest.json"):
        assert (run.folder / name).exists()
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("reward/mean")) == 40 and len(events.Scalars("eval/held_out/avg")) == 2
    probed = {event.step: event.value for event in events.Scalars("parity/probe_max")}
    assert len(probed) == 4 and all(0 <= value < 1e-3 for value in probed.values()), (
        "before the first step and every 10"
    )
    assert {"staleness/mean", "throughput/trained_tokens_per_s", "offpolicy/ess"} <= set(
        events.Tags()["scalars"]
    )
    run.assert_nothing_left()


def test_its_timeline_shows_that_versions_are_written_beside_training_and_when_each_engine_loads_them(
    main_job: tuple[StartedRun, str],
) -> None:
    run, _ = main_job
    assert (run.folder / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    roles = read_timeline(run.folder)
    assert list(roles) == ["learner-0", "generator-0", "generator-1"]
    by_name: dict[str, list[TimedSpan]] = {}
    for span in roles["learner-0"]:
        by_name.setdefault(span.name, []).append(span)
    assert all(f"training step {step}" in by_name for step in range(40))
    for version in range(41):
        (written,) = by_name[f"writing and digesting version {version}"]
        assert written.cat is Track.publication
        assert written.ts <= by_name[f"announcing version {version}"][0].ts
        for trained in by_name[f"training step {version - 1}"] if version else []:
            assert trained.cat is Track.activity and trained.ts < written.ts
    assert by_name["writing the checkpoint of step 40"][0].cat is Track.checkpoint
    loads = [
        span for name in roles for span in roles[name] if re.fullmatch(r"loading version \d+", span.name)
        if span.cat is Track.weights
    ]  # fmt: skip
    assert len(loads) > 10
    for load in loads:
        announced = by_name[f"announcing version {load.args['version']}"][0]
        assert announced.ts < load.ts, "an engine takes up what was announced before"
    events = json.loads((run.folder / "timeline.json").read_text())
    assert sum(event["ph"] == "X" for event in events) == sum(map(len, roles.values()))


def test_the_run_is_trained_again_from_its_journal_to_the_same_bits(main_job: tuple[StartedRun, str]) -> None:
    run, _ = main_job
    command = ["scripts/replay.sh", str(run.folder)]
    study = ["--to-step", "3", "algo=rloo", "learner.lr=1e-3"]
    pipes = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [subprocess.Popen([*command, *arguments], **pipes) for arguments in ([], study)]
    same, other = (process.communicate(timeout=300)[0] for process in both)
    assert (
        both[0].returncode == 0 and "bit for bit the same as the run in its checkpoints of steps 40" in same
    ), same
    assert both[1].returncode == 0 and "trained 3 steps" in other, other
    checkpoint = next(
        (run.folder / "replays" / "same" / "checkpoints" / "step_40" / "engine").glob("*.safetensors")
    )
    tensors = load_file(checkpoint)
    tensors[min(tensors)].view(torch.uint8).flatten()[0] ^= 1
    save_file(tensors, checkpoint)
    from slipstream.replay import compare_checkpoints

    steps, different = compare_checkpoints(run.folder, run.folder / "replays" / "same")
    assert steps == [40] and different == [f"step 40: {min(tensors)}"], "a single bit is noticed"


def test_a_checkpoint_is_exported_as_a_model_that_transformers_loads(
    main_job: tuple[StartedRun, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = main_job
    command = ["scripts/export.sh", str(run.folder), str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "step 40 of" in done.stdout, done.stdout + done.stderr
    held = load_file(next((run.folder / "checkpoints" / "step_40" / "engine").glob("*.safetensors")))
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert {f"model.{name}" for name in weights} == {name for name in held if name.startswith("model.")}
    assert all(torch.equal(tensor, held[f"model.{name}"]) for name, tensor in weights.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode("3 7")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    refused = {
        (str(tmp_path / "model"),): "the folder must be new or empty",
        (str(tmp_path / "other"), "--step", "7"): "--step must be one of [40] (the checkpoints kept), got 7",
    }
    for arguments, message in refused.items():
        assert export.main([str(run.folder), *arguments]) == 2
        assert message in capsys.readouterr().err
