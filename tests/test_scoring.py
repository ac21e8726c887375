"""A score that hangs, raises, exits or is no number fails its own group, and the engine goes on meanwhile."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from generator_run import OVERRIDES, GeneratorRun

from buffers import messages as m
from buffers.run_status import RunStatus
from buffers.trajectory import GREEDY
from configs.load import load_config
from generators import scoring
from generators.episode import EncodedPrompt, SimulatedEpisodes
from generators.score_checks import MAX_ERROR, check_score, describe_error
from generators.scoring import ScoringPool, ScoringResult, TooManyScoresHang
from generators.task import Score

ROOT = Path(__file__).parents[1]


class ManualClock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make_pool(clock: ManualClock) -> Iterator[Callable[..., ScoringPool]]:
    pools: list[ScoringPool] = []

    def begin(num_threads: int = 1, timeout_s: float = 30.0) -> ScoringPool:
        pools.append(ScoringPool(num_threads, timeout_s, clock))
        return pools[-1]

    yield begin
    for pool in pools:
        pool.close()


def collect_all(pool: ScoringPool, count: int) -> dict[int, ScoringResult]:
    found: dict[int, ScoringResult] = {}
    deadline = time.monotonic() + 60
    while len(found) < count:
        found |= {scored.lease: scored for scored in pool.collect_results()}
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    return found


class HangingScore:
    """A score that hangs until `end` is called."""

    def __init__(self) -> None:
        self._begun, self._end = threading.Event(), threading.Event()
        self.thread = threading.current_thread()

    def __call__(self) -> Score:
        self.thread = threading.current_thread()
        self._begun.set()
        self._end.wait(timeout=60)
        return Score(1.0)

    def wait_for_begin(self) -> None:
        assert self._begun.wait(timeout=60)

    def end(self) -> None:
        """Ends the call, and waits until its abandoned thread has ended."""
        self._end.set()
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()


def score_one() -> Score:
    return Score(1.0)


def test_a_score_that_hangs_fails_its_group_by_name_and_holds_nobody_else(
    make_pool: Callable[..., ScoringPool], clock: ManualClock
) -> None:
    pool, hang = make_pool(1, 0.3), HangingScore()
    pool.submit_group(1, [score_one, hang], "prompt 7 of task t")
    pool.submit_group(2, [score_one, score_one], "prompt 8 of task t")
    hang.wait_for_begin()
    clock.now += 0.3
    assert pool.collect_results() == [], "it may take that long"
    clock.now += 0.1
    found = collect_all(pool, 2)
    assert found[2].scores == [Score(1.0), Score(1.0)]
    assert found[1].error == (
        "TimeoutError: a score must take at most 0.3 s (generators.score_timeout_s), got 0.4 s "
        "without an end for sample 1 of prompt 7 of task t"
    )
    assert pool.num_abandoned == 1 and pool.collect_results() == []


def test_the_deadline_is_each_scores_own_and_waiting_for_a_thread_does_not_count(
    make_pool: Callable[..., ScoringPool], clock: ManualClock
) -> None:
    pool, looked = make_pool(1, 1.0), threading.Semaphore(0)

    def slow() -> Score:
        clock.now += 0.8
        looked.acquire(timeout=60)
        return Score(1.0)

    for lease in range(2):
        pool.submit_group(lease, [slow] * 4, "a prompt")
    found: dict[int, ScoringResult] = {}
    deadline = time.monotonic() + 60
    while len(found) < 2:
        assert time.monotonic() < deadline
        found |= {scored.lease: scored for scored in pool.collect_results()}
        looked.release()
        time.sleep(0.005)
    assert [len(scored.scores) for scored in found.values()] == [4, 4]


def test_an_abandoned_score_that_ends_after_all_is_not_taken_for_anything(
    make_pool: Callable[..., ScoringPool], clock: ManualClock
) -> None:
    pool, late = make_pool(1, 0.1), HangingScore()
    pool.submit_group(1, [late, score_one], "a prompt")
    late.wait_for_begin()
    clock.now += 1.0
    assert collect_all(pool, 1)[1].error
    late.end()
    pool.submit_group(2, [score_one], "a prompt")
    assert collect_all(pool, 1)[2].error is None
    assert not pool.collect_results() and pool.num_abandoned == 1


def test_what_is_forgotten_is_not_scored_and_not_handed_out(make_pool: Callable[..., ScoringPool]) -> None:
    pool, going, called = make_pool(1), threading.Event(), list[int]()

    def first() -> Score:
        going.wait(timeout=30)
        return Score(1.0)

    def second() -> Score:
        called.append(2)
        return Score(1.0)

    pool.submit_group(1, [first], "a prompt")
    pool.submit_group(2, [second], "a prompt")
    pool.submit_group(3, [score_one], "a prompt")
    pool.forget_group(1)
    pool.forget_group(2)
    going.set()
    assert list(collect_all(pool, 1)) == [3] and not called and not pool.collect_results()


def test_too_many_scores_that_hang_end_the_generator_with_a_sentence(
    make_pool: Callable[..., ScoringPool], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "MAX_HANGING", 3)
    pool, hanging = make_pool(4, 0.05), [HangingScore() for _ in range(4)]
    for lease, hang in enumerate(hanging):
        pool.submit_group(lease, [hang], f"prompt {lease} of task t")
    for hang in hanging:
        hang.wait_for_begin()
    clock.now += 1.0
    with pytest.raises(
        TooManyScoresHang,
        match="at most 3 scores of a generator may hang at a time, got one more: .* of task t",
    ):
        pool.collect_results()


def test_scores_that_were_only_late_do_not_end_the_generator(
    make_pool: Callable[..., ScoringPool], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "MAX_HANGING", 3)
    pool = make_pool(1, 0.05)
    for lease in range(8):  # one at a time, and each ends when it has been given up
        late = HangingScore()
        pool.submit_group(lease, [late], "a prompt")
        late.wait_for_begin()
        clock.now += 1.0
        assert collect_all(pool, 1)[lease].error
        late.end()
    assert pool.num_abandoned == 8


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def make_raising_score(error: BaseException) -> Callable[[], Score]:
    def score() -> Score:
        raise error

    return score


def recurse() -> Score:
    return recurse()


@pytest.mark.parametrize(
    ("score", "error"),
    [
        (lambda: sys.exit(3), "SystemExit: 3"),
        (make_raising_score(KeyboardInterrupt()), "KeyboardInterrupt: "),
        (make_raising_score(GeneratorExit()), "GeneratorExit: "),
        (recurse, "RecursionError: maximum recursion depth exceeded"),
        (make_raising_score(UnspeakableError()), "UnspeakableError (its text cannot be shown)"),
        (make_raising_score(ValueError("\ud800 is no text")), "ValueError: ? is no text"),
        (make_raising_score(ValueError("x" * 10_000)), "ValueError: " + "x" * (MAX_ERROR - 12)),
        (lambda: None, "ValueError: score must be a generators.task.Score, got None"),
    ],
)
def test_whatever_a_score_raises_fails_its_group_and_its_thread_goes_on(
    make_pool: Callable[..., ScoringPool], score: Callable[[], Score], error: str
) -> None:
    pool = make_pool(1)
    pool.submit_group(1, [score], "a prompt")
    pool.submit_group(2, [score_one], "a prompt")
    found = collect_all(pool, 2)
    assert (
        found[1].error is not None and found[1].error.startswith(error) and len(found[1].error) <= MAX_ERROR
    )
    assert found[2].error is None and not pool.num_abandoned


@pytest.mark.parametrize(
    ("score", "error"),
    [
        (Score(float("nan")), "reward must be finite, got nan"),
        (Score(float("-inf")), "reward must be finite, got -inf"),
        (Score(1e39), "reward must be within ± 3.4e38 (it is kept in float32), got 1e+39"),
        (Score(10**400), "reward must be within ± 3.4e38"),
        (Score(10**5000), "reward must be within ± 3.4e38"),
        (Score("0.5"), "reward must be a number, got '0.5'"),
        (Score(None), "reward must be a number, got None"),
        (Score(1j), "reward must be a number, got 1j"),
        (Score(torch.ones(2)), "reward must be a number, got tensor([1., 1.])"),
        (Score(1.0, {"length": "long"}), "components['length'] must be a number, got 'long'"),
        (Score(1.0, {"length": float("inf")}), "components['length'] must be finite, got inf"),
        (Score(1.0, {"length": -1e39}), "components['length'] must be within ± 3.4e38"),
        (Score(1.0, [1.0]), "components must be a dict of numbers by name, got [1.0]"),
        (Score(1.0, {str(i): 0.0 for i in range(65)}), "components must be at most 64, got 65"),
        (
            Score(1.0, {"x" * 201: 0.0}),
            "names of components must be text of at most 200 characters…, got 'xxx",
        ),
        (Score(1.0, {7: 0.0}), "names of components must be text…, got 7"),
        (Score(1.0, {"\ud800": 0.0}), "names of components must be text"),
        (Score(1.0, {GREEDY: 0.0}), "names of components must be text… other than 'greedy', got 'greedy'"),
    ],
)
def test_a_score_that_a_trajectory_cannot_hold_is_refused_with_field_rule_and_value(
    score: Score, error: str
) -> None:
    with pytest.raises(ValueError) as raised:
        check_score(score)
    assert all(part in str(raised.value) for part in error.split("…"))


def test_numbers_of_every_kind_are_taken_for_what_they_are() -> None:
    for number in (
        True,
        1,
        1.0,
        np.float32(1),
        np.bool_(True),
        np.int64(1),
        torch.tensor(1.0),
        torch.tensor(1),
    ):
        found = check_score(Score(number, {"a": number}))
        assert found == Score(1.0, {"a": 1.0}) and type(found.reward) is type(found.components["a"]) is float
    assert describe_error(ValueError("plain")) == "ValueError: plain"


def test_a_score_that_hangs_does_not_hold_up_the_end_of_its_process() -> None:
    code = (
        "import threading; from generators.scoring import ScoringPool; pool = ScoringPool(2, 30.0); "
        "pool.submit_group(1, [threading.Event().wait], 'x'); pool.close()"
    )
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
    assert time.monotonic() - began < 30


class UnrulyEpisodes(SimulatedEpisodes):
    """Prompts and scores that go wrong in every way that tasks have gone wrong."""

    def encode_prompt(self, lease: m.Lease) -> EncodedPrompt:
        if lease.index == 1:
            sys.exit("no prompt")
        return super().encode_prompt(lease)

    def score_tokens(self, prompt: EncodedPrompt, tokens: list[int]) -> Score:
        match prompt.prompt.text:
            case "simulated 2":
                return HangingScore()()
            case "simulated 3":
                sys.exit(1)
            case "simulated 5":
                return Score(1e39)
            case "simulated 6":
                return Score(1.0, {"judge": None})
        return super().score_tokens(prompt, tokens)


class SlowEpisodes(SimulatedEpisodes):
    def score_tokens(self, prompt: EncodedPrompt, tokens: list[int]) -> Score:
        time.sleep(0.2)
        return super().score_tokens(prompt, tokens)


def run_three_steps(
    folder: Path, episodes: SimulatedEpisodes, is_told: Callable[[RunStatus], bool], *overrides: str
) -> tuple[list[int], RunStatus]:
    """Trains three steps with one generator. Returns the groups trained, and the status when the generator
    `is_told` of all."""
    config = load_config([*OVERRIDES, "buffer.max_attempts=1", *overrides])
    run, trained = GeneratorRun(config, folder, episodes), list[int]()
    for step in range(3):
        run.publish_version(step)
        trained += run.train_step(step)
    status = run.wait_for(is_told)
    run.close()
    return trained, status


def test_a_task_that_hangs_exits_and_scores_nonsense_costs_its_groups_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    trained, status = run_three_steps(
        tmp_path,
        UnrulyEpisodes(),
        lambda status: status.abandoned_scores == 1,
        "generators.score_timeout_s=2",
    )
    assert len(trained) == len(set(trained)) == 12 and not {1, 2, 3, 5, 6} & set(trained)
    errors = dict(status.quarantined)
    assert errors.pop(2).startswith(
        "TimeoutError: a score must take at most 2 s (generators.score_timeout_s), got "
    )
    assert errors == {
        1: "SystemExit: no prompt",
        3: "SystemExit: 1",
        5: "ValueError: reward must be within ± 3.4e38 (it is kept in float32), got 1e+39",
        6: "ValueError: components['judge'] must be a number, got None",
    }
    assert status.abandoned_scores == 1 and status.generators["g0"].abandoned_scores == 1
    assert (
        status.tokens.total
        == status.tokens.trained + sum(status.tokens.rejected.values()) + status.tokens.in_flight
    )


def test_an_engine_that_has_nothing_to_do_while_scores_are_under_way_is_idle(tmp_path: Path) -> None:
    trained, status = run_three_steps(
        tmp_path, SlowEpisodes(), lambda status: status.generator_idle_share > 0.5, "staleness.max_versions=0"
    )
    assert len(trained) == 12, "12 groups take 5 s to score, and far less to sample"


def test_scores_run_side_by_side_in_as_many_threads_as_are_asked_for(
    make_pool: Callable[..., ScoringPool],
) -> None:
    met = threading.Barrier(4)

    def meet() -> Score:
        met.wait(timeout=20)
        return Score(1.0)

    pool = make_pool(4)
    for lease in range(4):
        pool.submit_group(lease, [meet], "a prompt")
    assert not any(scored.error for scored in collect_all(pool, 4).values())


def test_threads_and_deadline_must_be_above_zero() -> None:
    with pytest.raises(
        ValueError, match=r"generators.score_timeout_s must be a finite number above 0, got 0.0"
    ):
        load_config(["generators.score_timeout_s=0"])
    with pytest.raises(ValueError, match=r"generators.score_threads must be a finite number above 0, got -1"):
        load_config(["generators.score_threads=-1"])
    with pytest.raises(ValueError, match=r"buffer.stalled_s must be a finite number above 0, got 0.0"):
        load_config(["buffer.stalled_s=0"])
