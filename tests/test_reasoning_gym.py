"""Every dataset of reasoning-gym: prompts for both splits that any process makes alike, and scores."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Collection
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from configs.plugins import KeyRefused
from generators import splits, task_versions
from generators.prompt_trial import list_tasks, try_prompts
from generators.task import Prompt
from generators.task_versions import compare_versions, read_versions
from generators.tasks import load_task
from generators.tasks.reasoning_gym import CURRICULA, NAMES, RESEEDED, GymSource, Task, make_gym_config
from generators.user_code.task_kinds import read_sources

NO_SOLUTION = {"boxnet", "rush_hour"}
"""Datasets that tell no right answer, so that nothing can be said here of a score of 1."""
SLOW_TO_HOLD_OUT = {"advanced_geometry", "arc_agi", "futoshiki", "knight_swap", "rearc", "zebra_puzzles"}
"""Datasets that take seconds for the eight questions or so of which one is held out."""
REFUSED_LEVELS = {
    ("rubiks_cube", 4),
    *(("caesar_cipher", level) for level in (2, 3)),
    *(("knight_swap", level) for level in range(5)),
    ("modulo_grid", 1),
    *(("survo", level) for level in (2, 3)),
}
"""Levels whose settings the library itself does not accept."""

WALK = """
import json, random, sys
from generators.tasks.reasoning_gym import NAMES, Task
random.seed(int(sys.argv[1]))
for name in NAMES:
    task = Task(name=name)
    found = {"name": name, "texts": [], "rewards": []}
    for split in ["train"] if name in json.loads(sys.argv[2]) else ["train", "eval"]:
        prompt = task.make_prompt(split, 3, 7)
        found["texts"].append(prompt.text)
        solution = task._gym_sources[0].find_solution(prompt.entry[1])
        if solution is not None:
            found["rewards"].append(task.score_response(prompt, f"<answer>{solution}</answer>").reward)
    print("\\nFOUND" + json.dumps(found), flush=True)
"""


def walk_datasets(seed: int, *, trains_only: Collection[str]) -> "subprocess.Popen[str]":
    """Makes prompts of all datasets in a process whose sets are ordered as a worker's are."""
    return subprocess.Popen(
        [sys.executable, "-c", WALK, str(seed), json.dumps(sorted(trains_only))],
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def read_found(process: "subprocess.Popen[str]") -> dict[str, Any]:
    text, _ = process.communicate(timeout=1200)
    lines = [line.removeprefix("FOUND") for line in text.splitlines() if line.startswith("FOUND")]
    return {one["name"]: one for one in map(json.loads, lines)}


def test_each_dataset_makes_the_same_prompts_everywhere_and_scores_its_own_answer_with_one() -> None:
    walks = [walk_datasets(1, trains_only=SLOW_TO_HOLD_OUT), walk_datasets(2, trains_only=NAMES)]
    first, second = map(read_found, walks)
    assert sorted(first) == NAMES, "all of the library"
    for name, found in first.items():
        assert found["texts"][:1] == second[name]["texts"], name
        assert len(set(found["texts"])) == len(found["texts"]), f"{name}: a prompt is in both splits"
        if name in NO_SOLUTION:
            assert found["rewards"] == []
        else:
            assert found["rewards"] == [1.0] * len(found["texts"]), name


def test_each_level_of_each_curriculum_is_accepted_or_refused_by_name() -> None:
    refused = set()
    for name in set(NAMES) & set(CURRICULA):
        attributes = CURRICULA[name]().attributes.values()
        for level in range(max(len(one.levels) for one in attributes)):
            try:
                make_gym_config("task.args", name, {}, level)
            except KeyRefused as error:
                assert f"settings that {name} accepts, got {{}} at level {level}" in str(error)
                refused.add((name, level))
    assert refused <= REFUSED_LEVELS


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "leg_counting", "word_sorting", "base_conversion"])
def test_each_level_of_quick_datasets_makes_prompts_that_score_one(name: str) -> None:
    levels = range(max(len(one.levels) for one in CURRICULA[name]().attributes.values()))
    task = Task(name=name, levels=list(levels))
    assert [(one.name, one.level) for one in task.sources] == [(f"{name}@{n}", n) for n in levels]
    for split in ("train", "eval"):
        for index in range(2 * len(levels)):
            prompt = task.make_prompt(split, index, 0)
            reply = f"<answer>1</answer> no: <answer> {prompt.entry[1]['answer']} </answer>"
            assert task.score_response(prompt, reply).reward == 1.0


def test_a_mixture_names_source_and_row_by_the_index() -> None:
    datasets = [
        {"name": "gcd", "weight": 2, "size": 5},
        {"name": "lcm", "settings": {"min_numbers": 3, "max_numbers": 3}, "label": "three"},
        {"name": "chain_sum", "levels": [0, 2]},
    ]
    task = load_task("reasoning_gym", {"datasets": datasets, "answer": "reply"})
    sources = read_sources(task)
    assert [(one.name, one.size, one.weight, one.level) for one in sources] == [
        ("gcd", 5, 2, None), ("three", None, 1.0, None),
        ("chain_sum@0", None, 1.0, 0), ("chain_sum@2", None, 1.0, 2),
    ]  # fmt: skip
    words = ["GCD", "LCM", "arithmetic", "arithmetic"]
    for index in range(12):
        assert words[index % 4] in task.make_prompt("train", index, 0).text
    alone = load_task("reasoning_gym", {"name": "gcd", "answer": "reply"})
    assert task.make_prompt("train", 8, 0).text == alone.make_prompt("train", 2, 0).text, "row 2"


def test_no_held_out_question_is_a_training_question_though_few_exist() -> None:
    task = Task(name="chain_sum", settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    texts = {split: {task.make_prompt(split, n, 0).text for n in range(400)} for split in ("train", "eval")}
    assert len(texts["train"]) > 100 and len(texts["eval"]) > 10 and not texts["train"] & texts["eval"]


def test_only_the_last_tag_counts_and_a_reply_without_one_scores_zero() -> None:
    tagged, whole = Task(name="gcd"), Task(name="gcd", answer="reply")
    prompt = tagged.make_prompt("train", 0, 0)
    answer = prompt.entry[1]["answer"]
    assert prompt.text.endswith("between <answer> and </answer> tags.")
    assert tagged.score_response(prompt, answer).reward == 0.0
    assert tagged.score_response(prompt, answer).components == {"answered": 0.0, "unscored": 0.0}
    assert tagged.score_response(prompt, f"<answer>{answer}</answer><answer>-3</answer>").reward < 1.0
    assert whole.make_prompt("train", 0, 0).text + "\n\n" in prompt.text + "\n\n"
    assert whole.score_response(prompt, f" {answer}\n").reward == 1.0


def test_an_answer_that_the_library_fails_to_read_scores_zero_and_is_counted() -> None:
    task = Task(name="prime_factorization")
    prompt = task.make_prompt("train", 0, 0)
    score = task.score_response(prompt, "<answer>1,2\n3,4</answer>")
    assert (score.reward, score.components) == (0.0, {"answered": 1.0, "unscored": 1.0})


@pytest.mark.parametrize(
    ("name", "cheat"), [("coin_flip", "0"), ("complex_arithmetic", "nan"), ("game_of_life_halting", "x")]
)
def test_what_the_library_rewards_whatever_the_question_scores_zero(name: str, cheat: str) -> None:
    task, paid = Task(name=name, answer="reply"), 0.0
    for index in range(8):
        prompt = task.make_prompt("train", index, 0)
        paid += task._gym_sources[0].dataset.score_answer(cheat, prompt.entry[1])
        assert task.score_response(prompt, cheat).reward == 0.0
        assert task.score_response(prompt, str(prompt.entry[1]["answer"])).reward == 1.0
    assert paid > 4.0, "the library is mended, and the rule here can go"


def test_solved_examples_are_right_and_are_refused_where_nobody_knows_them() -> None:
    task = Task(name="chain_sum", levels=[0, 1], answer="reply")
    for question, answer in islice(task.solved_examples("train", seed=0), 20):
        numbers = question.split(":")[1].strip(" =")
        assert len(numbers.split()) == 3, "two terms: of levels, the lowest"
        assert sum(int(n) for n in numbers.replace("- ", "-").replace("+ ", "").split()) == int(answer)
    with pytest.raises(ValueError, match="model.path must be a folder for a dataset .* got tiny with boxnet"):
        next(Task(name="boxnet").solved_examples("train", seed=0))


def test_a_number_without_a_question_is_passed_over_and_leaves_no_trace() -> None:
    """word_ladder lowers its size where a number has no question: later ones would have none either."""
    (source,) = Task(name="word_ladder", settings={"min_chain_length": 7, "max_chain_length": 7})._gym_sources
    first = [source.draw_entry(random.Random(seed))["question"] for seed in range(3)]
    again = [source.draw_entry(random.Random(seed))["question"] for seed in (2, 1, 0)]
    assert first == again[::-1]


def test_two_difficulties_of_codeio_keep_their_own_rows() -> None:
    task = Task(datasets=[{"name": "codeio", "level": 1}, {"name": "codeio", "level": 3}])
    easy, hard = task._gym_sources

    def list_tasks(source: GymSource) -> set[str]:
        return {row["task_description"] for row in source.rows}

    assert not list_tasks(easy) & list_tasks(hard)
    hard.draw_entry(random.Random(0))
    question = easy.draw_entry(random.Random(0))["question"]
    assert any(description in question for description in list_tasks(easy))


def test_global_random_numbers_go_on_as_if_nothing_were_drawn() -> None:
    task = Task(name="pool_matrix")
    random.seed(5)
    wanted = random.random()
    random.seed(5)
    task.make_prompt("train", 0, 0)
    assert random.random() == wanted


@pytest.mark.parametrize("name", sorted(RESEEDED))
def test_datasets_that_draw_all_questions_at_once_have_many(name: str) -> None:
    task = Task(name=name)
    assert len({task.make_prompt("train", index, 0).text for index in range(12)}) > 9


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"name": "chain_sun"}, r"task.args.name must be a dataset .*nearest: chain_sum.*got 'chain_sun'"),
        ({"name": "composite"}, "task.args.name must be a dataset of reasoning-gym.*got 'composite'"),
        ({}, "task.args must have either name or datasets, got none"),
        ({"name": "gcd", "datasets": [{"name": "gcd"}]}, "either name or datasets, got both"),
        (
            {"name": "gcd", "settings": {"max_number": 3}},
            "settings of gcd .nearest: .*max_numbers",
        ),
        ({"name": "gcd", "settings": {"seed": 3}}, "settings must be settings of gcd .*got 'seed'"),
        ({"name": "gcd", "settings": {"max_numbers": 1}}, "must have settings that gcd accepts, got .*1"),
        ({"name": "gcd", "levels": [99]}, r"levels of gcd must be in 0..\d+, got 99"),
        ({"name": "gcd", "levels": 0}, "levels must be a list of levels, got 0"),
        ({"name": "acre", "levels": [0]}, "levels must stay away from acre, which has no curriculum"),
        ({"name": "chain_sum", "levels": [0], "settings": {"max_terms": 9}}, "leave to the level.*max_terms"),
        ({"name": "gcd", "answer": "last"}, "task.args.answer must be tag or reply, got 'last'"),
        ({"datasets": []}, r"task.args.datasets must be a list of one dataset or more, got \[\]"),
        ({"datasets": [{"name": "gcd", "wieght": 1}]}, r"datasets\[0\] must have no keys but name, .*wieght"),
        ({"datasets": [{"name": "gcd"}], "levels": [1]}, "must stand in the entries of task.args.datasets"),
    ],
)
def test_what_cannot_be_is_refused_by_name(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load_task("reasoning_gym", args)


def test_the_entry_of_a_prompt_can_be_made_again() -> None:
    task = Task(name="gcd")
    again = task.make_prompt("eval", 5, 1)
    assert isinstance(again, Prompt) and again == Task(name="gcd").make_prompt("eval", 5, 1)


TINY_GCD = "{name: gcd, settings: {min_numbers: 2, max_numbers: 2, min_value: 1, max_value: 2}}"


def test_settings_that_leave_nothing_to_hold_out_are_refused_at_the_start() -> None:
    """The draws end, or their time does, whichever is first."""
    config = load_config(
        [
            "task=reasoning_gym",
            f"task.args.datasets=[{{name: lcm}}, {TINY_GCD}]",
            "episodes.reset_timeout_s=4",
        ]
    )
    with pytest.raises(ValueError, match=r"task\.args must leave each source a prompt for .*none of 'gcd'"):
        try_prompts(config)


def test_tasks_that_are_sources_of_data_are_tried_for_the_splits_that_they_serve() -> None:
    few = f"{{name: few, task: reasoning_gym, args: {TINY_GCD}}}"
    for words, tried in (
        ([], {"the args of 'few' in data.train": ("train", "eval")}),
        (["eval.prompts=0"], {"the args of 'few' in data.train": ("train",)}),
        (
            ["data.eval=[{task: gcd}, {path: a.jsonl}]"],
            {"the args of 'few' in data.train": ("train",), "the args of 'gcd' in data.eval": ("eval",)},
        ),
    ):
        config = load_config(["task=dataset", f"data.train={few}", *words])
        assert {one.key: tuple(one.splits) for one in list_tasks(config)} == tried


def test_a_draw_without_end_names_the_dataset_and_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "MAX_DRAWS", 20)
    settings = {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 2}
    with pytest.raises(ValueError, match="found none in 20 draws .gcd with .*max_value=2"):
        Task(name="gcd", settings=settings).make_prompt("eval", 0, 0)


def test_another_version_of_the_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"task": "reasoning_gym", "args": {"name": "gcd"}}
    mixture = load_task("dataset", {"data": {"train": row}})
    recorded = read_versions(mixture)
    assert recorded == read_versions(Task(name="gcd")) == {"reasoning-gym": version("reasoning-gym")}
    assert not list(compare_versions(recorded))
    monkeypatch.setattr(task_versions, "version", lambda package: "9.9")
    (warning,) = compare_versions(recorded)
    assert f"version 9.9 here, and {recorded['reasoning-gym']} when the run began" in warning
