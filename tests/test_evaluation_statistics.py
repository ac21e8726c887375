"""The figures of an evaluation against exact references: every subset, every resample, every order."""

import json
import random
from fractions import Fraction
from itertools import combinations, product
from math import comb

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.evaluation_statistics import (
    EvaluationResult,
    PromptSamples,
    bootstrap_interval,
    compare_means,
    estimate_pass,
    summarize_samples,
)


def pass_of_all_subsets(passed: list[bool], k: int) -> Fraction:
    """The share of subsets of k samples in which one passes, by counting them all."""
    subsets = list(combinations(passed, k))
    return Fraction(sum(any(subset) for subset in subsets), len(subsets))


def make_prompts(rewards: list[list[float]]) -> list[PromptSamples]:
    return [PromptSamples(rewards=one, num_tokens=10 * len(one)) for one in rewards]


@given(passed=st.lists(st.booleans(), min_size=1, max_size=9), k=st.integers(1, 9))
def test_pass_at_k_is_the_share_of_all_subsets(passed: list[bool], k: int) -> None:
    found = estimate_pass(np.array([len(passed)]), np.array([sum(passed)]), k)[0]
    if k > len(passed):
        assert np.isnan(found)
    else:
        assert found == pytest.approx(float(pass_of_all_subsets(passed, k)), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(10000, 3, 5000), (1000, 1, 1), (4096, 4095, 2), (512, 0, 512)])
def test_pass_at_k_keeps_its_precision_with_many_samples(n: int, c: int, k: int) -> None:
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    assert estimate_pass(np.array([n]), np.array([c]), k)[0] == pytest.approx(float(exact), rel=1e-11)


def test_prompts_with_fewer_samples_than_k_are_left_out_of_pass_at_k_and_counted() -> None:
    found = summarize_samples(
        "set", make_prompts([[1, 0, 0, 0], [1, 1, 1], [0, 0, 0, 1]]), num_failed=2, k=[1, 4, 5]
    )
    assert found.passes == pytest.approx({"1": (0.25 + 1 + 0.25) / 3, "4": 1.0})
    assert found.pass_left_out == {"4": 1, "5": 3}
    assert (found.prompts, found.samples, found.failed) == (3, 11, 2)
    assert set(found.pass_ci95) == {"1", "4"}


def test_a_sample_passes_from_the_threshold_on() -> None:
    prompts = make_prompts([[0.5, 0.2], [0.49, 0.1]])
    assert summarize_samples("set", prompts, num_failed=0, k=[2], passes_at=0.5).passes == {"2": 0.5}
    assert summarize_samples("set", prompts, num_failed=0, k=[2]).passes == {"2": 0.0}


def test_each_prompt_weighs_the_same_however_many_samples_it_has() -> None:
    found = summarize_samples("set", make_prompts([[1.0], [0.0, 0.0, 0.0]]), num_failed=0, k=[1])
    assert found.avg == 0.5


@given(
    rewards=st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_no_order_changes_a_figure(rewards: list[list[float]], seed: int) -> None:
    shuffled = [list(one) for one in rewards]
    dice = random.Random(seed)
    for one in shuffled:
        dice.shuffle(one)
    dice.shuffle(shuffled)
    results = [
        summarize_samples("set", make_prompts(one), num_failed=0, k=[1, 2]) for one in (rewards, shuffled)
    ]
    assert results[0] == results[1]


def test_no_prompt_at_all_gives_no_figures() -> None:
    found = summarize_samples("set", [], num_failed=7, k=[1, 8])
    assert (found.avg, found.avg_ci95, found.passes, found.tokens, found.failed) == (None, None, {}, None, 7)
    assert found.pass_left_out == {}


def test_one_prompt_has_no_interval() -> None:
    found = summarize_samples("set", make_prompts([[1.0, 0.0]]), num_failed=0, k=[1])
    assert (found.avg, found.avg_ci95, found.pass_ci95) == (0.5, None, {})


@pytest.mark.parametrize("values", [[0.0, 1.0, 5.0], [-2.0, -1.0, 0.5, 3.0], [0.0, 0.0, 1.0, 1.0, 1.0]])
def test_an_interval_is_that_of_all_resamples(values: list[float]) -> None:
    """The reference makes each of the nⁿ resamples once."""
    means = sorted(sum(resample) / len(values) for resample in product(values, repeat=len(values)))
    low, high = bootstrap_interval(np.array(values), num_resamples=200_000) or (0.0, 0.0)
    # The share of resamples strictly below an end is at most its quantile, and of those up to it at least.
    for end, quantile in ((low, 0.025), (high, 0.975)):
        below = sum(mean < end - 1e-9 for mean in means) / len(means)
        up_to = sum(mean <= end + 1e-9 for mean in means) / len(means)
        assert below - 0.002 <= quantile <= up_to + 0.002


def test_few_distinct_values_are_drawn_like_many() -> None:
    """300 values of 0 and 1 are drawn by their counts; a difference of 1e-9 makes each of them distinct."""
    plain = np.array([0.0] * 210 + [1.0] * 90)
    distinct = plain + np.arange(300) * 1e-9
    found, reference = (bootstrap_interval(values, 40_000) or (0, 0) for values in (plain, distinct))
    assert found == pytest.approx(reference, abs=0.004)


@pytest.mark.parametrize("num_samples", [1, 8])
def test_intervals_cover_the_truth_in_about_95_of_100_evaluations(num_samples: int) -> None:
    dice, covered, num_trials, truth = np.random.default_rng(7), 0, 400, 0.0
    chances = dice.beta(2, 3, size=(num_trials, 120))
    truth = 2 / 5
    for trial in range(num_trials):
        means = dice.binomial(num_samples, chances[trial]) / num_samples
        low, high = bootstrap_interval(means, 1000) or (0.0, 0.0)
        covered += low <= truth <= high
    assert 0.92 <= covered / num_trials <= 0.98


def test_ten_thousand_prompts_are_summarized_with_their_intervals() -> None:
    dice = np.random.default_rng(0)
    rewards = [list(map(float, row)) for row in dice.integers(0, 2, size=(10_000, 4))]
    found = summarize_samples("set", make_prompts(rewards), num_failed=0, k=[1, 4])
    low, high = found.avg_ci95 or (0, 0)
    # The standard error is 0.0025.
    assert low < found.avg < high and 0.008 < high - low < 0.012


def test_the_same_values_give_the_same_interval_in_any_run() -> None:
    """Computed once and written down: neither the machine nor the day may change them."""
    assert bootstrap_interval(np.array([0.0, 0.25, 0.5, 1.0, 0.75])) == (0.2, 0.8)
    assert bootstrap_interval(np.array([0.0] * 40 + [1.0] * 60)) == (0.5, 0.69)


def test_a_comparison_cancels_what_makes_a_prompt_hard() -> None:
    dice = np.random.default_rng(3)
    hardness = dice.random(200)
    first, second = hardness, hardness + 0.02 + dice.normal(0, 0.01, 200)
    difference, interval = compare_means(first, second)
    assert interval is not None and 0 < interval[0] < difference < interval[1] < 0.03
    # Unpaired, the two intervals overlap.
    assert (bootstrap_interval(first) or (0, 0))[1] > (bootstrap_interval(second) or (0, 0))[0]


def test_a_result_has_the_names_of_its_pages_in_json() -> None:
    prompts = [
        PromptSamples(rewards=[1.0, 0.0], num_tokens=30, num_truncated=1, versions=(4, 5)),
        PromptSamples(rewards=[0.0, 0.0], num_tokens=10, versions=(5, 5)),
    ]
    found = summarize_samples("aime24", prompts, num_failed=1, k=[1, 2], version=5, digest="ab")
    record = json.loads(msgspec.json.encode(found))
    assert record["set"] == "aime24" and record["pass"] == {"1": 0.25, "2": 0.5}
    assert (record["tokens"], record["truncated"], record["versions"]) == (10.0, 0.25, [4, 5])
    assert msgspec.json.decode(msgspec.json.encode(found), type=EvaluationResult) == found
