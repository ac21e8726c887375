"""The judge: requests, grades, failures of its server, and the bound on requests of several processes."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from dataset_rows import make_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_server import (
    StubServer,
    break_off,
    close_connection,
    drip,
    hang,
    refuse_with,
    say_text,
    send_raw,
    serve_answers,
)

from generators.rewards import servers
from generators.rewards.composition import PartFailed, make_parts
from generators.rewards.judge import HASH_BITS, JudgePart, find_field
from generators.rewards.servers import read_retry_after
from generators.rewards.slots import SharedSlots
from generators.task import Score
from generators.user_code.pool import UserCodePool, WorkerLimits

ROW = {"prompt": [{"role": "system", "content": "Sum."}, {"role": "user", "content": "1+1?"}], "answer": "2"}
TEMPLATE = "Question: {prompt}\nRight: {reference}\nGiven: {response}\nEnd with Grade: 0-10. {braces}"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(servers, "LONGEST_WAIT_S", 0.02)
    # No proxy leads to this machine, whatever the environment says.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")


def ask_judge(server: StubServer, reply: str = "It is 2.", **arguments: Any) -> Score:
    judge = {"use": "judge", "url": f"{server.url}/v1", "model": "grader", "prompt": TEMPLATE}
    return make_parts([judge | arguments]).rate_reply(ROW, reply)


def test_the_judge_sees_prompt_reply_and_reference_and_its_grade_is_the_number() -> None:
    with serve_answers(say_text("Grade: 3 would be harsh.\n**Grade: 8.5**")) as server:
        score = ask_judge(
            server, "{reference} is {prompt}", system="Be strict.", weight=0.1, body={"seed": 1}
        )
    assert score.reward == pytest.approx(0.85) and score.components["judge"] == 8.5
    assert server.paths == ["/v1/chat/completions"]
    (request,) = server.requests
    # A place in the reply is text like any other, and unknown braces stay.
    assert request["messages"] == [
        {"role": "system", "content": "Be strict."},
        {
            "role": "user",
            "content": "Question: system: Sum.\n\nuser: 1+1?\nRight: 2\nGiven: {reference} is {prompt}\n"
            "End with Grade: 0-10. {braces}",
        },
    ]
    assert {name: request[name] for name in ("model", "temperature", "max_tokens", "seed")} == {
        "model": "grader", "temperature": 0.0, "max_tokens": 1024, "seed": 1,
    }  # fmt: skip


def test_the_hash_of_the_instructions_is_on_the_record_exactly_and_changes_with_them() -> None:
    def make_judge(**arguments: Any) -> JudgePart:
        return JudgePart(**({"url": "http://h/v1", "model": "m", "prompt": "{response}"} | arguments))

    changes = [{}, {"prompt": "{response}!"}, {"model": "n"}, {"system": "s"}, {"temperature": 1.0}]
    hashes = [make_judge(**one).prompt_hash for one in changes]
    assert len(set(hashes)) == 5 and hashes[0] == make_judge(url="http://other/v1").prompt_hash
    assert all(number.is_integer() and 0 <= number < 1 << HASH_BITS for number in hashes)
    with serve_answers(say_text("Grade: 1")) as server:
        components = ask_judge(server).components
    assert components["judge/prompt_hash"] == make_judge(model="grader", prompt=TEMPLATE).prompt_hash


@pytest.mark.parametrize(
    ("arguments", "text", "grade"),
    [
        ({}, "grade: -1", -1.0),
        ({}, "The grade is\n\n**Grade**: 10", 10.0),
        ({"grade": r"\[\[(\d+)\]\]"}, "so [[7]]", 7.0),
        ({"grade": r"\d$"}, "so 7", 7.0),
        ({"grade_field": "score"}, '{"reason": "{", "score": 0.5}', 0.5),
        ({"grade_field": "score"}, '{"a": {"score": 1}} then\n```json\n{"score": "4", "why": {}}\n```', 4.0),
        ({"lowest": 0, "highest": 10}, "Grade: 10", 10.0),
    ],
)  # fmt: skip
def test_a_grade_is_found_in_text_and_in_json(arguments: dict, text: str, grade: float) -> None:
    with serve_answers(say_text(text)) as server:
        assert ask_judge(server, **arguments).components["judge"] == grade


@pytest.mark.parametrize(
    ("arguments", "text", "sentence"),
    [
        ({}, "I will not grade this.", "a judge must give a grade, got 'I will not grade this.'"),
        ({}, "", "a judge must give a grade, got ''"),
        ({"grade_field": "score"}, '{"score": null}', "a judge must give a grade"),
        ({"grade_field": "score"}, '{"score": true}', "a judge must give a grade"),
        ({"grade_field": "score"}, '{"score": NaN}', "a judge's grade must be a finite number, got nan"),
        ({"grade_field": "score"}, '[{"points": 1}]', "a judge must give a grade"),
        ({"grade": "good|bad"}, "good", "a judge must give a grade, got 'good'"),
        ({"highest": 10}, "Grade: 11", "a judge's grade must be a finite number, at most 10, got 11.0"),
        ({"lowest": 0}, "Grade: -1", "a judge's grade must be a finite number, at least 0, got -1.0"),
    ],
)
def test_a_grade_that_cannot_be_read_is_an_error_and_never_zero(
    arguments: dict, text: str, sentence: str
) -> None:
    with serve_answers(say_text(text)) as server, pytest.raises(PartFailed, match=sentence):
        ask_judge(server, **arguments)
    assert len(server.requests) == 1


@settings(max_examples=30, deadline=None)
@given(st.text(), st.text(alphabet='{}[]":,sore0123456789 '))
def test_no_answer_of_a_judge_breaks_the_search_for_json(text: str, braces: str) -> None:
    for answer in (text, braces, text + braces):
        find_field(answer, "score")
        assert find_field(f'{answer} {{"score": 3}}', "score") in (3, None)


# ---- failures of the server


@pytest.mark.parametrize(
    "failure",
    [
        refuse_with(500, "oops"),
        refuse_with(503),
        refuse_with(429, "slow down"),
        refuse_with(429, Retry_After="0"),
        refuse_with(529, Retry_After="soon"),
        send_raw(b'{"choices": ['),
        send_raw(b"\xff\xfe"),
        close_connection,
        break_off,
    ],
    ids=["500", "503", "429", "429-zero", "529-words", "half-json", "no-text", "closed", "broken-off"],
)
def test_what_may_pass_is_tried_again(failure: Callable) -> None:
    with serve_answers(failure, failure, say_text("Grade: 4")) as server:
        assert ask_judge(server, timeout_s=60, attempt_timeout_s=30).components["judge"] == 4.0
    assert len(server.requests) == 3


def test_attempts_come_to_an_end_and_the_last_failure_is_told() -> None:
    with (
        serve_answers(refuse_with(500, "out of memory")) as server,
        pytest.raises(PartFailed, match=r"'judge': RequestFailedForNow: .* got 500: out of memory"),
    ):
        ask_judge(server, attempts=3, timeout_s=60)
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 301])
def test_what_will_not_pass_is_not_tried_again(status: int) -> None:
    with (
        serve_answers(refuse_with(status, "no such model")) as server,
        pytest.raises(PartFailed, match=f"must answer with status 200, got {status}: no such model"),
    ):
        ask_judge(server)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}']
)
def test_an_answer_of_another_form_is_an_error(body: bytes) -> None:
    with (
        serve_answers(send_raw(body)) as server,
        pytest.raises(PartFailed, match=r"a judge's answer must have choices\[0\]\.message\.content"),
    ):
        ask_judge(server)


def test_an_answer_without_end_is_cut_off() -> None:
    with (
        serve_answers(send_raw(b" " * (servers.MAX_ANSWER + 1))) as server,
        pytest.raises(PartFailed, match="must answer with at most 4194304 bytes, got more"),
    ):
        ask_judge(server, timeout_s=60, attempt_timeout_s=60)


def test_the_server_says_how_long_to_wait() -> None:
    with serve_answers(refuse_with(429, Retry_After="1"), say_text("Grade: 4")) as server:
        ask_judge(server, timeout_s=60)
    assert 0.95 <= server.arrived_at[1] - server.arrived_at[0] < 30


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    began = time.monotonic()
    with (
        serve_answers(refuse_with(429, "full", Retry_After="3600")) as server,
        pytest.raises(PartFailed, match="got 429: full"),
    ):
        ask_judge(server, timeout_s=60)
    assert time.monotonic() - began < 50 and len(server.requests) == 1


@pytest.mark.parametrize("failure", [hang, drip])
def test_an_attempt_that_hangs_is_given_up_and_tried_again(failure: Callable) -> None:
    with serve_answers(failure, say_text("Grade: 4")) as server:
        assert ask_judge(server, timeout_s=60, attempt_timeout_s=0.5).components["judge"] == 4.0
    assert len(server.requests) == 2


def test_all_attempts_together_keep_the_deadline() -> None:
    with serve_answers(hang) as server:
        began = time.monotonic()
        sentence = (
            r"within 4 s \(timeout_s\), got [1-9] failed attempts .* the last attempt: .* within 0\.5 s"
        )
        with pytest.raises(PartFailed, match=sentence):
            ask_judge(server, timeout_s=4, attempt_timeout_s=0.5, attempts=99)
        assert 3.9 < time.monotonic() - began < 60


def test_a_server_that_is_not_there_is_an_error() -> None:
    with serve_answers(hang) as server:
        pass
    with pytest.raises(PartFailed, match="RequestFailedForNow: http://127.0.0.1:.* ConnectError"):
        ask_judge(server, attempts=2)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("7", 7.0), (" 0 ", 0.0), ("soon", None), ("-1", None), ("1.5", None), ("٣", None),
     ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("Wed, 21 Oct 2015 07:28:00", 0.0), ("9" * 400, 999999999.0)],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert read_retry_after(value) == seconds


# ---- the key


def test_the_key_reaches_the_server_and_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_KEY", "sk-very-secret")
    with serve_answers(say_text("Grade: 1"), refuse_with(401, "Incorrect key: sk-very-secret")) as server:
        ask_judge(server, key_env="GRADER_KEY")
        with pytest.raises(PartFailed, match="got 401: Incorrect key: …") as failure:
            ask_judge(server, key_env="GRADER_KEY")
    assert [one["Authorization"] for one in server.headers] == ["Bearer sk-very-secret"] * 2
    assert "sk-very-secret" not in repr(failure.value) + repr(failure.value.__cause__)
    with serve_answers(say_text("Grade: 1")) as server:
        ask_judge(server)
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"url": "localhost:8000"}, r"\[0\]\.url must be the address of a server .* got 'localhost:8000'"),
        ({"url": "http://host:99999"}, r"\[0\]\.url must be the address of a server"),
        ({"url": None}, r"\[0\]\.url must be the address of a server .* got None"),
        ({"prompt": "Grade it."}, r"\[0\]\.prompt must have the place \{response\}, got 'Grade it\.'"),
        ({"model": ""}, r"\[0\]\.model must be a text that is not empty, got ''"),
        ({"grade": "("}, r"\[0\]\.grade must be a regular expression, got '\('"),
        ({"grade": "(a)(b)"}, r"\[0\]\.grade must have at most one group"),
        ({"lowest": 2, "highest": 1}, r"\[0\]\.lowest must be below highest, got 2 and 1"),
        ({"key_env": "NO_SUCH_VARIABLE"}, r"\[0\]\.key_env must name an environment variable that is set"),
        ({"max_concurrent": 0}, r"\[0\]\.max_concurrent must be a whole number of at least 1, got 0"),
        ({"attempts": True}, r"\[0\]\.attempts must be a whole number of at least 1, got True"),
        ({"timeout_s": float("inf")}, r"\[0\]\.timeout_s must be a finite number, above 0, got inf"),
        ({"attempt_timeout_s": 30}, r"\[0\]\.attempt_timeout_s must be .* at most 25, got 30"),
        ({"body": ["seed"]}, r"\[0\]\.body must be keys of a request with their values, got \['seed'\]"),
        ({"key": "sk"}, r"\[0\] must have arguments of judge: url, model, .* got 'key'"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_task_is_made(arguments: dict, sentence: str) -> None:
    judge = {"use": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "prompt": "{response}"}
    with pytest.raises(ValueError, match=rf"reward\.parts{sentence}"):
        make_parts([judge | arguments])


# ---- the bound on requests at a time


def test_the_workers_of_a_generator_share_the_bound_on_requests() -> None:
    def answer_late(request: Any) -> None:
        """Answers as soon as the bound has been reached, and late enough to let another go beyond it."""
        stub, deadline = request.server.stub_server, time.monotonic() + 60
        while stub.most_at_once < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        say_text("Grade: 1")(request)

    async def score_all(url: str) -> list[float]:
        judge = {"use": "judge", "url": url, "model": "m", "prompt": "{response}", "max_concurrent": 2}
        args = make_arguments({"task": "sorting"}, judge | {"timeout_s": 100})
        pool = await UserCodePool.open("dataset", args, WorkerLimits(max_workers=6))
        try:
            workers = [await pool.take_worker() for _ in range(6)]

            async def score_some(worker: Any) -> list[float]:
                calls = [["train", i, 0, "1 2 3"] for i in range(4)]
                return [(await worker.call("score_response", one, 300.0, "score"))["reward"] for one in calls]

            return sum(await asyncio.gather(*map(score_some, workers)), [])
        finally:
            await pool.close()

    with serve_answers(answer_late) as server:
        assert asyncio.run(score_all(f"{server.url}/v1")) == [1.0] * 24
    assert len(server.requests) == 24 and server.most_at_once == 2


def hold_for_ever(slots: SharedSlots, held: Any) -> None:
    async def hold() -> None:
        async with slots.hold_slot(60):
            held.set()
            await asyncio.sleep(1000)

    asyncio.run(hold())


def test_a_process_that_is_killed_gives_its_slot_back() -> None:
    slots, context = SharedSlots(1), multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=hold_for_ever, args=(slots, held))
    process.start()
    assert held.wait(60)

    async def take_slot(timeout_s: float) -> None:
        async with slots.hold_slot(timeout_s):
            pass

    with pytest.raises(
        TimeoutError, match=r"one of the 1 slots \(max_concurrent\) must get free within 0\.2 s"
    ):
        asyncio.run(take_slot(0.2))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    asyncio.run(take_slot(60))


def test_coroutines_of_one_process_keep_the_bound_too() -> None:
    slots, under_way, most = SharedSlots(3), 0, 0

    async def hold_once() -> None:
        nonlocal under_way, most
        async with slots.hold_slot(60):
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.01)
            under_way -= 1

    async def hold_all() -> None:
        await asyncio.gather(*(hold_once() for _ in range(12)))

    asyncio.run(hold_all())
    assert most == 3


def test_a_request_is_json_of_utf8_whatever_the_reply_has() -> None:
    with serve_answers(say_text("Grade: 1")) as server:
        ask_judge(server, "naïve 🙂 \x00 \u2028")
    assert "naïve 🙂 \x00 \u2028" in server.requests[0]["messages"][-1]["content"]
