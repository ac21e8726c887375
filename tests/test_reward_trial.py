"""A reward is tried before a run begins: what cannot rate the first row is refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import load_config, load_resumed_config, parse_config
from generators.data import run_data
from generators.rewards.trial import try_reward
from generators.tasks import load_task
from slipstream import evaluation_sets, preparation

ROOT = Path(__file__).parents[1]
REWARDS = """
import time

def give_text(data_source, solution_str, ground_truth, extra_info=None):
    return "1.0"

def refuse_source(data_source, solution_str, ground_truth, extra_info=None):
    assert solution_str == ground_truth
    if data_source == "second":
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    return 1.0

def give_nothing(row, reply):
    pass

def sleep_on(row, reply):
    time.sleep(1000)

def leave(row, reply):
    import os
    os._exit(3)

calls = []

def work_once(row, reply):
    calls.append(row)
    return 1.0 if len(calls) == 1 else None

def give_one_number(completions, **kwargs):
    return 1.0

def rate_training_rows(row, reply):
    return None if row["answer"] == "21" else 1.0

def rate_well(completions, answer, **kwargs):
    assert len(completions) == 4
    return [float(one[0]["content"] == right) for one, right in zip(completions, answer)]
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two sources of four rows, and the functions above, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rewards.py").write_text(REWARDS)
    for name, first in (("first", 0), ("second", 10)):
        rows = [
            {"prompt": [{"role": "user", "content": f"{i} + 1?"}], "answer": str(i + 1)}
            for i in range(first, first + 4)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "data.train=[{name: first, path: first.jsonl}, {name: second, path: second.jsonl}]"


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("give_text", "row of 'first': .* 'give_text': reward must be a number, got '1.0'"),
        ("refuse_source", r"'second': .* implemented for data_source='second' \(rewards.py, line 10\)"),
        ("give_nothing", "reward part 'give_nothing': reward must be a number, got None"),
        ("sleep_on", r"score_response must take at most 2 s \(episodes.score_timeout_s\), got no end"),
        ("work_once", "reward part 'work_once': reward must be a number, got None"),
        ("leave", "score_response must return, got no answer: its worker .* 3"),
        ("give_one_number", "'give_one_number': .* list of 4 rewards, .* got 1.0"),
    ],
)  # fmt: skip
def test_a_reward_that_cannot_rate_the_first_row_is_refused(
    function: str, sentence: str, sources: str
) -> None:
    config = load_config(
        [
            "task=dataset",
            sources,
            f"reward.function=rewards.py:{function}",
            "episodes.score_timeout_s=2",
            "learner.samples_per_prompt=4",
        ]
    )
    with pytest.raises(
        ValueError, match=rf"^reward\.function must give a reward for each reply, .*{sentence}"
    ):
        try_reward(config, load_task(config.task.name, config.task_arguments))


def test_a_reward_that_rates_every_source_passes(sources: str) -> None:
    part = "{use: 'rewards.py:rate_well', weight: 2}"
    config = load_config(
        ["task=dataset", sources, f"reward.parts=[{{use: math}}, {part}]", "learner.samples_per_prompt=4"]
    )
    try_reward(config, load_task(config.task.name, config.task_arguments))


def test_the_reward_of_an_evaluation_set_rates_as_many_replies_as_the_set_samples(sources: str) -> None:
    words = [sources, "data.eval=second.jsonl", "reward.function=rewards.py:give_one_number"]
    config = load_config(["task=dataset", *words])
    with pytest.raises(ValueError, match="first held-out row of 'second': .* list of 2 rewards"):
        try_reward(config, load_task(config.task.name, config.task_arguments), "eval", samples=2)


def test_a_run_with_a_bad_reward_ends_before_it_begins(sources: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "slipstream.train", "task=dataset", sources]
    command += ["reward.function=rewards.py:give_text", f"run.outputs={tmp_path / 'outputs'}"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "Slipstream cannot start:\nreward.function must give a reward for each reply" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["data.eval=held_out.jsonl"], r"^reward\.function must .* held-out row of 'held_out'"),
        (
            ["eval.sets.two.data=held_out.jsonl"],
            r"^eval\.sets\.two cannot be played: reward\.function must .* None$",
        ),
    ],
)
def test_the_runs_reward_is_tried_on_held_out_rows_and_on_those_of_a_set_without_one_of_its_own(
    words: list[str], refused: str, sources: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "resolve_model", lambda config: tmp_path / "model")
    for module in (preparation, evaluation_sets):
        monkeypatch.setattr(module, "make_limit", lambda config: None)
    row = {"prompt": [{"role": "user", "content": "20 + 1?"}], "answer": "21"}
    (tmp_path / "held_out.jsonl").write_text(json.dumps(row) + "\n")
    given = ["reward.function=rewards.py:rate_training_rows", f"run.outputs={tmp_path / 'outputs'}"]
    with pytest.raises(ValueError, match=refused):
        preparation.prepare_run(load_config(["task=dataset", sources, *words, *given]))
    assert not (tmp_path / "outputs").exists()


def test_a_run_that_goes_on_elsewhere_finds_its_functions_and_refuses_lost_ones_at_once(
    sources: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "resolve_model", lambda config: tmp_path / "model")
    monkeypatch.setattr(run_data, "make_limit", lambda config: None)
    monkeypatch.setattr(preparation, "make_limit", lambda config: None)
    monkeypatch.setattr(evaluation_sets, "make_limit", lambda config: None)
    words = ["task=dataset", sources, f"run.outputs={tmp_path / 'outputs'}", "run.name=one"]
    words += ["reward.parts=[{use: math}, {use: 'mine.py:rate'}]", "eval.sets.two.data=second.jsonl"]
    words += ["eval.sets.two.reward.function=theirs.py:rate"]
    for name in ("mine", "theirs"):
        (tmp_path / f"{name}.py").write_text("def rate(row, reply): return 1.0")
    bad = "eval.sets.two.reward.function=rewards.py:give_nothing"
    with pytest.raises(ValueError, match=r"^eval\.sets\.two cannot be played: .* held-out row .* None$"):
        preparation.prepare_run(load_config([*words[:-1], bad]))
    assert not (tmp_path / "outputs").exists()
    _, folder, _ = preparation.prepare_run(load_config(words))
    saved = parse_config((folder / "config.yaml").read_text())
    function = saved.eval.sets["two"].reward.function
    assert [saved.reward.parts[1]["use"], function] == [
        f"{tmp_path}/{name}.py:rate" for name in ("mine", "theirs")
    ]
    (folder / ".lock").unlink()  # this process holds it
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    resumed = load_resumed_config(folder, [f"run.resume={folder}"])
    assert preparation.prepare_run(resumed)[0].reward == saved.reward
    lost = {
        "theirs": r"eval\.sets\.two cannot be played: reward\.function",
        "mine": r"reward\.parts\[1\]\.use",
    }
    for name, key in lost.items():
        (folder / ".lock").unlink()
        (tmp_path / f"{name}.py").unlink()
        sys.modules.pop(next(one for one in sys.modules if one.startswith(f"slipstream_file_{name}_")))
        with pytest.raises(ValueError, match=rf"^{key} must name a function that can be imported"):
            preparation.prepare_run(resumed)
