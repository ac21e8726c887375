"""`scripts/preview.sh`: what a run would train on, as a real process and in this one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from template_families import family_tokenizer

from buffers.supply import PromptSupply
from buffers.terms import make_terms
from configs.load import load_config
from slipstream.preparation import resolve_config
from slipstream.preview import main
from slipstream.preview_page import PreviewPage
from slipstream.preview_play import PreviewGroup, PreviewSample, name_rejection
from slipstream.preview_report import list_notes, list_rejected

ROOT = Path(__file__).parents[1]
REWARDS = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

def refuse(row, reply):
    raise KeyError("no such column")

def sleep_on(row, reply):
    with open("sleeping", "w") as file:
        print(os.getpid(), file=file)
    time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: rows in verl's layout, rewards, and a model's configuration and tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i} add {i}? <|im_end|>" + "word " * (i == 7) * 400}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i},
        }
        for i in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sums.parquet")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen2"}')
    family_tokenizer("qwen2p5").save_pretrained(tmp_path / "model")
    return tmp_path


DATASET = ["task=dataset", "data.train=sums.parquet", "model.path=model", "generators.max_model_len=512"]


def start_preview(*arguments: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "slipstream.preview", *arguments],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_without_an_engine_the_runs_first_prompts_get_their_right_answers(folder: Path) -> None:
    overrides = [*DATASET, "reward.function=rewards.py:compute_score"]
    process = start_preview("--no-engine", "--rows", "3", "--json", *overrides)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    shown = json.loads(out)
    config, task = resolve_config(load_config(overrides))
    supply = PromptSupply(make_terms(config))
    assert len(shown["prompts"]) == 3
    for group, prompt in enumerate(shown["prompts"]):
        index = supply.start_group(group, supply.find_prompt(group))
        row = task.make_row("train", index, 0)
        assert prompt["prompt"] == index and prompt["source"] == "sums"
        assert prompt["answer"] == row["reward_model"]["ground_truth"]
        content = row["prompt"][0]["content"]
        assert prompt["text"].endswith(f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n")
        (sample,) = prompt["samples"]
        assert sample["reply"] == prompt["answer"] and sample["reward"] == 1.0
        assert sample["components"] == {"compute_score": 1.0, "compute_score/length": len(prompt["answer"])}
        assert sample["seconds"]["compute_score"] >= 0 and sample["stop"] == "completed"
    assert shown["rejected"] == [
        "1 prompts of data.train sums are longer than data.max_prompt_tokens and are left out"
    ]
    assert not (folder / "outputs").exists()


def test_the_page_shows_prompt_answer_reward_and_what_a_step_trains(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--no-engine", "--rows", "2", *DATASET, "reward.function=rewards.py:compute_score"]
    assert main([*arguments, "learner.groups_per_step=4", "run.steps=8", "learner.samples_per_prompt=2"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "1 of 2 · sums · prompt ", "<|im_start|>assistant", "right answer", "reward 1 ", "compute_score 1",
        "4 of 4", "4 prompts × 2 replies = 8 sequences", "8 steps, 32 prompts, 1.9 epochs", "be rejected",
    ):  # fmt: skip
        assert words in printed, words


def test_held_out_prompts_are_those_of_their_own_sources_and_each_is_shown_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, number, word in (("sums", 3, "short"), ("others", 2, "word " * 400)):
        rows = [{"prompt": f"{name} {i}?", "answer": i} for i in range(number)]
        rows.append({"prompt": f"{name}: {word}", "answer": 0})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = "data.eval=[{path: sums.jsonl}, {path: others.jsonl}]"
    arguments = ["--no-engine", "--json", "--rows", "9", "--split", "eval", *DATASET, held_out]
    assert main([*arguments, "reward.function=exact_match"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(one["source"], one["prompt"]) for one in shown["prompts"]] == [
        ("sums", 0), ("others", 0), ("sums", 1), ("others", 1), ("sums", 2), ("sums", 3)
    ]  # fmt: skip
    for one in shown["prompts"][:-1]:
        assert f"{one['source']} {one['prompt']}?" in one["text"]
    assert [line.partition(" are longer")[0] for line in shown["rejected"][:2]] == [
        "1 prompts of data.train sums", "1 prompts of data.eval others"
    ]  # fmt: skip


def test_a_reward_that_fails_is_shown_with_prompt_and_reply(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--no-engine", "--rows", "1", *DATASET, "reward.function=rewards.py:refuse"]) == 1
    printed, said = capsys.readouterr()
    assert "<|im_start|>user" in printed and "not scored" in printed
    assert "1 of 1 groups (1) would fail" in printed and "Traceback" not in printed + said
    assert "KeyError: 'no such column' (rewards.py, line 8)" in " ".join(printed.split())


def test_a_right_answer_that_no_reward_is_given_for_is_noted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--no-engine", "--rows", "2", *DATASET, "reward.function=format"]) == 0
    assert "no right answer gets a reward above 0" in " ".join(capsys.readouterr().out.split())


def test_of_an_environment_the_first_prompt_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["task=guess_number", "model.path=model", "generators.max_model_len=512"]
    assert main(["--no-engine", "--rows", "2", "--split", "eval", "--json", *arguments]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [prompt["samples"] for prompt in shown["prompts"]] == [[], []]
    assert all("Guess my 3 digits" in prompt["text"] for prompt in shown["prompts"])
    assert shown["sources"] == [{"name": "guess_number", "size": None, "share": 1.0, "first_step": 64}]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["task=nothing"], "task.name must be one of"),
        ([*DATASET, "reward.function=nothing"], "reward.function must be one of"),
        (["task=dataset", "data.train=nowhere.jsonl", "model.path=model"], "data.train must be a file"),
        (["generators.engine=simulated", "learner.engine=simulated"], "generators.engine must be vllm"),
        (["lerner.lr=1"], "lerner.lr must be a configuration key"),
    ],
)
def test_what_no_run_could_begin_with_is_refused_in_its_words(
    arguments: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--no-engine", *arguments]) == 2
    said = capsys.readouterr().err
    assert f"Slipstream cannot show this:\n{sentence}" in said and "Traceback" not in said


def test_ctrl_c_ends_a_preview_and_the_reward_that_hangs(folder: Path) -> None:
    process = start_preview("--no-engine", *DATASET, "reward.function=rewards.py:sleep_on")
    deadline = time.monotonic() + 300
    sleeping = folder / "sleeping"
    while not (sleeping.exists() and sleeping.read_text().endswith("\n")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    worker = psutil.Process(int(sleeping.read_text()))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
    _, alive = psutil.wait_procs([worker], timeout=60)
    assert not alive


@pytest.mark.whole_run
def test_with_the_engine_each_prompt_gets_sampled_replies_and_their_rewards() -> None:
    process = start_preview("--rows", "2", "--samples", "3", "--json", "task=sorting")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    shown = json.loads(out)
    for prompt in shown["prompts"]:
        assert len(prompt["samples"]) == 3 and prompt["answer"] is None
        assert all(1 <= sample["tokens"] <= 16 for sample in prompt["samples"])
        assert all("correct" in sample["components"] for sample in prompt["samples"])
    assert shown["tokens_per_step"] > 0 and not list(Path("/dev/shm").glob("slipstream-preview-*"))


# ---- the parts


def make_group(*rewards: float, stop: str = "completed") -> PreviewGroup:
    samples = [
        PreviewSample(
            tokens=[1, 2],
            sampled=[False, True],
            text="2",
            stop=stop,
            reward=reward,
            components={},
            seconds={},
        )
        for reward in rewards
    ]
    return PreviewGroup(group=0, source="sums", index=0, prompt=[1], samples=samples)


@pytest.mark.parametrize(
    ("rewards", "overrides", "rule"),
    [
        ([1.0, 1.0], ["algo=dapo"], "algo.dynamic_sampling"),
        ([1.0, 0.0], ["algo=dapo"], ""),
        ([1.0], ["algo=dapo"], ""),
        ([1.0, 1.0], [], ""),
        ([1.0, 0.8], ["curriculum.keep=[0.1,0.8]"], "curriculum.keep"),
        ([0.4, 0.0], ["curriculum.keep=[0.1,0.8]"], ""),
        ([], ["algo=dapo"], ""),
    ],
)
def test_a_group_is_rejected_by_the_runs_own_rules(rewards: list, overrides: list, rule: str) -> None:
    assert name_rejection(rewards, load_config(overrides)) == rule


def test_cut_replies_and_equal_rewards_are_said() -> None:
    config = load_config([])
    cut = make_group(0.0, 0.0, stop="max_tokens")
    assert list_rejected(config, [cut], {"sums": 0}) == [
        "2 of 2 replies are cut off (sampling.max_tokens); they are trained as they are"
    ]
    notes = list_notes(config, [cut, make_group(1.0, 0.0)], has_engine=True)
    assert notes == ["the rewards are equal in 1 of 2 groups (1), which so teach nothing"]
    assert list_notes(config, [cut], has_engine=True)[-1] == "every reply has the reward 0"


def test_special_tokens_replies_and_long_texts_can_be_told_apart() -> None:
    tokenizer = family_tokenizer("qwen2p5")
    page = PreviewPage(tokenizer, Console())
    tokens = tokenizer.encode("<|im_start|>user\nadd four<|im_end|>")
    text = page.render_tokens(tokens, [False] * (len(tokens) - 2) + [True, True])
    assert text.plain == "<|im_start|>user\nadd four<|im_end|>"
    styled = {text.plain[span.start : span.end]: span.style for span in text.spans if span.style}
    assert styled["<|im_start|>"] == styled["<|im_end|>"] == "bold cyan"
    assert styled[" four"] == "green"
    many = tokenizer.encode("word " * 5000)
    longer = page.render_tokens(many, [False] * len(many))
    assert len(longer.plain) < 3100 and "… 22,000 characters …" in longer.plain
