"""Rewards made of parts: composition, functions, rows, mathematics."""

import asyncio
import json
import math
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.load import load_config
from generators.rewards.composition import PartFailed, WeightedPart, WeightedParts, make_parts
from generators.rewards.mathematics import MathPart
from generators.rewards.part import Rating
from generators.task import Prompt
from generators.tasks import load_task
from generators.user_code.errors import WorkerDied
from generators.user_code.pool import UserCodePool, WorkerLimits

HERE = __name__
ROW = {"prompt": "1 + 1?", "answer": "2", "extra_info": {"index": 7}, "data_source": "sums"}


# ---- functions that a user might write


def is_brief(row: dict, reply: str, most: int = 4) -> float:
    return float(len(reply) <= most)


async def rate_later(row: dict, reply: str) -> dict:
    await asyncio.sleep(0)
    return {"score": 0.5, "acc": True, "pred": "text", "length": len(reply)}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    assert data_source == "sums" and extra_info == {"index": 7}
    return float(solution_str == ground_truth)


def give_value(row: dict, reply: str, value: Any = None) -> Any:
    if reply == "raise":
        raise KeyError("no such thing")
    return json.loads(reply)


class ConstantPart:
    is_async = False

    def __init__(self, value: float) -> None:
        self.value = value

    def rate_reply(self, row: dict, reply: str) -> Rating:
        return Rating(self.value)


# ---- composition


def test_the_reward_is_the_weighted_sum_and_the_record_has_each_number_and_its_seconds() -> None:
    parts = make_parts(
        [
            {"name": "brief", "use": f"{HERE}:is_brief", "weight": 0.2, "most": 1},
            {"name": "later", "use": f"{HERE}:rate_later", "weight": -2},
            {"name": "verl", "use": f"{HERE}:compute_score"},
            {"name": "math", "use": "math", "weight": 0},
        ]
    )
    score = parts.rate_reply(ROW, "2")
    assert score.reward == pytest.approx(0.2 * 1 - 2 * 0.5 + 1 + 0)
    seconds = {name: value for name, value in score.components.items() if name.startswith("seconds/")}
    assert seconds.keys() == {"seconds/brief", "seconds/later", "seconds/verl", "seconds/math"}
    assert all(value >= 0 for value in seconds.values())
    assert {name: value for name, value in score.components.items() if name not in seconds} == {
        "brief": 1.0, "later": 0.5, "later/acc": 1.0, "later/length": 1.0, "verl": 1.0, "math": 1.0,
    }  # fmt: skip


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=32),
)
def test_any_parts_add_up_to_the_sum_of_weight_times_number(pairs: Sequence[tuple[float, float]]) -> None:
    parts = [WeightedPart(str(i), weight, ConstantPart(value)) for i, (weight, value) in enumerate(pairs)]
    score = WeightedParts(parts).rate_reply({}, "")
    wanted = math.fsum(weight * value for weight, value in pairs)
    assert score.reward == pytest.approx(wanted, rel=1e-9, abs=1e-3)
    assert len(score.components) == 2 * len(pairs) <= 64


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ("raise", r"reward part 'value': KeyError: 'no such thing'"),
        ("NaN", r"reward part 'value': reward must be finite, got nan"),
        ("1e39", r"reward part 'value': reward must be within ± 3.4e38"),
        ('"1"', r"reward part 'value': reward must be a number, got '1'"),
        ("null", r"reward part 'value': reward must be a number, got None"),
        ('{"acc": 1}', r"a reward's dict must have a number at score or reward, got \['acc'\]"),
        ('{"score": 1, "acc": Infinity}', r"components\['value/acc'\] must be finite, got inf"),
        (
            json.dumps({"score": 1} | {f"n{i}": 1 for i in range(63)}),
            r"at most 64 components together.* got 65",
        ),
    ],
)
def test_a_part_that_fails_or_gives_no_number_fails_the_attempt_by_name(reply: str, sentence: str) -> None:
    parts = make_parts([{"name": "value", "use": f"{HERE}:give_value"}])
    with pytest.raises(PartFailed, match=sentence):
        parts.rate_reply(ROW, reply)


def test_async_parts_run_at_the_same_time_and_one_that_fails_ends_the_others() -> None:
    events: list[str] = []

    class WaitingPart:
        is_async = True

        def __init__(self, name: str) -> None:
            self.name = name

        async def rate_reply(self, row: dict, reply: str) -> Rating:
            events.append(f"{self.name} began")
            while len(events) < 2:  # one after the other would wait for ever
                await asyncio.sleep(0)
            if reply == self.name:
                raise OSError("gone")
            try:
                await asyncio.sleep(1000 if reply else 0)
            finally:
                events.append(f"{self.name} ended")
            return Rating(1.0)

    parts = WeightedParts([WeightedPart(name, 1.0, WaitingPart(name)) for name in "ab"])
    assert parts.rate_reply({}, "").reward == 2.0
    assert sorted(events) == ["a began", "a ended", "b began", "b ended"]
    events.clear()
    with pytest.raises(PartFailed, match="reward part 'a': OSError: gone"):
        parts.rate_reply({}, "a")
    assert sorted(events) == ["a began", "b began", "b ended"]


def test_a_reply_can_be_rated_beside_a_loop_that_runs_already() -> None:
    parts = make_parts([{"name": "later", "use": f"{HERE}:rate_later"}])

    async def rate_inside() -> float:
        return parts.rate_reply(ROW, "2").reward

    assert asyncio.run(rate_inside()) == 0.5


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        ([], r"task\.args\.rewards must be a list of 1 to 32 parts, got \[\]"),
        ("math", r"task\.args\.rewards must be a list"),
        ([{"use": "math"}] * 33, r"must be a list of 1 to 32 parts"),
        (["math"], r"task\.args\.rewards\[0\] must have the keys name, use and weight, got 'math'"),
        ([{"name": "a"}], r"rewards\[0\]\.use must be one of \['code', .*\], module:function .* got None"),
        ([{"use": "poetry"}], r"rewards\[0\]\.use must be one of .* got 'poetry'"),
        ([{"use": "task"}], r"rewards\[0\]\.use must be one of .* got 'task'"),
        ([{"use": "math"}, {"use": "math"}], r"\[1\]\.name must be another than those before, got 'math'"),
        ([{"use": "math", "weight": math.nan}], r"rewards\[0\]\.weight must be a finite number, got nan"),
        ([{"use": "math", "weight": "1"}], r"rewards\[0\]\.weight must be a finite number, got '1'"),
        ([{"use": "math", "weight": True}], r"rewards\[0\]\.weight must be a finite number, got True"),
        ([{"use": "math", "name": "a b"}], r"rewards\[0\]\.name must be up to 60 letters.* got 'a b'"),
        ([{"use": "math", "name": "mean"}], r"rewards\[0\]\.name must be .* other than mean, std, seconds"),
        ([{"use": "math", "colour": 1}], r"\[0\] must have arguments of math: reference, got 'colour'"),
        ([{"use": "math", "reference": 3}], r"\[0\]\.reference must be a text that is not empty, got 3"),
        ([{"use": "judge", "model": "m", "prompt": "{response}"}], r"\[0\]\.url must be given for judge"),
        ([{"use": "reward_model"}], r"rewards\[0\]\.url must be given for reward_model, got nothing"),
        ([{"use": f"{HERE}:nothing", "name": "a"}], r"\[0\]\.use must name a function that can be"),
        ([{"use": "nowhere:f", "name": "a"}], r"got 'nowhere:f': ModuleNotFoundError"),
        ([{"use": "/nowhere/f.py:f", "name": "a"}], r"got '/nowhere/f.py:f': FileNotFoundError"),
        ([{"use": f"{HERE}:ROW", "name": "a"}], r"use must name a function, got .*, which is a dict"),
        ([{"use": f"{HERE}:is_brief", "name": "a", "least": 1}], r"takes the arguments \['least'\], got"),
        ([{"use": "os:getpid", "name": "a"}], r"must name a function of \(row, reply\) or of \(data_source"),
    ],
)  # fmt: skip
def test_a_wrong_part_is_refused_when_the_task_is_made(rewards: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_parts(rewards)


def test_a_function_of_a_file_is_loaded_once_and_may_import_what_it_likes(tmp_path: Path) -> None:
    file = tmp_path / "my rewards.py"
    file.write_text(
        "import dataclasses, math\nloads = []\nloads.append(1)\n"
        "@dataclasses.dataclass\nclass Seen:\n    n: int = 0\n"
        "def count_loads(row, reply):\n    return len(loads)\n"
    )
    for _ in range(2):
        parts = make_parts([{"name": "loads", "use": f"{file}:count_loads"}])
    assert parts.rate_reply(ROW, "").reward == 1.0
    file.with_name("broken.py").write_text("raise SystemError('broken')")
    with pytest.raises(ValueError, match="SystemError: broken"):
        make_parts([{"name": "broken", "use": f"{tmp_path}/broken.py:f"}])


# ---- rows and the task


def write_lines(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_files_of_both_kinds_and_of_verls_layout_give_the_same_prompts_and_rewards(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": 7},
        }
        for i in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    files = [write_lines(tmp_path / "rows.jsonl", rows), str(tmp_path / "rows.parquet")]
    rewards = [
        {"name": "verl", "use": f"{HERE}:compute_score"},
        {"name": "math", "use": "math", "weight": 0.5},
    ]
    one, other = (load_task("rewarded", {"rows": file, "rewards": rewards}) for file in files)
    assert one.num_prompts == other.num_prompts and 25 <= one.num_prompts < 40
    for split in ("train", "eval"):
        for index in range(50):
            prompt = one.make_prompt(split, index, 0)
            assert prompt == other.make_prompt(split, index, 1)
            answer = str(int(prompt.text.split()[0]) + 1)
            assert one.score_response(prompt, answer).reward == 1.5
            assert other.score_response(prompt, "-7").reward == 0.0
    train = {one.make_prompt("train", i, 0).text for i in range(one.num_prompts)}
    held_out = {one.make_prompt("eval", i, 0).text for i in range(40)}
    assert len(train) == one.num_prompts and not train & held_out and len(train | held_out) == 40


@pytest.mark.parametrize("num_prompts", range(2, 12))
def test_a_file_of_any_size_is_divided_and_a_prompt_that_is_there_twice_is_on_one_side(
    num_prompts: int, tmp_path: Path
) -> None:
    rows = write_lines(
        tmp_path / "rows.jsonl", [{"prompt": f"{i % num_prompts}?"} for i in range(2 * num_prompts)]
    )
    task = load_task("rewarded", {"rows": rows, "rewards": [{"use": "math"}]})
    train, held_out = ({task.make_prompt(split, i, 0).text for i in range(30)} for split in ("train", "eval"))
    assert train and held_out and not train & held_out and len(train | held_out) == num_prompts


def test_another_tasks_own_reward_is_a_part() -> None:
    args = {
        "rows": {"task": "sorting", "args": {"numbers": 2}},
        "rewards": [
            {"name": "sorted", "use": "task"},
            {"use": f"{HERE}:is_brief", "name": "brief", "weight": 0.5},
        ],
    }
    task, sorting = load_task("rewarded", args), load_task("sorting", {"numbers": 2})
    prompt = task.make_prompt("train", 5, 0)
    assert prompt.text == sorting.make_prompt("train", 5, 0).text
    question, answer = next(task.solved_examples("train", 0))
    assert (question, answer) == next(sorting.solved_examples("train", 0))
    assert not hasattr(task, "num_prompts")
    score = task.score_response(prompt, "no numbers at all")
    assert score.reward == 0.0 and "sorted/correct" in score.components


def test_a_command_line_can_name_the_parts(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "answer": i} for i in range(9)])
    config = load_config(
        [
            "task.name=rewarded",
            f"task.args.rows={rows}",
            f"task.args.rewards=[{{name: a, use: '{HERE}:is_brief', weight: 0.2, most: 3}}, {{use: math}}]",
        ]
    )
    task = load_task(config.task.name, config.task.args)
    prompt = task.make_prompt("train", 0, 0)
    assert task.score_response(prompt, prompt.text.strip("?")).reward == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], r"task\.args\.rows must have a row, got .* which has none"),
        (
            [{"question": "1?"}],
            r"task\.args\.rows must have rows with a prompt, got row 0: prompt must be a text",
        ),
        ([{"prompt": "a"}, ["b"]], r"got row 1: a line must be a JSON object"),
        ([{"prompt": []}], r"got row 0: prompt must be a text or a list of messages, got \[\]"),
        ([{"prompt": [{"role": "user"}]}], r"messages must have a role and a content"),
        (
            [{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
            r"prompt must not end with a message of the assistant",
        ),
    ],
)
def test_a_file_with_a_wrong_row_is_refused_by_its_number(lines: list, sentence: str, tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", lines)
    with pytest.raises(ValueError, match=sentence):
        load_task("rewarded", {"rows": rows, "rewards": [{"use": "math"}]})


def test_a_source_that_is_none_is_refused(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    same = write_lines(tmp_path / "same.jsonl", [{"prompt": "c"}, {"prompt": "b"}])
    single = write_lines(tmp_path / "single.jsonl", [{"prompt": "a"}, {"prompt": "a"}])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nonsense")
    (tmp_path / "broken.jsonl").write_text("{")
    cases = {
        r"rows must be a file \.jsonl or \.parquet, got 'rows.csv'": {"rows": "rows.csv"},
        r"rows must be a file that can be read, got '/nowhere\.jsonl'": {"rows": "/nowhere.jsonl"},
        r"must be a file that can be read, got .*broken\.parquet": {"rows": f"{tmp_path}/broken.parquet"},
        r"rows must have rows with a prompt, got row 0": {"rows": f"{tmp_path}/broken.jsonl"},
        r"must have no prompt of task\.args\.rows, got 1 .* row 1: 'b'": {"rows": rows, "eval_rows": same},
        r"rows must be a file or \{task: NAME, args: \{\.\.\.\}\}, got": {"rows": {"tasks": "sorting"}},
        r"task\.name must be one of": {"rows": {"task": "poetry"}},
        r"rows must have two prompts or more where task\.args\.eval_rows is null": {"rows": single},
        r"eval_rows must be null where rows name a task": {"rows": {"task": "sorting"}, "eval_rows": rows},
    }  # fmt: skip
    for sentence, args in cases.items():
        with pytest.raises(ValueError, match=sentence):
            load_task("rewarded", args | {"rewards": [{"use": "math"}]})


def test_a_row_without_a_right_answer_fails_by_name() -> None:
    with pytest.raises(
        PartFailed, match=r"'math': ValueError: a row must have a right answer at one of reward_"
    ):
        make_parts([{"use": "math"}]).rate_reply({"prompt": "1?", "result": 1}, "1")
    with pytest.raises(PartFailed, match=r"a row must have a right answer at extra\.value, got the columns"):
        make_parts([{"use": "math", "reference": "extra.value"}]).rate_reply(ROW, "1")


# ---- mathematics


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        ("42", ["The answer is 42.", r"\boxed{42.0}", "$42$"], ["43", "", "no idea", r"\boxed{-42}"]),
        ("1/2", ["it is 0.5", r"\boxed{\frac{1}{2}}", r"$\frac{2}{4}$"], [r"\boxed{\frac{1}{3}}", "2"]),
        (r"\{1, 2\}", [r"$\{2, 1\}$", r"\boxed{\{1,2\}}"], [r"$\{1, 3\}$", "1"]),
        ("(0,1]", ["$(0,1]$"], ["$(0,1)$", "$[0,1]$"]),
        ("x^2+2x+1", ["$(x+1)^2$"], ["$(x+2)^2$"]),
        (r"\frac{\pi}{4}", [r"\boxed{\pi/4}"], [r"\boxed{\pi/2}"]),
        ("He ate 3 apples a day, 6 days: 18. #### 18", [r"\boxed{18}", "So it is 18"], ["6"]),
        ("1,234", ["1234", r"\boxed{1,234}"], ["1.234"]),
        (7, ["7"], ["8"]),
    ],
)
def test_mathematics_counts_as_equal_however_it_is_written(wanted: Any, right: list, wrong: list) -> None:
    part = MathPart()
    assert [part.rate_reply({"answer": wanted}, reply).value for reply in right] == [1.0] * len(right)
    assert [part.rate_reply({"answer": wanted}, reply).value for reply in wrong] == [0.0] * len(wrong)


def test_a_right_answer_that_is_no_mathematics_is_an_error() -> None:
    with pytest.raises(ValueError, match="the right answer must be a number, an expression or a set, got ''"):
        MathPart().rate_reply({"answer": ""}, "1")


def test_mathematics_sets_no_alarm_and_works_in_any_thread() -> None:
    """Signals of the main thread scored every answer 0 elsewhere (verl)."""
    before, values = signal.getsignal(signal.SIGALRM), []
    thread = threading.Thread(target=lambda: values.append(MathPart().rate_reply({"answer": "3"}, "3").value))
    thread.start()
    thread.join()
    assert values == [1.0] and signal.getsignal(signal.SIGALRM) is before


def test_an_expression_without_end_costs_its_worker_and_no_other(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "answer": 7} for i in range(9)])
    args = {"rows": rows, "rewards": [{"use": "math"}]}

    async def score_both() -> None:
        pool = await UserCodePool.open("rewarded", args, WorkerLimits(max_workers=2))
        try:
            worker = await pool.take_worker()
            with pytest.raises(WorkerDied, match="episodes.score_timeout_s"):
                reply = ["train", 0, 0, r"\boxed{99999999!}"]
                await worker.call("score_response", reply, 2.0, "episodes.score_timeout_s")
            other = await pool.take_worker()
            score = await other.call("score_response", ["train", 0, 0, "It is 7."], 60.0, "score")
            assert score["reward"] == 1.0
        finally:
            await pool.close()

    asyncio.run(score_both())


def test_a_chat_of_several_messages_is_played_by_its_environment(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": chat, "answer": "2"}])
    evals = write_lines(tmp_path / "evals.jsonl", [{"prompt": "2?", "answer": "2"}])
    args = {"rows": rows, "eval_rows": evals, "rewards": [{"use": "math", "weight": 2}]}

    async def play() -> list[dict]:
        pool = await UserCodePool.open("rewarded_chat", args, WorkerLimits(max_workers=1))
        try:
            worker, turns = await pool.take_worker(), []
            for split in ("train", "eval"):
                turns.append(await worker.call("reset", [split, 0, 0, 0], 60.0, "reset"))
                turns.append(await worker.call("step", [{"role": "assistant", "content": "2"}], 60.0, "step"))
            return turns
        finally:
            await pool.close()

    train, paid, held_out, _ = asyncio.run(play())
    assert train["messages"] == chat and not train["done"]
    assert paid["reward"] == 2.0 and paid["components"]["math"] == 1.0 and paid["done"]
    assert held_out["messages"] == [{"role": "user", "content": "2?"}]


def test_a_chat_of_several_messages_is_refused_by_the_task_of_one(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": chat} for _ in range(2)])
    evals = write_lines(tmp_path / "evals.jsonl", [{"prompt": "2?"}])
    args = {"rows": rows, "eval_rows": evals, "rewards": [{"use": "math"}]}
    task = load_task("rewarded", args)
    assert task.make_prompt("eval", 3, 0) == Prompt("2?", {"prompt": "2?"})
    with pytest.raises(ValueError, match="must have prompts of one message of the user .*, got 2 messages"):
        task.make_prompt("train", 0, 0)
