"""The staleness controller: what it admits, by what staleness has done to the gradient."""

from pathlib import Path

import pytest
from buffer_harness import make_group
from hypothesis import given
from hypothesis import strategies as st

from buffers import messages as m
from buffers.buffer import Buffer
from buffers.controller import first_lag, next_lag
from buffers.trajectory import SCHEMA_VERSION, encode_batch, to_batch
from configs.load import load_config

ess, target, bounds = st.floats(0, 1), st.floats(0.01, 0.99), st.integers(0, 20)


@given(ess, target, bounds, st.integers(0, 20), st.integers(0, 50))
def test_the_admission_lag_stays_within_max_versions_and_moves_the_right_way(
    found: float, wanted: float, max_versions: int, admission_lag: int, since: int
) -> None:
    admission_lag = min(admission_lag, max_versions)
    after = next_lag(admission_lag, found, wanted, max_versions, since)
    assert 0 <= after <= max_versions
    if since < admission_lag + 1:
        assert after == admission_lag, "what was leased before is not trained yet"
    elif found < wanted:
        assert after == admission_lag // 2
    else:
        assert after in (admission_lag, min(max_versions, admission_lag + 1))


@given(target, bounds)
def test_it_climbs_to_the_bound_while_nothing_is_lost_and_falls_to_zero_when_all_is(
    wanted: float, max_versions: int
) -> None:
    for found, end in ((1.0, max_versions), (0.0, 0)):
        admission_lag, since = first_lag(max_versions), 0
        for _ in range(400):
            after = next_lag(admission_lag, found, wanted, max_versions, since)
            admission_lag, since = after, 0 if after != admission_lag else since + 1
        assert admission_lag == end


def test_near_the_target_and_without_a_figure_it_stays() -> None:
    assert next_lag(3, 0.92, 0.9, 8, 10) == 3
    assert next_lag(3, float("nan"), 0.9, 8, 10) == 3


def train_step(buffer: Buffer, number: int, found: float) -> int:
    """Trains a step whose effective sample size is `found`; returns how many groups could be leased at its
    version."""
    buffer.progress.publish_version(number, f"w{number}")
    leases = []
    while (lease := buffer.lease_next("g")) is not None:
        leases.append(lease)
        assert lease.min_version == max(0, lease.due - buffer.book.leases.admission_lag)
        rows = memoryview(encode_batch(to_batch(make_group(lease, version=number)))).cast("B")
        assert buffer.intake.submit_groups("g", [lease.id], [lease.num_samples], SCHEMA_VERSION, rows) == [
            "accepted"
        ]
    handout = buffer.progress.hand_out(number)
    assert handout is not None
    tokens = sum(buffer.book.pool.get_content(group).tokens for group in handout.groups)
    metrics = {"offpolicy/ess_token": found}
    buffer.progress.finish_step(
        m.ReportTrainedStep(step=number, num_trained=tokens, idle_s=0, alive_s=1, metrics=metrics)
    )
    buffer.commit()
    return len(leases)


@pytest.mark.parametrize("controller", ["fixed", "ess"])
def test_the_buffer_admits_what_the_controller_says(tmp_path: Path, controller: str) -> None:
    overrides = [
        "learner.groups_per_step=2",
        "learner.samples_per_prompt=2",
        "run.steps=60",
        "eval.prompts=0",
    ]
    buffer = Buffer(
        load_config([*overrides, "staleness.max_versions=4", f"staleness.controller={controller}"]), tmp_path
    )
    for number in range(30):
        train_step(buffer, number, 1.0)
    assert buffer.book.leases.admission_lag == 4
    for number in range(30, 50):
        train_step(buffer, number, 0.2)
    assert buffer.book.leases.admission_lag == (4 if controller == "fixed" else 0)
    leased = [train_step(buffer, number, 0.2) for number in range(50, 55)]
    assert leased == ([2] * 5), "a step's worth a step either way"
    records = buffer.progress.step_records.list_after(0, 100)
    admitted = [record.metrics["staleness/admission_lag"] for record in records]
    assert (
        admitted[0] == (4.0 if controller == "fixed" else 1.0)
        and buffer.make_status("").admission_lag == admitted[-1]
    )
    staleness = [max(0, k) for k in buffer.book.ledger.staleness]
    assert max(staleness) <= 4
    buffer.close()
