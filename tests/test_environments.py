"""Every shipped environment keeps the protocol, whatever the policy replies."""

import json
import math
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generators.environment import Message, Turn
from generators.environments._arithmetic import compute_expression
from generators.tasks import FOLDERS, list_tasks, load_task
from generators.turn_checks import check_turn

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(name for name, place in list_tasks().items() if place.startswith("generators.environments."))
MAX_TURNS = 64
"""Replies after which every shipped environment has ended."""
REWARDS = (0.0, 1.0)
"""Range of an episode's reward in every shipped environment."""

FRAGMENTS = st.sampled_from(
    [
        "5",
        "472",
        " 0 0 0",
        "A",
        "B",
        "press C",
        "12 * 3",
        "1/0",
        "9**9**9",
        "-7.",
        "½",
        "\x00",
        "<|end|>",
        "٣",
    ]
)
TEXTS = st.one_of(st.text(max_size=12), st.lists(FRAGMENTS, max_size=3).map("".join))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
GOOD_CALLS = TEXTS.map(
    lambda text: {
        "id": f"id {text}",
        "type": "function",
        "function": {"name": "calculator", "arguments": json.dumps({"expression": text})},
    }
)
CALLS = st.one_of(
    GOOD_CALLS,
    JSON_VALUES,
    st.fixed_dictionaries(
        {
            "id": JSON_VALUES,
            "function": st.fixed_dictionaries(
                {
                    "name": st.just("calculator") | TEXTS,
                    "arguments": JSON_VALUES | JSON_VALUES.map(json.dumps),
                }
            ),
        }
    ),
)
REPLIES = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={
        "content": TEXTS | st.none(),
        "tool_calls": st.lists(CALLS, max_size=3) | st.none(),
        "reasoning_content": TEXTS,
    },
)


@pytest.fixture(params=SHIPPED)
def shipped(request: pytest.FixtureRequest) -> Any:
    return load_task(request.param, {})


def play_episode(task: Any, row: dict[str, Any], seed: int, replies: Sequence[Message]) -> list[Turn]:
    """Plays to the end, with the replies over and over."""
    environment = task.make_environment(row)
    turns = [environment.reset(row, seed)]
    while not turns[-1].done:
        assert len(turns) <= MAX_TURNS, "an episode ends"
        turns.append(environment.step(replies[(len(turns) - 1) % len(replies)]))
    environment.close()
    environment.close()
    return turns


def write_turn(turn: Turn) -> dict[str, Any]:
    """Sends a turn through JSON, as a worker does."""
    fields = {name: getattr(turn, name) for name in Turn.__dataclass_fields__}
    written: dict[str, Any] = json.loads(json.dumps(fields, allow_nan=False))
    assert written == {**fields, "messages": list(turn.messages), "tools": list(turn.tools)}, "plain values"
    return written


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", SHIPPED)
def test_whatever_the_replies_an_episode_keeps_the_protocol_and_is_the_same_again(
    name: str, data: st.DataObject
) -> None:
    task = load_task(name, {})
    split, index = data.draw(st.sampled_from(["train", "eval"])), data.draw(st.integers(0, 1 << 40))
    seed, replies = data.draw(st.integers(0, 1 << 40)), data.draw(st.lists(REPLIES, min_size=1, max_size=8))
    row = task.make_row(split, index, seed)
    assert json.loads(json.dumps(row)) == row
    turns = play_episode(task, row, seed, replies)
    for number, turn in enumerate(turns):
        checked = check_turn(write_turn(turn), is_first=number == 0)
        assert all(message["role"] != "assistant" for message in checked.messages)
        for tool in checked.tools:
            jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
    total = sum(turn.reward for turn in turns)
    assert math.isfinite(total) and REWARDS[0] <= total <= REWARDS[1]
    assert not turns[0].done and turns[-1].components
    again = play_episode(load_task(name, {}), json.loads(json.dumps(row)), seed, replies)
    assert again == turns, "the same row, seed and replies give the same turns"


def test_rows_are_the_same_everywhere_and_training_and_evaluation_share_none(shipped: Any) -> None:
    other = type(shipped)()
    train, held_out = (
        [json.dumps(shipped.make_row(split, index, 0), sort_keys=True) for index in range(300)]
        for split in ("train", "eval")
    )
    assert train == [json.dumps(other.make_row("train", index, 0), sort_keys=True) for index in range(300)]
    assert not set(train) & set(held_out)
    assert len(set(train)) > 20 and len(set(held_out)) > 5
    with pytest.raises(ValueError, match="split must be train or eval, got 'test'"):
        shipped.make_row("test", 0, 0)


def test_no_two_shipped_tasks_have_one_name() -> None:
    stems = [path.stem for folder in FOLDERS for path in (ROOT / "generators" / folder).glob("[a-z]*.py")]
    assert sorted(stems) == sorted(list_tasks())
    assert set(SHIPPED) == {"alphabet_sort", "calculator", "countdown", "guess_number", "gym_lock", "wordle"}


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("guess_number", {"digits": 1}, "digits must be from 2 to 9, got 1"),
        ("guess_number", {"tries": 0}, "tries must be at least 1, got 0"),
        ("calculator", {"turns": 0}, "turns must be at least 1, got 0"),
        ("gym_lock", {"difficulty": 0}, "difficulty must be at least 1, got 0"),
        ("wordle", {"words": "/nowhere"}, "words must be a file of words, got /nowhere"),
        ("alphabet_sort", {"min_turns": 4}, "min_turns must be from 1 to max_turns, got 4 and 3"),
        (
            "alphabet_sort",
            {"max_turns": 20},
            "max_turns × .* must be at most [0-9]+ .*, got 20 × 5",
        ),
        ("countdown", {"min_numbers": 1}, "min_numbers must be from 2 to .*, got 1 and 4"),
    ],
)
def test_arguments_out_of_range_are_refused(name: str, args: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"task.args must suit {name}, got .*: {message}"):
        load_task(name, args)


def reply_with(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_halving_what_is_left_wins_every_game_and_not_listening_wins_one_in_250() -> None:
    task = load_task("guess_number", {})
    deaf = [reply_with(guess) for guess in ("555", "222", "777", "888")]
    won = 0.0
    for number in range(1000):
        row = {"secret": f"{number:03d}"}
        game = task.make_environment(row)
        turn, left = game.reset(row, 0), [list(range(10)) for _ in range(3)]
        while not turn.done:
            guess = [digits[len(digits) // 2] for digits in left]
            turn = game.step(reply_with("".join(map(str, guess))))
            hints = turn.messages[0]["content"].rstrip(":").split(", ") if turn.messages else []
            for place, hint in enumerate(hints):
                digit, word = int(hint[0]), hint[2:]
                left[place] = [
                    d for d in left[place]
                    if (word == "low" and d > digit) or (word == "high" and d < digit)
                    or (word == "right" and d == digit)
                ]  # fmt: skip
        assert turn.reward == 1.0
        won += play_episode(task, row, 0, deaf)[-1].reward
    assert won == 4


def test_the_weak_player_loses_most_games_and_never_speaks_of_a_held_out_number() -> None:
    task = load_task("guess_number", {})
    games = list(islice(task.example_conversations("train", seed=0), 1000))
    assert games == list(islice(task.example_conversations("train", seed=0), 1000))
    assert {message["role"] for game in games for message in game} == {"user", "assistant"}
    held_out = {task.make_row("eval", index, 0)["secret"] for index in range(2000)}
    assert 100 < len(held_out) < 150
    won = [game for game in games if game[-1]["content"] not in held_out and len(game) < 8]
    assert all(game[-1]["role"] == "assistant" for game in games)
    assert 100 < len(won) < 500


def call_tool(arguments: Any, name: str = "calculator") -> Message:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (call_tool('{"expression": "(3 + 4) * 12 - 1"}'), "83"),
        (call_tool('{"expression": "1 / 8"}'), "0.125"),
        (call_tool('{"expression": "1 / 0"}'), "error: division by zero"),
        (call_tool('{"expression": "x + 1"}'), "error: only numbers, .* are known, got Name"),
        (call_tool('{"expression": "9**9**9"}'), "error: the result is too large"),
        (call_tool('{"expression": "2 +"}'), "error: not an expression: '2 \\+'"),
        (call_tool('{"expression": '), "error: the arguments must be JSON, got "),
        (call_tool('{"sum": "1"}'), 'error: the arguments must read {"expression": "..."}, got '),
        (call_tool("{}", name="search"), "error: there is no tool 'search', only calculator"),
    ],
)
def test_the_calculator_answers_each_call_also_a_wrong_one(call: Message, answer: str) -> None:
    task = load_task("calculator", {})
    row = {"expression": "3 + 4 * 2"}
    episode = task.make_environment(row)
    first = episode.reset(row, 0)
    assert first.tools[0]["function"]["name"] == "calculator" and "3 + 4 * 2" in first.messages[0]["content"]
    (message,) = episode.step(call).messages
    assert (message["role"], message["tool_call_id"]) == ("tool", "1")
    assert re.match(answer, message["content"])
    last = episode.step(reply_with(" 11.\n"))
    assert last == Turn(reward=1.0, components={"correct": 1.0, "calls": 1.0}, done=True)


@pytest.mark.parametrize("answer", ["12", "3 + 4 * 2", "", "eleven", "11 or 12", "1e1"])
def test_only_the_number_itself_is_an_answer(answer: str) -> None:
    row = {"expression": "3 + 4 * 2"}
    assert play_episode(load_task("calculator", {}), row, 0, [reply_with(answer)])[-1].reward == 0.0


SUMS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
        lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(SUMS)
def test_the_calculator_computes_as_python_does(text: str) -> None:
    try:
        right = str(eval(text))
    except ZeroDivisionError:
        right = "division by zero"
    try:
        assert compute_expression(text) == right
    except ValueError as error:
        assert right == str(error)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=300) | st.text("0123456789+-*/%(). e_j", max_size=80))
def test_no_text_makes_the_calculator_fail_otherwise_than_by_a_message(text: str) -> None:
    try:
        assert len(compute_expression(text)) < 3000
    except ValueError as error:
        assert str(error)


def test_the_shortest_way_opens_a_lock_for_a_whole_reward() -> None:
    task = load_task("gym_lock", {})
    for index in range(20):
        row = task.make_row("train", index, 0)
        presses = [reply_with(f"I press {button}.") for button in row["metadata"]["solution_path"]]
        turns = play_episode(task, row, 0, presses)
        assert len(turns) == len(presses) + 1
        assert turns[-1].reward == 1.0 and turns[-1].components == {"opened": 1.0}
    assert play_episode(task, row, 0, [reply_with("A or B?")])[-1].reward == 0.0
