"""The learner's benchmark compares equals: all steps that it times have the same loss and gradient."""

import argparse
import json
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import benchmark_learner as benchmark

WITH_TRL = all(find_spec(name) for name in ("trl", "datasets"))
TINY = argparse.Namespace(
    layers=2, hidden=64, vocab=300, sequences=16, mean_tokens=20, cv=1.0, budget=200, seed=0
)


@pytest.fixture(scope="module")
def measured(process_group: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    work = benchmark.make_work(TINY, tmp_path_factory.mktemp("model"))
    return work, benchmark.measure_steps(work, repeats=1, with_trl=False, matrices=[64])


def test_bare_and_padded_steps_are_ours(measured: tuple[Any, dict[str, Any]]) -> None:
    _, found = measured
    loss, norm = found["results"]["Trainer.train"]
    assert abs(loss) > 1e-3 and norm > 1e-3
    for name in ("bare loop", "bare loop, plain head", "padded", "padded by microbatch"):
        assert found["results"][name] == pytest.approx((loss, norm), rel=1e-5), name


@pytest.mark.skipif(not WITH_TRL, reason="the extra `peers` is not installed")
@pytest.mark.parametrize("compact", [False, True])
def test_trl_takes_the_same_step(measured: tuple[Any, dict[str, Any]], compact: bool) -> None:
    work, found = measured
    assert benchmark.make_trl_step(work, compact)() == pytest.approx(
        found["results"]["Trainer.train"], rel=1e-5
    )


def test_a_step_that_differs_is_refused(measured: tuple[Any, dict[str, Any]]) -> None:
    _, found = measured
    benchmark.check_results(found["results"], 1e-4)
    loss, norm = found["results"]["padded"]
    with pytest.raises(AssertionError, match="padded"):
        benchmark.check_results(found["results"] | {"padded": (loss, 1.01 * norm)}, 1e-4)


def test_the_tables_are_printed_and_can_be_written(
    measured: tuple[Any, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    work, found = measured
    found = found | {
        "steps": benchmark.summarize_steps(work, found),
        "padding": benchmark.compute_padding(work),
        "large": {},
    }
    found |= {"head": benchmark.measure_head(64, 300, 16), "head_of": "64 x 16 to 300"}
    benchmark.print_report(work, found, "here")
    printed = capsys.readouterr().out
    assert all(
        name in printed for name in (*found["seconds"], *found["shares"], "log_softmax", "over the bare loop")
    )
    assert all(0 < row["mfu"] < 1 for row in found["steps"].values())
    assert all(0 < share < 1 for share in found["padding"].values())
    assert json.loads(json.dumps(found))["steps"]["Trainer.train"]["tokens_per_s"] > 0


def test_sequences_are_prompts_and_responses() -> None:
    import numpy as np

    batch = benchmark.make_batch(np.array([2, 1]), np.array([3, 2]), 50, np.random.default_rng(0))
    assert batch.sampled.tolist() == [False, False, True, True, True, False, True, True]
    assert torch.equal(batch.versions == 0, batch.sampled)
