"""Tasks, and the tiny model that learns them."""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.load import load_config
from generators.task import Prompt, PromptSource, Score
from generators.tasks import load_task
from generators.tasks.sorting import Task
from generators.user_code.task_kinds import read_sources
from learners import tiny, tiny_cache
from slipstream import preparation


class Echo:
    """A task of a user's own."""

    name = "echo"

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        return Prompt(f"{split} {index}")

    def score_response(self, prompt: Prompt, response: str) -> Score:
        return Score(float(response == prompt.text))


@pytest.fixture(params=["arithmetic", "sorting"])
def shipped(request: pytest.FixtureRequest) -> Any:
    return load_task(request.param, {})


def test_a_prompt_is_the_same_wherever_it_is_made_and_differs_by_index_and_seed(shipped: Any) -> None:
    other = type(shipped)()
    texts = {(i, s): shipped.make_prompt("train", i, s).text for i in range(20) for s in range(2)}
    assert texts == {(i, s): other.make_prompt("train", i, s).text for i, s in texts}
    assert len(set(texts.values())) > 30


def test_training_and_evaluation_never_share_a_question(shipped: Any) -> None:
    train, held_out = (
        {shipped.make_prompt(split, i, 0).text for i in range(500)} for split in ("train", "eval")
    )
    assert not train & held_out
    assert len(held_out) > 40
    assert not {question for question, _ in islice(shipped.solved_examples("train", 0), 500)} & held_out


def test_a_split_that_is_not_one_is_refused(shipped: Any) -> None:
    with pytest.raises(ValueError, match="split must be train or eval, got 'test'"):
        shipped.make_prompt("test", 0, 0)


def test_the_right_sum_scores_one_and_anything_else_nothing() -> None:
    task = load_task("arithmetic", {})
    prompt = task.make_prompt("train", 3, 0)
    answer = prompt.entry["answer"]
    assert task.score_response(prompt, f" {answer}\n") == Score(1.0, {"correct": 1.0})
    for wrong in (str(int(answer) + 1), "", "banana", f"{answer}{answer}", "ÿ"):
        assert task.score_response(prompt, wrong).reward == 0.0


def test_numbers_in_order_score_one_and_anything_else_nothing() -> None:
    task, directions = Task(numbers=4, low=-3, high=12), set()
    for index in range(40):
        prompt = task.make_prompt("train", index, 0)
        _, *numbers, direction = prompt.text.rstrip(".").split()
        right = sorted(map(int, numbers), reverse=direction == "descending")
        directions.add(direction)
        assert len(right) == 4 and -3 <= min(right) <= max(right) <= 12
        assert task.score_response(prompt, " ".join(map(str, right)) + "\n") == Score(1.0, {"correct": 1.0})
        nearly = [
            *right[:-1],
            right[-1] + (1 if direction == "ascending" else -1),
        ]  # in order, and not what was asked for
        for wrong in (
            right[::-1] if len(set(right)) > 1 else [],
            right[1:],
            nearly,
            [*right, right[-1]],
            [],
            ["banana"],
        ):
            assert task.score_response(prompt, " ".join(map(str, wrong))).reward == 0.0
    assert directions == {"ascending", "descending"}


def test_the_questions_of_the_default_task_cannot_be_learned_by_heart() -> None:
    task = Task()
    assert len({task.make_prompt("train", i, 0).text for i in range(4000)}) > 3950


def test_a_task_may_live_anywhere() -> None:
    assert load_task(f"{__name__}:Echo", {}).score_response(Prompt("a"), "a").reward == 1.0


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("nope", {}, r"task.name must be one of .*'arithmetic', .*'sorting'.*\].* got 'nope'"),
        (
            "no.such.module:Task",
            {},
            "task.name must name a class that can be imported, got 'no.such.module:Task'",
        ),
        (":x", {}, "task.name must name a class that can be imported, got ':x'"),
        ("os:path", {}, "task.name must name a class, got 'os:path', which is a module"),
        (
            "arithmetic",
            {"digitz": 2},
            "task.args must suit arithmetic, got {'digitz': 2}",
        ),
    ],
)
def test_a_task_that_cannot_be_is_refused(name: str, args: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_task(name, args)


def test_the_tiny_model_is_made_for_tasks_that_come_with_solutions_only() -> None:
    with pytest.raises(
        ValueError,
        match="model.path must be a folder for a task without solved questions .* tiny with "
        "task.name=test_tasks:Echo",
    ):
        preparation.resolve_model(load_config(["task.name=test_tasks:Echo"]))


def test_the_tiny_model_loads_with_stock_transformers_and_starts_where_learning_is_possible(
    tiny_model: Path,
) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_model),
        AutoTokenizer.from_pretrained(tiny_model),
    )
    text = "Grüße, 12 + 7 \n 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer.encode("Sort 3 7 1 9 4 2 ascending.")) == 8
    solved = list(islice(Task().solved_examples("eval", 1), 256))
    with torch.no_grad():
        reward = tiny._measure_reward(model, *tiny._encode_pairs(tokenizer, solved))
    assert 0.15 <= reward <= 0.45, (
        "the warm start ends by a measured score, whatever the seed and the processor"
    )


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None], Path]:
    """Makes a tiny model with a few steps only, under this SLIPSTREAM_TINY_SEED."""
    for name, value in {"STEPS": 4, "LOOK_EVERY": 2, "TARGET": 0.0}.items():
        monkeypatch.setattr(tiny, name, value)

    def make(seed: str | None) -> Path:
        monkeypatch.delenv(tiny.SEED_VARIABLE, raising=False) if seed is None else monkeypatch.setenv(
            tiny.SEED_VARIABLE, seed
        )
        return tiny_cache.prepare_tiny_model(Task().solved_examples("train", seed=0), tmp_path)

    return make


def test_another_seed_is_another_tiny_model_and_no_seed_is_seed_zero(
    hasty: Callable[[str | None], Path],
) -> None:
    none, zero, one, again = hasty(None), hasty("0"), hasty("1"), hasty("1")
    assert none == zero != one == again
    first, second = (load_file(folder / "model.safetensors") for folder in (zero, one))
    drawn = [name for name in first if "norm" not in name]
    assert all((first[name] - second[name]).abs().mean() > 0.01 for name in drawn), "they began elsewhere"


@pytest.mark.parametrize("seed", ["-1", "1.5", "two", "", "4294967296", "²"])
def test_a_seed_of_the_tiny_model_that_is_no_seed_is_refused(
    hasty: Callable[[str | None], Path], seed: str
) -> None:
    message = f"SLIPSTREAM_TINY_SEED must be a whole number from 0 to 4294967295, got '{seed}'"
    with pytest.raises(ValueError, match=re.escape(message)):
        hasty(seed)


def test_a_tiny_model_that_does_not_learn_is_refused(
    hasty: Callable[[str | None], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tiny, "TARGET", 0.9)
    with pytest.raises(
        RuntimeError,
        match="the tiny model must answer 0.9 of the questions after at most 4 steps, got 0.00: .* another "
        "SLIPSTREAM_TINY_SEED",
    ):
        hasty("0")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tiny-")], "it is not kept"


def test_of_two_processes_that_need_the_model_at_once_one_makes_it_and_the_other_waits(
    hasty: Callable[[str | None], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: list[Path] = []
    make = tiny.make_tiny_model
    monkeypatch.setattr(
        tiny,
        "make_tiny_model",
        lambda *arguments: (makers.append(arguments[-1]), time.sleep(0.5), make(*arguments)),
    )
    with ThreadPoolExecutor(2) as pool:  # each opens the lock's file for itself, as two processes do
        first, second = pool.map(hasty, [None, None])
    assert first == second and len(makers) == 1


def test_the_second_call_finds_the_model_in_the_cache(tiny_model: Path) -> None:
    began = time.monotonic()
    assert tiny_cache.prepare_tiny_model(Task().solved_examples("train", seed=0)) == tiny_model
    assert time.monotonic() - began < 5


def test_the_sources_of_a_task_are_read_and_wrong_ones_are_named() -> None:
    def read(*sources: Any) -> list[PromptSource]:
        return read_sources(SimpleNamespace(sources=sources))

    assert read_sources(SimpleNamespace()) == []
    good = [PromptSource("a", 3, 2.0), PromptSource("b", None, 1, level=4)]
    assert read(*good) == good
    for sources, complaint in [
        ((PromptSource("a"), PromptSource("a")), r"sources\[1\].name must be a text that no other"),
        ((PromptSource("a", weight=0),), r"sources\[0\].weight must be a finite number above 0, got 0"),
        ((PromptSource("a", weight=float("nan")),), r"sources\[0\].weight must .* got nan"),
        ((PromptSource("a", size=0),), r"sources\[0\].size must be a whole number above 0"),
        ((PromptSource("a\nb"),), r"sources\[0\].name must have 1 to 200 printable .*, got 'a\\nb'"),
        ((PromptSource("a" * 201),), r"sources\[0\].name must have 1 to 200 printable characters"),
        ((PromptSource("a", made_of=1),), r"made_of must be a text, got 1"),  # type: ignore[arg-type]
        (({"name": "a"},), r"must be a list of generators.task.PromptSource"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            read(*sources)
