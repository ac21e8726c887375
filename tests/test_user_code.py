"""A task's code runs in worker processes, and answers the generator's calls in plain values."""

import asyncio
import functools
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worker_pools import run_with_pool

from generators.environment import Turn
from generators.plain_values import make_plain
from generators.score_checks import read_score, read_scores
from generators.task import Score
from generators.user_code.errors import CallFailed, TaskRefused
from generators.user_code.method_calls import MethodError, MethodValue, decode_answer, encode_frame
from generators.user_code.pool import UserCodePool, WorkerLimits
from generators.user_code.task_host import TaskHost


def test_a_task_of_one_turn_makes_prompts_and_scores_responses() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        prompt = await worker.call("make_prompt", ["train", 3, 0], 60, "s")
        assert prompt == {"text": "train 3 0", "messages": [], "template_args": {}}
        score = await worker.call("score_response", ["train", 3, 0, "four"], 60, "s")
        assert score == {"reward": 4.0, "components": {"pid": float(worker.pid)}}
        assert pool.description.kind == "one_turn" and pool.description.name == "misbehaving"

    run_with_pool(play)


def test_an_environment_keeps_its_state_in_its_worker_and_its_methods_may_be_async() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        first = await worker.call("reset", ["train", 3, 0, 5], 60, "s")
        assert first["messages"] == [{"role": "user", "content": "3 5"}] and not first["done"]
        turns = [await worker.call("step", [{"content": "x"}], 60, "s") for _ in range(2)]
        assert turns[0]["messages"][0]["content"] == "x 1" and turns[1]["done"] and turns[1]["reward"] == 2.0
        await worker.call("close", [], 60, "s")
        with pytest.raises(CallFailed, match="step must follow reset"):
            await worker.call("step", [{"content": "x"}], 60, "s")

    run_with_pool(play, "misbehaving:Counting", {"limit": 2})


@pytest.mark.parametrize(
    ("end", "expected"), [(numpy.bool_(True), True), (torch.tensor(False), False), ("no", None), (1, None)]
)
def test_an_end_is_true_or_false_and_a_text_such_as_no_is_not_true(
    end: Any, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = TaskHost("misbehaving:VagueEnd", {})
    monkeypatch.setattr(type(host._make_object()), "end", end)
    host.reset("train", 0, 0, 0)
    if expected is None:
        with pytest.raises(ValueError, match=f"done must be true or false, got {end!r}"):
            host.step({"content": "x"})
    else:
        assert host.step({"content": "x"})["done"] is expected


@pytest.mark.parametrize(
    ("made", "shown"),
    [(None, "got None without `reset` and `step` and `close`"), (Turn, "got the class Turn")],
)
def test_what_is_no_environment_is_named(made: Any, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = TaskHost("misbehaving:Duel", {})
    monkeypatch.setattr(host._task, "make_environment", lambda row: made)
    with pytest.raises(ValueError, match=f"make_environment must return an environment, {shown}"):
        host.reset("train", 0, 0, 0)


@pytest.mark.parametrize("number", [0, -3, "10", 2.5, True])
def test_a_number_of_prompts_is_a_whole_number_above_0(number: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host = TaskHost("misbehaving:Duel", {})
    monkeypatch.setattr(host._task, "num_prompts", number, raising=False)
    with pytest.raises(ValueError, match="num_prompts of a task must be a whole number above 0, got"):
        host.describe()


def test_an_environment_task_makes_rows_and_environments_and_scores_groups() -> None:
    async def play(pool: UserCodePool) -> None:
        assert pool.description.num_prompts == 7 and pool.description.has_group_scores
        worker = await pool.take_worker()
        await worker.call("reset", ["train", 1, 0, 5], 60, "s")
        turns = [await worker.call("step", [{"content": "x"}], 60, "s") for _ in range(10)]
        assert [turn["done"] for turn in turns] == [False] * 9 + [True]
        facts = {"messages": [], "components": {}, "stop": "completed"}
        episodes = [{**facts, "reward": reward} for reward in (1.0, 3.0)]
        scores = await worker.call("score_group", ["train", 2, 0, episodes], 60, "s")
        assert read_scores(scores, 2) == [Score(0.0), Score(20.0)]
        scores = await worker.call("score_group", ["train", 2, 0, [*episodes, episodes[0]]], 60, "s")
        assert read_scores(scores, 3) is None

    run_with_pool(play, "misbehaving:Duel")


def test_agents_are_commands_or_coroutines_and_their_outcomes_become_scores() -> None:
    async def run_agent(pool: UserCodePool, index: int) -> Any:
        worker = await pool.take_worker()
        outcome = await worker.call("run_agent", ["train", index, 0, "http://here", "key"], 60, "s")
        return outcome, await worker.call("score_agent", ["train", index, 0, outcome], 60, "s")

    async def play_command(pool: UserCodePool) -> None:
        outcome, score = await run_agent(pool, 4)
        assert outcome == 'http://here key {"index": 4}'
        assert read_score(score) == Score(4.0, {"output": 28.0}) and pool.description.kind == "agent"

    async def play_coroutine(pool: UserCodePool) -> None:
        outcome, score = await run_agent(pool, 4)
        assert outcome == {"reward": 4.0, "length": 14} and read_score(score) == Score(4.0, {"length": 14.0})
        assert read_score((await run_agent(pool, 0))[1]) == Score(0.5)

    run_with_pool(play_command, "misbehaving:CommandAgent")
    run_with_pool(play_coroutine, "misbehaving:CoroutineAgent")


def test_workers_draw_numbers_of_their_own_and_read_nothing() -> None:
    async def play(pool: UserCodePool) -> None:
        workers = [await pool.take_worker() for _ in range(3)]
        drawn = [await worker.call("score_response", ["train", 0, 0, "draw"], 60, "s") for worker in workers]
        assert len({score["reward"] for score in drawn}) == 3
        assert len({score["components"]["numpy"] for score in drawn}) == 3
        read = await workers[0].call("score_response", ["train", 0, 0, "read"], 60, "s")
        assert read["reward"] == 0.0

    run_with_pool(play, args={"start": "import_numpy"})


def test_arguments_beyond_the_size_of_a_frame_fail_the_call_alone() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        with pytest.raises(CallFailed, match="must be at most 16777216 bytes, got 16777"):
            await worker.call("score_response", ["train", 0, 0, "x" * (16 << 20)], 60, "s")
        score = await worker.call("score_response", ["train", 0, 0, "x" * (15 << 20)], 60, "s")
        assert score["reward"] == 15 << 20

    run_with_pool(play)


@given(st.binary(max_size=60))
def test_no_bytes_from_a_worker_raise_anything_but_a_value_error(body: bytes) -> None:
    for encoded in (body, encode_frame(MethodValue(1, [1.5, {"a": None}]))[4:][: len(body)] + body):
        try:
            answer = decode_answer(encoded)
        except ValueError:
            continue
        assert isinstance(answer, MethodValue | MethodError)


NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(VALUES)
def test_plain_values_cross_as_they_are(value: Any) -> None:
    plain = make_plain(value, "value")
    assert plain == value
    answer = decode_answer(encode_frame(MethodValue(7, plain))[4:])
    assert isinstance(answer, MethodValue) and answer.value == value


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"a": [1, object()]}, "row['a'][1] must be of JSON's types, got <object"),
        ({"a": float("nan")}, "row['a'] must be finite, got nan"),
        ({"a": {1: 2}}, "keys of row['a'] must be text, got 1"),
        ({"a": 2**63}, "row['a'] must be within ± 2^63, got 9223372036854775808"),
        ({"a": b"bytes"}, "row['a'] must be of JSON's types, got b'bytes'"),
        ({"a": {1, 2}}, "row['a'] must be of JSON's types, got {1, 2}"),
        ({"a": "\ud800"}, "row['a'] must be text that can be encoded, got '\\ud800'"),
        ({"a": torch.ones(2)}, "row['a'] must be of JSON's types, got tensor([1., 1.])"),
        (["x" * 6000] * 2, "row must be at most 10000 characters (each value counts as 16), got more"),
        (functools.reduce(lambda inner, _: [inner], range(200), []), "must be at most 100 levels deep"),
    ],
)
def test_a_value_that_is_not_plain_is_refused_with_its_place(value: Any, error: str) -> None:
    with pytest.raises(ValueError) as refused:
        make_plain(value, "row", 10_000)
    assert error in str(refused.value)


def test_numbers_of_libraries_become_pythons() -> None:
    numbers = (
        numpy.int64(3),
        numpy.float32(0.5),
        torch.tensor(2),
        torch.tensor(0.25),
        numpy.bool_(True),
        True,
    )
    assert make_plain(numbers, "row") == [3, 0.5, 2, 0.25, 1.0, True]
    assert [type(number) for number in make_plain(numbers, "row")] == [int, float, int, float, float, bool]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"reward": 1.0}, "score must have reward and components"),
        (None, "score must have reward and components, got None"),
        ({"reward": None, "components": {}}, "reward must be a number, got None"),
        ({"reward": 1.0, "components": [1]}, "components must be a dict"),
        ({"reward": float("inf"), "components": {}}, "reward must be finite, got inf"),
    ],
)
def test_a_score_from_a_worker_is_checked_again(value: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        read_score(value)
    with pytest.raises(ValueError, match="score_group must return 2 scores"):
        read_scores([value], 2)


@pytest.mark.parametrize(
    ("target", "args", "error"),
    [
        ("misbehaving:Incomplete", {}, "got 'misbehaving:Incomplete' without `make_environment`"),
        ("misbehaving:OwnRows", {}, "an environment whose make_row is a static or a class method"),
        ("misbehaving:Nothing", {}, "task.name must name a class that can be imported"),
        ("nowhere:Task", {}, "task.name must name a class that can be imported, got 'nowhere:Task'"),
        ("nothing", {}, "task.name must be one of .*got 'nothing'"),
        ("misbehaving:Counting", {"limit": 0}, "task.args must suit misbehaving:Counting, .*limit must be"),
        ("misbehaving:Misbehaving", {"stop": 1}, "task.args must suit misbehaving:Misbehaving, got"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_the_setting_and_the_rule(
    target: str, args: dict[str, Any], error: str
) -> None:
    with pytest.raises(TaskRefused, match=error):
        asyncio.run(UserCodePool.open(target, args, WorkerLimits()))
