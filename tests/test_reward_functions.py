"""Reward functions of every signature, each in a file as its users write it, called in worker processes."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from generators.environment import EpisodeRecord
from generators.rewards.composition import PartFailed, make_reward
from generators.score_checks import read_score, read_scores
from generators.task import Prompt, Score
from generators.user_code.errors import CallFailed
from generators.user_code.pool import UserCodePool, WorkerLimits
from generators.user_code.user_worker import UserWorker

FILES = Path(__file__).parent / "reward_files"
CHAT = [{"role": "user", "content": "2 + 2?"}]
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
}
TRL_ROW = {"prompt": CHAT, "answer": "4", "kind": "math"}


Case = tuple[dict, dict, Sequence[str]]
"""A row, a section `reward`, and the replies of a group."""


class RewardTask:
    """Rows and rewards, as `task=dataset` has them: the prompt of each index is a case."""

    name = "reward_task"
    needs_tokens = True

    def __init__(self, cases: Sequence[Case]) -> None:
        self._rows = [row for row, _, _ in cases]
        self._parts = [make_reward(reward) for _, reward, _ in cases]

    def make_row(self, split: str, index: int, seed: int) -> dict:
        return self._rows[index] | {"case": index}

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        return Prompt("2 + 2?", self.make_row(split, index, seed))

    def score_response(self, prompt: Prompt, response: str) -> Score:
        return self._parts[prompt.entry["case"]].rate_reply(prompt.entry, response)

    def score_group(self, episodes: Sequence[EpisodeRecord]) -> list[Score] | None:
        parts = self._parts[episodes[0].row["case"]]
        return parts.score_group(episodes) if parts.rates_groups else None


def score_in_worker(*cases: Case) -> list[list[Score]]:
    """Scores the groups as a generator does, in one worker: each reply alone, and then all of them."""

    async def score_all() -> list[list[Score]]:
        args = {"cases": [list(case) for case in cases]}
        pool = await UserCodePool.open(f"{__name__}:RewardTask", args, WorkerLimits(max_workers=1))
        try:
            worker = await pool.take_worker()
            return [await score_group(worker, index, case[2]) for index, case in enumerate(cases)]
        finally:
            await pool.close()

    return asyncio.run(score_all())


async def score_group(worker: UserWorker, index: int, replies: Sequence[str]) -> list[Score]:
    place = ["train", index, 0]
    scores = [
        read_score(await worker.call("score_response", [*place, reply], 60.0, "s")) for reply in replies
    ]
    records = [
        {
            "messages": [*CHAT, {"role": "assistant", "content": reply}],
            "reward": score.reward,
            "components": score.components,
            "stop": "completed",
            "num_tokens": 3,
            "tokens": [1, 2, 3],
        }
        for reply, score in zip(replies, scores, strict=True)
    ]
    found = await worker.call("score_group", [*place, records], 60.0, "s")
    return read_scores(found, len(replies)) or scores


def name_file(name: str) -> str:
    file, _, function = name.partition(":")
    return f"{FILES / file}.py:{function}"


FORMS: list[tuple[str, dict, list[str], list[float]]] = [
    ("verl_style:compute_score", VERL_ROW, ["So #### 4", "#### 5", "4"], [1.0, 0.0, 0.0]),
    ("verl_style:compute_score_later", VERL_ROW, ["So #### 4", "4"], [1.0, 0.0]),
    ("verl_style:compute_score_of_shipped_form", VERL_ROW, ["So #### 4", "4"], [1.0, 0.0]),
    ("verl_style:compute_score_of_geometry", VERL_ROW, [r"\boxed{4}", "4"], [1.0, 0.0]),
    ("verl_style:compute_score_batch", VERL_ROW, ["So #### 4", "#### 5"], [1.0, 0.0]),
    ("trl_style:correctness_reward_func", TRL_ROW, ["<answer>4</answer>", "4!"], [2.0, 0.0]),
    ("trl_style:format_reward_func", TRL_ROW, ["<think>a</think><answer>4</answer>", "4"], [1.0, 0.0]),
    ("trl_style:length_reward_func", TRL_ROW, ["4", "44"], [3.0, 3.0]),
    ("trl_style:text_reward_func", {"prompt": "2?", "ground_truth": "4"}, ["24", "4"], [1.0, 0.0]),
    ("trl_style:math_only_reward_func", TRL_ROW, ["4", "5"], [1.0, 0.0]),
    ("trl_style:best_of_group_reward_func", TRL_ROW, ["long", "s", "longer"], [0.0, 1.0, 0.0]),
    ("own_style:rate_reply", TRL_ROW, ["4", "5"], [1.0, 0.0]),
    ("own_style:rate_later", TRL_ROW, ["four", ""], [4.0, 0.0]),
    ("own_style:rank_replies", TRL_ROW, ["long", "s", "longer"], [1.0, 0.0, 2.0]),
    ("own_style:grade", TRL_ROW, ["4"], [0.5]),
]


def test_a_file_of_each_signature_runs_unchanged() -> None:
    cases = [(row, {"function": name_file(function)}, replies) for function, row, replies, _ in FORMS]
    for (function, _, _, rewards), scores in zip(FORMS, score_in_worker(*cases), strict=True):
        assert [score.reward for score in scores] == rewards, function


def test_figures_of_dicts_and_of_trls_logs_are_on_the_record_and_texts_are_not() -> None:
    (verl,), (_, trl) = score_in_worker(
        (VERL_ROW, {"function": name_file("verl_style:compute_score")}, ["#### 4"]),
        (TRL_ROW, {"function": name_file("trl_style:math_only_reward_func")}, ["4", "five"]),
    )
    assert {name: value for name, value in verl.components.items() if "seconds" not in name} == {
        "compute_score": 1.0, "compute_score/acc": 1.0, "compute_score/index": 7.0,
    }  # fmt: skip
    assert {name: value for name, value in trl.components.items() if "seconds" not in name} == {
        "math_only_reward_func": 0.0,
        "math_only_reward_func/share_of_math": 1.0,
        "math_only_reward_func/characters": 4.0,
    }


def test_arguments_reach_the_function_and_take_the_place_of_columns() -> None:
    found: list[tuple[str, dict, float]] = [
        ("verl_style:compute_score", {"format_score": 0.25}, 0.25),
        (
            "verl_style:compute_score_of_shipped_form",
            {"method": "flexible", "score": 3, "format_score": 1},
            1,
        ),
        ("own_style:rate_reply", {"bonus": 0.5}, 0.5),
        ("trl_style:correctness_reward_func", {"answer": ["#### 5"]}, 2.0),
    ]
    row = VERL_ROW | TRL_ROW
    cases = [
        (row, {"function": name_file(function), "args": args}, ["#### 5"]) for function, args, _ in found
    ]
    rewards = [score.reward for (score,) in score_in_worker(*cases)]
    assert rewards == [reward for _, _, reward in found]


def test_parts_of_replies_and_of_groups_add_up_and_one_may_ask_for_another() -> None:
    parts = [
        {"name": "right", "use": name_file("own_style:rate_reply")},
        {"name": "rank", "use": name_file("own_style:rank_replies"), "weight": 10, "only_if": "right"},
        {"name": "short", "use": name_file("trl_style:best_of_group_reward_func"), "weight": 100},
    ]
    (scores,) = score_in_worker((TRL_ROW, {"parts": parts}, ["4", "", "555"]))
    assert [score.reward for score in scores] == [1.0 + 10, 100.0, 0.0]
    assert [score.components["rank"] for score in scores] == [1.0, 0.0, 2.0]
    assert {"seconds/right", "seconds/rank", "seconds/short"} <= scores[0].components.keys()


def test_a_function_of_trls_that_says_nothing_about_a_reply_counts_nothing() -> None:
    only, row = name_file("trl_style:math_only_reward_func"), TRL_ROW | {"kind": "code"}
    parts = [{"use": name_file("own_style:rate_reply")}, {"use": only, "weight": 7}]
    ((score,),) = score_in_worker((row, {"parts": parts}, ["4"]))
    assert score.reward == 1.0 and "math_only_reward_func" not in score.components
    with pytest.raises(CallFailed, match="must have something to say .* None of math_only_reward_func about"):
        score_in_worker((row, {"function": only}, ["4"]))


WRONG = """
{imports}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {values}

def reward_func(completions, **kwargs):
    return {values}

def rate_groups(row, replies):
    return {values}
"""


def write_wrong(values: str) -> str:
    names = [name for name in ("np", "torch") if f"{name}." in values]
    imports = "\n".join("import numpy as np" if name == "np" else "import torch" for name in names)
    return WRONG.replace("{values}", values).replace("{imports}", imports)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("'1.0'", "reward part 'compute_score': reward must be a number, got '1.0'"),
        ("None", "reward part 'compute_score': reward must be a number, got None"),
        ("float('nan')", "reward part 'compute_score': reward must be finite, got nan"),
        ("(1.0, 'right')", r"reward part 'compute_score': reward must be a number, got \(1.0, 'right'\)"),
        ("{'acc': 1}", r"a reward's dict must have a number at score or reward, got \['acc'\]"),
        ("{'score': 'high'}", "reward must be a number, got 'high'"),
        ("True", None),
        ("np.float32(1)", None),
        ("np.ones(1)[0]", None),
        ("torch.tensor(1.0)", None),
        ("{'reward': 1, 'score': np.int64(1)}", None),
        ("1/0", "reward part 'compute_score': ZeroDivisionError: division by zero"),
    ],
)
def test_a_reward_is_one_number_or_the_attempt_fails_with_function_and_value(
    values: str, sentence: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(write_wrong(values))
    parts = make_reward({"function": f"{file}:compute_score"})
    if sentence is None:
        assert parts.rate_reply(VERL_ROW, "4").reward == 1.0
    else:
        with pytest.raises(PartFailed, match=sentence):
            parts.rate_reply(VERL_ROW, "4")


@pytest.mark.parametrize("function", ["reward_func", "rate_groups"])
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("1.0", r"must return a list of 2 rewards, one for each reply, got 1.0$"),
        ("'11'", r"list of 2 rewards, .* got '11'"),
        ("None", r"list of 2 rewards, .* got None"),
        ("{'score': 1, 'other': 2}", r"list of 2 rewards, .* got \{"),
        ("[1.0]", r"list of 2 rewards, .* got \[1.0\] of length 1"),
        ("[1.0] * 3", r"list of 2 rewards, .* got \[1.0, 1.0, 1.0\] of length 3"),
        ("[1.0, 'x']", r"reward must be a number, got 'x'"),
        ("[1.0, float('inf')]", r"reward must be finite, got inf"),
        ("np.ones(2)", None),
        ("torch.ones(2)", None),
        ("(1.0, {'score': True})", None),
    ],
)
def test_a_function_of_a_group_returns_a_reward_for_each_reply(
    values: str, sentence: str | None, function: str, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(write_wrong(values))
    parts = make_reward({"function": f"{file}:{function}"})
    record = EpisodeRecord(
        row=TRL_ROW,
        messages=[*CHAT, {"role": "assistant", "content": "4"}],
        reward=0.0,
        components={},
        stop="completed",
    )
    if sentence is None:
        assert [score.reward for score in parts.score_group([record, record])] == [1.0, 1.0]
    else:
        with pytest.raises(PartFailed, match=f"reward part {function!r}: .*{sentence}"):
            parts.score_group([record, record])


def test_a_function_that_cannot_be_called_is_refused_when_the_task_is_made(tmp_path: Path) -> None:
    file = tmp_path / "forms.py"
    file.write_text(
        "def none(): return 1\n"
        "def three(a, b, c): return 1\n"
        "def keywords(**kwargs): return 1\n"
        "def anything(*words): return float(words[1] == '4')\n"
        "def swapped(reply, row): return float(reply == row['answer'])\n"
        "def judged(data_source, solution_str, ground_truth, extra_info, judge): return 1\n"
    )
    cases = {
        f"{file}:none": "too many positional arguments",
        f"{file}:three": "missing a required argument: 'c'",
        f"{file}:keywords": "too many positional arguments",
        f"{file}:judged": "missing a required argument: 'judge'",
        name_file("trl_style:schedule_reward_func"): "trainer_state must have a default",
    }
    for use, reason in cases.items():
        with pytest.raises(ValueError, match=rf"^reward\.function must name a function of \(row, .*{reason}"):
            make_reward({"function": use})
    assert make_reward({"function": f"{file}:anything"}).rate_reply({}, "4").reward == 1.0
    assert make_reward({"function": f"{file}:swapped"}).rate_reply({"answer": "4"}, "4").reward == 1.0
    with pytest.raises(ValueError, match=r"a function of .*forms.py \(nearest: judged\), got 'juged'"):
        make_reward({"function": f"{file}:juged"})
    parts = make_reward({"function": f"{file}:judged", "args": {"judge": 1}})
    assert parts.rate_reply(VERL_ROW, "4").reward == 1.0


def test_a_column_that_a_function_of_trls_needs_is_named_when_rows_lack_it() -> None:
    parts = make_reward({"function": name_file("trl_style:correctness_reward_func")})
    record: Any = EpisodeRecord(
        row={"prompt": CHAT, "solution": "4"},
        messages=[{"role": "assistant", "content": "4"}],
        reward=0.0,
        components={},
        stop="completed",
    )
    with pytest.raises(
        PartFailed, match=r"rows must have a column 'answer', got the columns \['prompt', 'sol"
    ):
        parts.score_group([record])


def test_a_verl_row_without_a_right_answer_gives_none_and_a_row_without_its_place_is_refused() -> None:
    parts = make_reward({"function": f"{__name__}:tell_truth"})
    graded = {"reward_model": {"style": "model", "ground_truth": None}}
    assert parts.rate_reply(graded, "").reward == 1.0
    # `data.answer` names another column.
    assert parts.rate_reply(graded | {"ground_truth": "4"}, "").reward == 0.0
    with pytest.raises(PartFailed, match="a row must have a right answer at one of"):
        parts.rate_reply({"data_source": "x"}, "")


def tell_truth(solution_str: str, ground_truth: Any) -> float:
    return float(ground_truth is None)


def test_only_if_names_an_earlier_part_of_the_same_stage() -> None:
    alone, beside = name_file("own_style:rate_reply"), name_file("own_style:rank_replies")
    for parts, known in [
        ([{"use": alone, "only_if": "rate_reply"}], "none"),
        ([{"use": beside}, {"use": alone, "only_if": "rank_replies"}], "none"),
        ([{"use": alone}, {"use": beside, "only_if": "rigth"}], "rate_reply"),
    ]:
        with pytest.raises(
            ValueError, match=rf"\.only_if must be the name of a part before it \({known}\), got"
        ):
            make_reward({"parts": parts})


def test_a_function_may_change_what_it_gets(tmp_path: Path) -> None:
    file = tmp_path / "changes.py"
    file.write_text(
        "def compute_score(solution_str, extra_info):\n    return extra_info['seen'].pop()\n"
        "def pop_row(row, reply):\n    return row.pop('extra_info')['seen'].pop()\n"
        "def pop_rows(row, replies):\n    return [row.pop('extra_info')['seen'].pop(), 2.0]\n"
    )
    row = {"prompt": "2 + 2?", "extra_info": {"seen": [1.0]}}
    for use in ("compute_score", "pop_row", "pop_rows"):
        parts = make_reward({"function": f"{file}:{use}"})
        record = EpisodeRecord(row=row, messages=[*CHAT], reward=0.0, components={}, stop="completed")
        for _ in range(2):
            if parts.rates_groups:
                assert [score.reward for score in parts.score_group([record] * 2)] == [1.0, 2.0]
            else:
                assert parts.rate_reply(row, "4").reward == 1.0


def fill_memory(row: dict, reply: str) -> float:
    raise MemoryError


def tell_extra(solution_str: str, extra_info: Any) -> float:
    return float(extra_info == solution_str)


def test_no_memory_left_is_an_error_of_the_worker_and_not_of_a_part() -> None:
    with pytest.raises(MemoryError):
        make_reward({"function": f"{__name__}:fill_memory"}).rate_reply({}, "")


def test_verls_extra_info_is_what_the_row_has() -> None:
    parts = make_reward({"function": f"{__name__}:tell_extra"})
    assert parts.rate_reply({"extra_info": '{"index": 1}'}, '{"index": 1}').reward == 1.0
