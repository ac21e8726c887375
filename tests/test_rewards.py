"""Rewards made of parts: composition, functions, rows, mathematics."""

import asyncio
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import make_arguments, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from generators.rewards import math_process
from generators.rewards.composition import PartFailed, WeightedPart, WeightedParts, make_parts, make_reward
from generators.rewards.mathematics import MathPart, cut_reply
from generators.rewards.part import Rating
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
            "math/out_of_time": 0.0,
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

    async def rate_inside() -> list[float]:
        return [parts.rate_reply(ROW, "2").reward for _ in range(2)]

    assert asyncio.run(rate_inside()) == [0.5, 0.5]


def test_what_an_async_function_keeps_for_its_loop_lasts_from_reply_to_reply(tmp_path: Path) -> None:
    """A client or a semaphore of a module belongs to the loop of its first use."""
    file = tmp_path / "asks.py"
    file.write_text(
        "import asyncio\nturn = asyncio.Semaphore(1)\n"
        "async def wait():\n    async with turn:\n        await asyncio.sleep(0)\n"
        "async def ask(row, reply):\n    await asyncio.gather(wait(), wait())\n    return 1.0\n"
        "async def leave(row, reply):\n    raise SystemExit(3)\n"
    )
    parts = make_parts([{"use": f"{file}:ask"}])
    assert [parts.rate_reply(ROW, "").reward for _ in range(3)] == [1.0] * 3
    with pytest.raises(PartFailed, match="reward part 'leave': SystemExit: 3"):
        make_parts([{"use": f"{file}:leave"}]).rate_reply(ROW, "")
    assert parts.rate_reply(ROW, "").reward == 1.0


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        ([], r"reward\.parts must be a list of 1 to 32 parts, got \[\]"),
        ("math", r"reward\.parts must be a list"),
        ([{"use": "math"}] * 33, r"must be a list of 1 to 32 parts"),
        (["math"], r"reward\.parts\[0\] must have the keys name, use and weight, got 'math'"),
        ([{"name": "a"}], r"parts\[0\]\.use must be one of \['code', .*\], module:function .* got None"),
        ([{"use": "poetry"}], r"reward\.parts\[0\]\.use must be one of .* got 'poetry'"),
        ([{"use": "task"}], r"reward\.parts\[0\]\.use must be one of .* got 'task'"),
        ([{"use": "math"}, {"use": "math"}], r"\[1\]\.name must be another than those before, got 'math'"),
        ([{"use": "math", "weight": math.nan}], r"\[0\]\.weight must be a finite number, got nan"),
        ([{"use": "math", "weight": "1"}], r"\[0\]\.weight must be a finite number, got '1'"),
        ([{"use": "math", "weight": True}], r"\[0\]\.weight must be a finite number, got True"),
        ([{"use": "math", "name": "a b"}], r"reward\.parts\[0\]\.name must be up to 60 letters.* got 'a b'"),
        ([{"use": "math", "name": "mean"}], r"\[0\]\.name must be .* other than mean, std, seconds"),
        ([{"use": "math", "colour": 1}], r"\[0\] must have arguments of math: reference, .*, got 'colour'"),
        ([{"use": "math", "reference": 3}], r"\[0\]\.reference must be a text that is not empty, got 3"),
        ([{"use": "judge", "model": "m", "prompt": "{response}"}], r"\[0\]\.url must be given for judge"),
        ([{"use": "reward_model"}], r"reward\.parts\[0\]\.url must be given for reward_model, got nothing"),
        ([{"use": f"{HERE}:nothing", "name": "a"}], r"a function of .*test_rewards.*, got .nothing"),
        ([{"use": "nowhere:f", "name": "a"}], r"got 'nowhere:f': ModuleNotFoundError"),
        ([{"use": "/nowhere/f.py:f", "name": "a"}], r"got '/nowhere/f.py:f': ImportError: there is no file"),
        ([{"use": f"{HERE}:ROW", "name": "a"}], r"use must name a function, got .*, which is a dict"),
        ([{"use": f"{HERE}:is_brief", "name": "a", "least": 1}], r"takes the arguments \['least'\], got"),
        ([{"use": "os:getpid", "name": "a"}], r"a function of \(row, reply\), of verl's \(data_source"),
    ],
)  # fmt: skip
def test_a_wrong_part_is_refused_when_the_task_is_made(rewards: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_parts(rewards)


@pytest.mark.parametrize(
    ("section", "reward", "name"),
    [
        ({"function": f"{HERE}:is_brief", "args": {"most": 1}}, 1.0, "is_brief"),
        ({"function": f"{HERE}:compute_score"}, 1.0, "compute_score"),
        ({"function": "math"}, 1.0, "math"),
        ({"parts": [{"use": f"{HERE}:is_brief", "weight": 3}, {"use": "math"}]}, 4.0, "is_brief"),
    ],
)
def test_a_section_names_a_function_or_parts(section: dict, reward: float, name: str) -> None:
    score = make_reward({"function": None, "args": {}, "parts": []} | section).rate_reply(ROW, "2")
    assert score.reward == reward and score.components[name] == 1.0


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({}, r"^reward\.function must name a reward for these rows: one of \['code', .*\], .* got null"),
        ({"function": "math", "parts": [{"use": "math"}]}, r"^reward\.parts must be empty where reward\.fun"),
        ({"args": {"most": 3}}, r"^reward\.args must be empty without reward\.function, got \{'most': 3\}"),
        ({"function": "poetry"}, r"^reward\.function must be one of \['code', .* got 'poetry'"),
        ({"function": "task"}, r"^reward\.function must be one of \['code', .* got 'task'"),
        ({"function": "math", "args": {"answer": "a"}}, r"^reward\.args must have arguments of math: ref"),
        ({"function": "math", "args": {"reference": 3}}, r"^reward\.args\.reference must be a text that"),
        ({"function": "/nowhere.py:f"}, r"^reward\.function must name a function that can be imported, got"),
        ({"function": f"{HERE}:is_brief", "args": {"least": 1}}, r"^reward\.function .* \['least'\], got"),
        ({"parts": [{"use": "poetry"}]}, r"^reward\.parts\[0\]\.use must be one of"),
    ],
)
def test_a_wrong_section_is_refused_by_its_key(section: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_reward(section)


def test_a_function_of_a_file_is_loaded_once_and_may_import_what_it_likes(tmp_path: Path) -> None:
    file = tmp_path / "my rewards.py"
    file.write_text(
        "import dataclasses, math\nfrom beside_it import LOADS as loads\nloads.append(1)\n"
        "@dataclasses.dataclass\nclass Seen:\n    n: int = 0\n"
        "def count_loads(row, reply):\n    return len(loads)\n"
    )
    file.with_name("beside_it.py").write_text("LOADS = []")
    for _ in range(2):
        parts = make_parts([{"name": "loads", "use": f"{file}:count_loads"}])
    assert parts.rate_reply(ROW, "").reward == 1.0
    file.with_name("broken.py").write_text("raise SystemError('broken')")
    with pytest.raises(ValueError, match="SystemError: broken"):
        make_parts([{"name": "broken", "use": f"{tmp_path}/broken.py:f"}])
    file.with_name("script.py").write_text("raise SystemExit(2)")
    with pytest.raises(ValueError, match="must name a function that can be imported, .* SystemExit: 2"):
        make_parts([{"name": "script", "use": f"{tmp_path}/script.py:f"}])
    assert str(tmp_path) not in sys.path


def test_a_row_without_a_right_answer_fails_by_name() -> None:
    with pytest.raises(PartFailed, match=r"'math': ValueError: a row must have a right answer at one of"):
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
        (r"\$18.90", [r"\boxed{18.90}", r"\boxed{\$18.90}", "It costs $18.90."], [r"\boxed{18.09}"]),
        (r"50\%", [r"\boxed{50\%}", r"\boxed{50%}", r"\boxed{50}", "It is 50%."], [r"\boxed{5\%}", "40%"]),
        ("50%", [r"\boxed{50\%}", r"$50\%$", "50 percent", r"\boxed{0.5}"], [r"\boxed{51\%}"]),
        ("$5", [r"\boxed{5}"], ["6"]),
        (r"\text{Evelyn}", [r"\boxed{\text{Evelyn}}"], [r"\boxed{\text{Ann}}"]),
        (["1", "2"], ["1", "2"], ["3"]),
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


@pytest.mark.parametrize(
    "reply",
    [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{99999999!}",
        "1 " * 50_000,
        "$ " * 50_000,
        r"\[ \boxed{" * 10_000,
        "The answer is " * 10_000,
    ],
)
def test_a_reply_that_takes_too_long_is_wrong_and_the_next_is_rated(reply: str) -> None:
    part = MathPart(timeout_s=0.5)
    assert part.rate_reply({"answer": "5"}, reply).value == 0.0
    assert part.rate_reply({"answer": "5"}, "It is 5.").value == 1.0


def test_replies_out_of_time_are_counted_and_leave_no_process() -> None:
    part = MathPart(timeout_s=0.2)
    for _ in range(3):
        rating = part.rate_reply({"answer": "7"}, r"\boxed{99999999!}")
        assert (rating.value, rating.details) == (0.0, {"out_of_time": 1.0})
    assert part.rate_reply({"answer": "7"}, "7").details == {"out_of_time": 0.0}
    alive = [one for one in multiprocessing.active_children() if one.name.startswith("math")]
    assert len(alive) == 1
    # Something else may end the process between two replies.
    alive[0].kill()
    alive[0].join()
    assert part.rate_reply({"answer": "7"}, "7").value == 1.0


def test_a_process_that_something_else_ends_is_a_failure_and_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(rights: object, reply: str) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    part = MathPart()
    with monkeypatch.context() as patched:
        patched.setattr(math_process, "is_right", die)
        with pytest.raises(ChildProcessError, match="must live, got status -9"):
            part.rate_reply({"answer": "7"}, "7")
    assert part.rate_reply({"answer": "7"}, "7").value == 1.0


def test_a_right_answer_that_takes_too_long_is_an_error_of_its_row() -> None:
    part = MathPart(timeout_s=0.2)
    for wanted in ("99999999!", "9^{9^{9^{9}}}"):
        with pytest.raises(ValueError, match=r"must be compared within 0.2 s .* \(timeout_s\), got no end"):
            part.rate_reply({"answer": wanted}, "7")
    assert part.rate_reply({"answer": "7"}, "7").value == 1.0


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("So \\boxed{5}.\n" + "I check that. " * 1000, 1.0),
        ("x " * 9000 + "so $\\boxed{5}$. " + "I check that. " * 1000, 1.0),
        ("\\boxed{4}" + "\nI check that: 4." * 1000 + "\nSo \\boxed{5}.", 1.0),
        ("\\boxed{5}" + "\nI check that: 5." * 1000 + "\nSo \\boxed{4}.", 0.0),
        ("a formula $x^2$ here\n" * 1000 + "so it is $5$.", 1.0),
        ("The answer is 5.\n" + "Some more words.\n" * 1000, 0.0),
    ],
)
def test_of_a_long_reply_the_last_box_and_the_end_count(reply: str, value: float) -> None:
    assert MathPart().rate_reply({"answer": "5"}, reply).value == value
    assert len(cut_reply(reply)) < 4000


def test_an_expression_without_end_costs_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "answer": 7} for i in range(9)])
    args = make_arguments(rows, {"use": "math", "timeout_s": 0.5})

    async def score_both() -> None:
        pool = await UserCodePool.open("dataset", args, WorkerLimits(max_workers=2))
        try:
            worker = await pool.take_worker()
            for reply, reward in ((r"\boxed{99999999!}", 0.0), ("It is 7.", 1.0)):
                score = await worker.call("score_response", ["train", 0, 0, reply], 60.0, "score")
                assert score["reward"] == reward
        finally:
            await pool.close()

    asyncio.run(score_both())
