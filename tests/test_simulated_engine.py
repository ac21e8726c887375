"""The simulated engine keeps time exactly, whoever asks and whenever."""

import math
import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generators.engine import Completion, Sample
from generators.simulated_engine import SimulatedEngine
from sync.manifest import Manifest
from sync.snapshot import Snapshot


class ManualTime:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


def make_snapshot(version: int) -> Snapshot:
    """Makes a snapshot of which the engine reads the version only."""
    held = Snapshot.__new__(Snapshot)
    held.manifest = Manifest(version, "x", "nowhere", 0, (), "")
    return held


def make_engine(
    clock: ManualTime, *, slots: int = 2, rate: float = 10.0, mean: float = 20.0, cv: float = 0.0
) -> SimulatedEngine:
    engine = SimulatedEngine(
        tokens_per_s=rate, slots=slots, mean_tokens=mean, cv=cv, clock=clock.clock, sleep=clock.sleep
    )
    engine.load_version(make_snapshot(0))
    return engine


def make_sample(number: int, max_tokens: int = 10**6) -> Sample:
    return Sample(id=f"s{number}", prompt=[1, 2], max_tokens=max_tokens, seed=number)


def run_dry(engine: SimulatedEngine, clock: ManualTime) -> dict[str, tuple[float, Completion]]:
    """Steps until all samples are done. Returns when each was handed out, and its completion."""
    done = {}
    while engine.num_unfinished:
        for completion in engine.step():
            done[completion.id] = (clock.now, completion)
    return done


def test_a_sample_takes_its_length_over_the_rate() -> None:
    clock = ManualTime()
    engine = make_engine(clock)
    engine.add_sample(make_sample(0))
    ((at, completion),) = run_dry(engine, clock).values()
    assert at == pytest.approx(2.0)
    assert (len(completion.tokens), completion.finish_reason) == (20, "stop")
    assert completion.versions == [0] * 20 and completion.logprobs == [0.0] * 20


def test_surplus_samples_queue_and_no_time_is_lost_between_them() -> None:
    clock = ManualTime()
    engine = make_engine(clock, slots=2)
    for i in range(7):
        engine.add_sample(make_sample(i))
    done = run_dry(engine, clock)
    assert [round(at, 6) for at, _ in done.values()] == [2, 2, 4, 4, 6, 6, 8]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 5),
    st.floats(0, 2),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=30, unique=True),
    st.lists(st.floats(0.001, 50), min_size=1, max_size=10),
)
def test_time_does_not_drift_however_late_the_caller_is(
    slots: int, cv: float, seeds: list[int], pauses: list[float]
) -> None:
    """Against a list-scheduling reference: the k-th sample begins when the first of the slots is free."""
    clock = ManualTime()
    engine = make_engine(clock, slots=slots, cv=cv)
    for seed in seeds:
        engine.add_sample(make_sample(seed))
    done: dict[str, Completion] = {}
    turn = 0
    while engine.num_unfinished:
        clock.now += pauses[turn % len(pauses)]  # away on other business
        turn += 1
        done |= {completion.id: completion for completion in engine.step()}
    free = [0.0] * slots
    for seed in seeds:
        slot = free.index(min(free))
        free[slot] += len(done[f"s{seed}"].tokens) / 10.0
    assert max(free) == pytest.approx(_busy_until(seeds, slots, cv), abs=1e-6)


def _busy_until(seeds: list[int], slots: int, cv: float) -> float:
    """Returns the time at which an engine that is never kept waiting has done the same work."""
    clock = ManualTime()
    engine = make_engine(clock, slots=slots, cv=cv)
    for seed in seeds:
        engine.add_sample(make_sample(seed))
    return max(at for at, _ in run_dry(engine, clock).values())


def test_each_token_carries_the_version_in_force_when_it_was_decoded() -> None:
    clock = ManualTime()
    engine = make_engine(clock)
    engine.add_sample(make_sample(0))
    clock.now = 0.55  # five tokens, at 0.1 .. 0.5
    assert engine.count_sampled_tokens() == {"s0": 5}
    engine.load_version(make_snapshot(1))
    clock.now = 1.25  # seven more
    engine.load_version(make_snapshot(4))
    ((_, completion),) = run_dry(engine, clock).values()
    assert completion.versions == [0] * 5 + [1] * 7 + [4] * 8


def test_a_queued_sample_has_only_versions_from_after_it_began() -> None:
    clock = ManualTime()
    engine = make_engine(clock, slots=1)
    engine.add_sample(make_sample(0))
    engine.add_sample(make_sample(1))
    clock.now = 1.0
    engine.load_version(make_snapshot(1))
    done = run_dry(engine, clock)
    assert set(done["s0"][1].versions) == {0, 1}
    assert set(done["s1"][1].versions) == {1}


def test_an_aborted_sample_returns_what_it_had_and_frees_its_slot() -> None:
    clock = ManualTime()
    engine = make_engine(clock, slots=1)
    for i in range(3):
        engine.add_sample(make_sample(i))
    clock.now = 0.75
    aborted = {completion.id: completion for completion in engine.abort_samples(["s0", "s2", "unknown"])}
    assert len(aborted["s0"].tokens) == 7 and aborted["s2"].tokens == []
    assert {completion.finish_reason for completion in aborted.values()} == {"abort"}
    assert engine.num_unfinished == 1
    ((at, completion),) = run_dry(engine, clock).values()
    assert (completion.id, at) == ("s1", pytest.approx(2.75))


def test_lengths_have_the_stated_mean_and_spread_and_follow_from_the_seed() -> None:
    clock = ManualTime()

    def lengths() -> list[int]:
        engine = make_engine(clock, slots=5000, mean=100, cv=0.5)
        for i in range(5000):
            engine.add_sample(make_sample(i))
        return [
            len(completion.tokens)
            for _, completion in sorted(run_dry(engine, clock).values(), key=lambda d: d[1].id)
        ]

    first = lengths()
    assert first == lengths()
    mean = statistics.mean(first)
    assert mean == pytest.approx(100, rel=0.03)
    assert statistics.stdev(first) / mean == pytest.approx(0.5, rel=0.06)
    assert max(first) <= 800 and min(first) >= 1


def test_max_tokens_cuts_a_sample_short() -> None:
    clock = ManualTime()
    engine = make_engine(clock)
    engine.add_sample(make_sample(0, max_tokens=3))
    engine.add_sample(make_sample(1, max_tokens=20))
    done = run_dry(engine, clock)
    assert [(len(c.tokens), c.finish_reason) for _, c in done.values()] == [(3, "length"), (20, "stop")]


def test_a_step_sleeps_no_longer_than_its_patience() -> None:
    clock = ManualTime()
    engine = make_engine(clock)
    engine.add_sample(make_sample(0))
    assert engine.step() == [] and clock.now == pytest.approx(0.005)
    clock.now = 1.999
    (completion,) = engine.step()
    assert completion.id == "s0" and clock.now == pytest.approx(2.0)
    assert engine.step() == [] and clock.now == pytest.approx(2.0)


def test_it_keeps_real_time_and_leaves_the_cpu_alone() -> None:
    engine = SimulatedEngine(tokens_per_s=1000, slots=16, mean_tokens=100, cv=0)
    engine.load_version(make_snapshot(0))
    for i in range(160):
        engine.add_sample(make_sample(i))
    began, cpu, num_tokens = time.monotonic(), time.process_time(), 0
    while engine.num_unfinished:
        num_tokens += sum(len(completion.tokens) for completion in engine.step())
    seconds = time.monotonic() - began
    assert num_tokens == 16000
    assert math.isclose(seconds, 1.0, abs_tol=0.1)
    assert (time.process_time() - cpu) / seconds < 0.15


def test_a_sample_that_has_ended_but_was_not_handed_out_can_be_aborted_too() -> None:
    clock = ManualTime()
    engine = make_engine(clock)
    engine.add_sample(make_sample(0))
    engine.add_sample(make_sample(1))
    clock.now = 10.0  # both have ended
    assert [len(completion.tokens) for completion in engine.abort_samples(["s0"])] == [20]
    assert [completion.id for completion in engine.step()] == ["s1"] and not engine.num_unfinished
