"""The benchmark's comparisons and tables, from results made by hand."""

from dataclasses import replace

import pytest

from benchmark import ASYNC, ON_POLICY, TARGETS, Result, compare_modes, make_tables

BEFORE = Result(
    setting="throttled",
    name=ON_POLICY,
    seed=0,
    steps_per_s=1.0,
    generated_tokens_per_s=10.0,
    trained_tokens_per_s=10.0,
    share_of_bound=None,
    masked_share=0.0,
    idle_learner=0.5,
    idle_generators=0.5,
    staleness_mean=0.0,
    staleness_max=0,
    wall_s=50.0,
    generators_share=0.5,
    curve=[(1.0, 0.3)],
    held_out=[(0, 0.0, 0.4), (20, 20.0, 0.6), (40, 40.0, 0.8)],
)
AFTER = replace(
    BEFORE,
    name=ASYNC,
    steps_per_s=1.8,
    held_out=[(0, 0.0, 0.4), (20, 10.0, 0.58), (40, 20.0, 0.78)],
    generators_share=0.51,
)


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "throttled", 0.7)


def test_the_time_to_a_reward_is_read_between_two_evaluations() -> None:
    assert BEFORE.seconds_to_target == pytest.approx(30.0)
    assert AFTER.seconds_to_target == pytest.approx(16.0)
    assert replace(BEFORE, held_out=BEFORE.held_out[:2]).seconds_to_target is None


def test_modes_are_compared_seed_by_seed_with_an_interval() -> None:
    other = [replace(BEFORE, seed=1), replace(AFTER, seed=1, steps_per_s=2.0)]
    rates, sooner, lost, turns = compare_modes([BEFORE, AFTER, *other], "throttled")
    assert (
        rates == "steps a second, asynchronous / on-policy: 1.900 ± 1.271 (2 seeds)"
    )  # 12.706 × 0.1414 / √2
    assert sooner.endswith("0.7, sooner by: 1.875 ± 0.000 (2 seeds)")
    assert lost.endswith("mean over versions: 0.020 ± 0.000 (2 seeds)")
    assert "0.500 to 0.510" in turns


def test_a_target_that_a_run_has_not_reached_is_not_compared() -> None:
    lines = compare_modes(
        [BEFORE, replace(AFTER, held_out=AFTER.held_out[:2] + [(40, 20.0, 0.6)])], "throttled"
    )
    assert not any("sooner" in line for line in lines)
    (table,) = make_tables([BEFORE, replace(BEFORE, seed=1, held_out=[(0, 0.0, 0.4)])])
    assert list(table.columns[-2].cells) == ["–"]
