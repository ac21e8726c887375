"""The catalogue of benchmarks on made-up rows in the column layouts of the hub."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from configs.benchmarks import ANSWER_LETTER, BENCHMARKS
from generators.data.forms import FORMS, LETTERS, shape_gpqa
from generators.data.rows import shape_row
from generators.rewards.composition import make_reward

GPQA_ROW = {
    "Record ID": "rec1", "Question": "Which of these is a metal?", "Correct Answer": "iron\n",
    "Incorrect Answer 1": "neon", "Incorrect Answer 2": "sulfur", "Incorrect Answer 3": "argon",
    "Explanation": "It conducts.", "Subdomain": "Chemistry",
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "question": "Ann has 1,000 pens and buys 234. How many has she?",
        "answer": "1,000 + 234 = <<1000+234=1234>>1,234 pens.\n#### 1,234",
    },
    "math500": {
        "problem": "What is $\\frac{1}{4} + \\frac{1}{4}$?", "solution": "It is $\\boxed{\\frac{1}{2}}$.",
        "answer": "\\frac{1}{2}", "subject": "Prealgebra", "level": 1, "unique_id": "test/p/1.json",
    },
    "aime24": {
        "id": 60, "problem": "Find $2^3$.", "solution": "Long.", "answer": "008",
        "url": "https://x", "year": "2024",
    },
    "aime25": {"problem_idx": 1, "problem": "Find $2^3$.", "answer": 8, "problem_type": ["Algebra"]},
    "aime26": {"problem_idx": 1, "problem": "Find $2^3$.", "answer": 8},
    "amc23": {"id": 0, "question": "Find $3^3$.", "answer": 27.0, "url": "https://x"},
    "mmlu_pro": {
        "question_id": 1, "question": "Which is even?", "options": ["1", "3", "4", "N/A"], "answer": "C",
        "answer_index": 2, "cot_content": "", "category": "math", "src": "x",
    },
    "gpqa": GPQA_ROW,
    "gpqa_diamond": GPQA_ROW,
}  # fmt: skip
RIGHT = {
    "gsm8k": "So she has \\boxed{1234} pens.", "math500": "Thus \\boxed{0.5}.", "aime24": "\\boxed{8}",
    "aime25": "\\boxed{008}", "aime26": "\\boxed{8}", "amc23": "It is \\boxed{27}.",
    "mmlu_pro": "The answer is not A.\nAnswer: C",
}  # fmt: skip
WRONG = {
    "gsm8k": "\\boxed{1233}", "math500": "\\boxed{2}", "aime24": "\\boxed{9}", "aime25": "\\boxed{9}",
    "aime26": "no idea", "amc23": "\\boxed{28}", "mmlu_pro": "Answer: A",
}  # fmt: skip


def find_right_letter(prompt: str) -> str:
    (letter,) = re.findall(r"^([A-D])\. iron$", prompt, re.MULTILINE)
    return str(letter)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_asks_and_scores_rows_in_its_own_columns(name: str) -> None:
    benchmark = BENCHMARKS[name]
    assert set(benchmark.columns) <= ROWS[name].keys()
    row = shape_row(ROWS[name], form=benchmark.settings["form"])
    reward = make_reward(benchmark.settings["reward"])
    letter = find_right_letter(row["prompt"]) if name.startswith("gpqa") else ""
    right = RIGHT.get(name, f"I think so.\n\nAnswer: {letter}")
    wrong = WRONG.get(name, f"Answer: {'A' if letter != 'A' else 'B'}")
    assert reward.rate_reply(row, right).reward == 1.0
    assert reward.rate_reply(row, wrong).reward == 0.0
    assert reward.rate_reply(row, "").reward == 0.0
    question = str(row.get("question") or row.get("problem") or row.get("Question"))
    assert question in row["prompt"] and str(row["ground_truth"])


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("value", [None, 3])
def test_a_row_that_lacks_a_column_is_refused_by_its_name(name: str, value: object) -> None:
    benchmark = BENCHMARKS[name]
    for column in benchmark.columns:
        if column == "answer" and benchmark.settings["form"] == "problem" and value is not None:
            continue
        with pytest.raises(ValueError, match=rf"{column}|question"):
            shape_row({**ROWS[name], column: value}, form=benchmark.settings["form"])


def test_choices_of_gpqa_stand_in_an_order_that_depends_on_the_row_alone() -> None:
    first, second = shape_gpqa(GPQA_ROW), shape_gpqa(dict(reversed(GPQA_ROW.items())))
    assert first["prompt"] == second["prompt"] and first["ground_truth"] == second["ground_truth"]
    places = [
        shape_gpqa({**GPQA_ROW, "Question": f"Question {number}"})["ground_truth"] for number in range(400)
    ]
    # Each of four letters about 100 times; five standard deviations are 43.
    assert all(57 < places.count(letter) < 143 for letter in LETTERS[:4])


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("Answer: C", "C"), ("**Answer: C**", "C"), ("Answer: **C**", "C"), ("Answer: (C)", "C"),
        ("the answer is (C).", "C"), ("ANSWER: $C$", "C"), ("Answer: A\nNo.\nAnswer: B", "B"),
        ("The answer is a riddle", None), ("C", None), ("Answer: Cat", None), ("Answer:\nD", "D"),
    ],
)  # fmt: skip
def test_the_letter_of_a_reply_is_found(reply: str, letter: str | None) -> None:
    found = re.findall(ANSWER_LETTER, reply)
    assert (found[-1] if found else None) == letter


def test_rows_of_a_form_can_be_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from generators.tasks.dataset import Task

    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "rows.jsonl"
    rows = [{"question": f"What is 2 + {n}?", "answer": f"Add.\n#### {2 + n}"} for n in range(20)]
    file.write_text("\n".join(map(json.dumps, rows)))
    task = Task(data={"train": str(file), "eval": str(file), "form": "gsm8k"}, reward={"function": "math"})
    prompt = task.make_prompt("eval", 3, seed=0)
    assert prompt.text.startswith("What is 2 + 3?") and "\\boxed{}" in prompt.text
    assert task.score_response(prompt, "\\boxed{5}").reward == 1.0


def test_an_unknown_form_is_refused_by_name() -> None:
    from generators.data.sources import read_sources

    with pytest.raises(ValueError, match=r"data.form must be one of gsm8k, problem, .* got 'gsm9k'"):
        read_sources({"train": "x.parquet", "form": "gsm9k"}, "train")
    assert {benchmark.settings["form"] for benchmark in BENCHMARKS.values()} == set(FORMS)


def test_the_page_lists_each_benchmark_as_the_catalogue_has_it() -> None:
    page = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text()
    for name, benchmark in BENCHMARKS.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        told = [benchmark.settings["data"], benchmark.title, *benchmark.columns]
        assert all(one in line for one in told) and f"| {benchmark.rows:,} |" in line
        assert f"| {benchmark.settings.get('samples', 1)} |" in line
