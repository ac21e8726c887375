"""Parity: log-probabilities of engines and learner are compared before the first step and at every step.

A run in which they differ by more than rounding ends, and its error names the token.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from buffer_harness import SMALL_RUN, BufferHarness
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from training_steps import STEP, configure_step, draw_responses, make_step_batch

from buffers import messages as m
from buffers.client import RefusedByBuffer
from buffers.parity_probe import ParityProbes
from buffers.trajectory import Trajectory, decode_batch, encode_batch, to_batch
from configs.load import load_config
from configs.model import Dtype
from configs.parity_probe import MAX_SAMPLED, count_sampled, probe_lengths
from generators.engine import Completion, Sample
from generators.probe import ParityProbe
from learners.learner import Learner
from learners.models import load_models
from learners.packing import Batch, batch_from_arrow
from learners.parity import (
    MIN_TOKENS,
    ParityError,
    ParityWatch,
    check_probe,
    compare_logprobs,
    find_fresh_tokens,
    find_tolerance,
    is_within_tolerance,
)
from learners.step import Trainer
from learners.world import World


@pytest.fixture(scope="module")
def batch(trajectories: list[Trajectory]) -> Batch:
    return batch_from_arrow(pa.Table.from_batches([to_batch(trajectories)]))


# ---- the rule


DEFAULT = load_config([])


def keeps_rule(differences: list[float], dtype: Dtype = Dtype.float32, outliers: int = 0) -> bool:
    tolerance = find_tolerance(replace(DEFAULT, model=replace(DEFAULT.model, dtype=dtype)))
    generator = torch.full((len(differences),), -2.0)
    learner = generator + torch.tensor(differences)
    return is_within_tolerance(
        compare_logprobs(learner, generator, torch.ones(len(differences), dtype=torch.bool)).values,
        tolerance,
        outliers,
    )


def test_rounding_passes_in_either_arithmetic_and_what_a_defect_does_does_not() -> None:
    rng = np.random.default_rng(0)
    assert keeps_rule((1e-6 * rng.standard_t(3, 500)).tolist())
    assert not keeps_rule((3e-4 * rng.standard_normal(500)).tolist()), (
        "TF32: no token by much, nearly all by some"
    )
    assert not keeps_rule([2e-3] + [1e-7] * 99), (
        "in float32 a single token counts, where none may be an outlier"
    )
    assert keeps_rule((0.02 * rng.standard_t(3, 500)).tolist(), Dtype.bfloat16, 3)
    assert not keeps_rule((0.3 * rng.standard_normal(500)).tolist(), Dtype.bfloat16, 3)


def test_a_few_tokens_far_off_do_not_end_a_run_and_many_do() -> None:
    calm = [0.01] * 96
    assert keeps_rule([*calm, 5.0, 3.0, 2.0], Dtype.bfloat16, 3)
    assert not keeps_rule([*calm, 5.0, 3.0, 2.0, 1.5], Dtype.bfloat16, 3)
    assert keeps_rule([5.0], Dtype.bfloat16, 3) and keeps_rule([], Dtype.bfloat16, 3)


def test_a_number_that_is_none_always_ends_a_run() -> None:
    assert not keeps_rule([float("nan"), *[0.0] * 500], Dtype.bfloat16, 9)
    assert not keeps_rule([float("nan")], Dtype.bfloat16, 9)


def test_the_tolerance_follows_dtype_temperature_and_the_users_own_number() -> None:
    def found(dtype: Dtype = Dtype.float32, temperature: float = 1.0, own: float | None = None) -> float:
        return find_tolerance(
            replace(
                DEFAULT,
                model=replace(DEFAULT.model, dtype=dtype),
                learner=replace(DEFAULT.learner, parity_tolerance=own),
                sampling=replace(DEFAULT.sampling, temperature=temperature),
            )
        )

    assert found() == 1e-3 and found(Dtype.bfloat16) == 1.0
    assert found(temperature=0.5) == 2e-3, "logits are divided by it, and their errors too"
    assert found(temperature=2.0) == 1e-3
    assert found(temperature=0.5, own=0.03) == 0.03


# ---- fresh tokens


def test_fresh_are_the_sequences_that_one_version_alone_has_sampled(batch: Batch) -> None:
    """In a run that goes on, the first batch has sequences that were begun under an older version, or one
    that was undone."""
    first, second, third = (
        torch.arange(start, end) for start, end in zip(batch.offsets[:3], batch.offsets[1:4], strict=True)
    )
    versions = torch.where(batch.sampled, 5, -1).int()
    versions[first[batch.sampled[first]][0]] = 4
    versions[second[batch.sampled[second]][-1]] = 6
    fresh = find_fresh_tokens(replace(batch, versions=versions), 5)
    assert not fresh[first].any() and not fresh[second].any()
    assert torch.equal(fresh[third], batch.sampled[third])
    assert not find_fresh_tokens(batch, 7).any()


def test_what_an_earlier_life_of_the_learner_had_sampled_is_not_compared(batch: Batch) -> None:
    """A version of the same number may be another in its last bits, and in a replay with other settings is
    another."""
    assert batch.started_at is not None
    watch, off = ParityWatch(DEFAULT), batch.behavior_logprobs + 1.0
    everything = torch.ones_like(batch.sampled)
    for since in (0.0, 1.0):
        started = replace(batch, started_at=torch.full((batch.num_sequences,), 0.5, dtype=torch.float64))
        found = watch.check_step(started, batch.behavior_logprobs, everything, 0, since)
        assert found["parity/tokens"] == (0.0 if since else float(batch.sampled.sum()))
    assert watch.check_step(started, off, everything, 0, 1.0) == {"parity/tokens": 0.0}


def test_a_step_with_few_fresh_tokens_is_measured_and_not_judged(batch: Batch) -> None:
    watch, everything = ParityWatch(DEFAULT), torch.ones_like(batch.sampled)
    assert 0 < batch.sampled.sum() < MIN_TOKENS
    found = watch.check_step(batch, batch.behavior_logprobs + 0.5, everything, 0, 0.0)
    assert found["parity/max"] == pytest.approx(0.5) and found["parity/mean"] == pytest.approx(0.5)
    with pytest.raises(ParityError):
        watch.check_step(batch, batch.behavior_logprobs * float("nan"), everything, 0, 0.0)


# ---- the probe's way: generator, buffer, learner


@given(st.integers(2, 1 << 17), st.integers(1, 200))
def test_a_probe_has_a_sequence_of_full_length_shorter_ones_and_one_for_each_share(
    longest: int, ranks: int
) -> None:
    config = replace(
        DEFAULT,
        generators=replace(DEFAULT.generators, max_model_len=longest),
        learner=replace(DEFAULT.learner, ranks=ranks),
    )
    lengths = probe_lengths(config)
    assert (
        max(lengths) == longest
        and len(lengths) >= config.learner.num_shares
        and sum(lengths) <= 2 * (longest + len(lengths)) + ranks * longest / 128
    )
    assert all(1 <= count_sampled(n) <= min(MAX_SAMPLED, n - 1) for n in lengths)


class Parrot:
    """An engine whose samples repeat the id of their place, one a step."""

    def __init__(self) -> None:
        self.version, self.asked, self.aborted = 0, list[Sample](), list[str]()

    def add_sample(self, sample: Sample) -> None:
        self.asked.append(sample)

    def abort_samples(self, ids: list[str]) -> list[Completion]:
        self.aborted += ids
        return []

    def finish(self) -> list[Completion]:
        samples, self.asked = self.asked, []
        return [
            Completion(
                id=sample.id, tokens=[place] * sample.max_tokens, logprobs=[-1.0 - place] * sample.max_tokens,
                versions=[self.version] * sample.max_tokens, finish_reason="length",
            )
            for place, sample in enumerate(samples)
        ]  # fmt: skip


PROBED = [*SMALL_RUN, "generators.max_model_len=40", "learner.groups_per_step=4", "run.steps=60"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[BufferHarness]:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    harness = BufferHarness(load_config([*PROBED, f"model.path={tmp_path}"]), tmp_path / "journal")
    yield harness
    harness.close()


def probe_of(run: BufferHarness, engine: Parrot, weights: str, name: str = "g") -> None:
    probe = ParityProbe(run.server._config, name)
    probe.begin_if_due(engine, weights, "life", 0)  # type: ignore[arg-type]
    for completion in engine.finish():
        probe.take_completion(completion, run.client)


def test_an_engine_is_probed_once_a_life_of_the_learner_with_forced_samples_of_known_tokens(
    run: BufferHarness,
) -> None:
    probe, engine = ParityProbe(run.server._config, "g"), Parrot()
    for life, version in (("first", 0), ("first", 1), ("second", 0)):
        probe.begin_if_due(engine, "w0", life, version)  # type: ignore[arg-type]
    half = len(engine.asked) // 2
    assert half == len(probe_lengths(run.server._config)) and len(engine.aborted) == half, (
        "one under way is given up"
    )
    assert [sample.prompt for sample in engine.asked[:half]] == [
        sample.prompt for sample in engine.asked[half:]
    ]
    lengths = [len(sample.prompt) + sample.max_tokens for sample in engine.asked[:half]]
    assert lengths == probe_lengths(run.server._config) and lengths[0] == 40
    assert all(
        sample.forced and 0 <= min(sample.prompt) <= max(sample.prompt) < 50 for sample in engine.asked
    )
    simulated = ParityProbe(
        load_config([*PROBED, "generators.engine=simulated", "learner.engine=simulated"]), "g"
    )
    simulated.begin_if_due(engine, "w0", "third", 50)  # type: ignore[arg-type]
    assert len(engine.asked) == 2 * half


@pytest.mark.parametrize(
    ("overrides", "probed"),
    [
        ((), [0, 50]),
        (("learner.parity_every=3",), [0, 3, 6]),
        (("learner.parity_every=0",), [0]),
        (("mode=on_policy",), [0]),
    ],
)
def test_later_versions_are_probed_now_and_then_each_with_tokens_of_its_own(
    tmp_path: Path, overrides: tuple[str, ...], probed: list[int]
) -> None:
    config, engine = load_config([*PROBED, *overrides, f"model.path={tmp_path}"]), Parrot()
    probe, found, prompts = ParityProbe(config, "g"), [], []
    for version in (0, 1, 3, 4, 6, 50, 60, 100):
        probe.begin_if_due(engine, f"w{version}", "life", version)  # type: ignore[arg-type]
        if engine.asked:
            found.append(version)
            prompts.append(engine.asked[0].prompt)
            engine.asked.clear()
    assert found == probed and len({tuple(prompt) for prompt in prompts}) == len(probed)


def next_probe(run: BufferHarness, wait_s: float = 0.0) -> bytes | m.Reply:
    reply, rows = run.client.exchange(m.RequestParityProbe(wait_s=wait_s), wait_s=wait_s)
    return bytes(rows[0]) if isinstance(reply, m.ParityProbeRows) else reply


def test_a_probe_reaches_the_learner_off_the_ledger_and_only_that_of_the_newest_version(
    run: BufferHarness,
) -> None:
    engine = Parrot()
    run.publish(0)
    waiting = next_probe(run)
    assert isinstance(waiting, m.NotReadyYet) and "an engine's parity probe" in waiting.waiting_for
    number = run.client.send_request(m.RequestParityProbe(wait_s=30.0))
    probe_of(run, engine, "an older life's")
    probe_of(run, engine, "w0", "first")
    probe_of(run, engine, "w0", "second")
    answer = next(a for _ in range(300) for a in run.client.receive_answers(0.1) if a.number == number)
    rows = decode_batch(answer.payload[0]).to_pylist()
    assert (
        {row["generator"] for row in rows} == {"first"}
        and rows[0]["tokens"][-1] == 0
        and rows[3]["tokens"][-1] == 3
    )
    assert [len(row["tokens"]) for row in rows] == probe_lengths(run.server._config)
    assert all(set(row["versions"]) == {-1, 0} for row in rows)
    again = ParityProbes(run.server._config, run.server.buffer.journal.folder)
    assert again.find_rows("w0") == bytes(answer.payload[0]), "another life of the buffer has it"
    run.publish(1)
    assert isinstance(next_probe(run), m.NotReadyYet), "what version 0 has sampled says nothing of version 1"
    status = run.status()
    assert status.tokens.total == status.groups.total == 0 and not status.refused_requests


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": [7, 99]}, "tokens must be below 50"),
        (
            {
                "tokens": [1] * 41,
                "sampled": [False] + [True] * 40,
                "logprobs": [0.0] * 41,
                "versions": [-1] + [0] * 40,
            },
            "at most 40",
        ),
        ({"logprobs": [0.0, float("nan")]}, "must be finite"),
        ({"versions": [-1, 1]}, "versions must be in 0..0"),
    ],
)
def test_what_is_no_probe_is_refused_and_the_next_one_is_taken(
    run: BufferHarness, change: dict[str, Any], why: str
) -> None:
    run.publish(0)
    good = Trajectory(
        group=0,
        sample=0,
        due=0,
        prompt_id=0,
        task="t",
        tokens=[1, 2],
        sampled=[False, True],
        logprobs=[0.0, -1.0],
        versions=[-1, 0],
        reward=0.0,
        finish_reason="length",
        generator="g",
        started_at=0.0,
        finished_at=0.0,
    )
    rows = [replace(good, sample=place) for place in range(8)]
    for sent in ([*rows[:7], replace(rows[7], **change)], rows[:7]):
        with pytest.raises(RefusedByBuffer, match=why if len(sent) == 8 else "got 7 rows"):
            run.client.exchange(
                m.SubmitParityProbe(generator="g", manifest_locator="w0"),
                payload=encode_batch(to_batch(sent)),
            )
    with pytest.raises(RefusedByBuffer, match="one Arrow frame"):
        run.client.exchange(m.SubmitParityProbe(generator="g", manifest_locator="w0"))
    run.client.exchange(
        m.SubmitParityProbe(generator="g", manifest_locator="w0"), payload=encode_batch(to_batch(rows))
    )
    assert isinstance(next_probe(run, 1.0), bytes) and run.status().refused_requests == {"malformed probe": 3}


def test_a_learner_that_waits_for_a_probe_hears_that_the_run_is_over(run: BufferHarness) -> None:
    run.publish(0)
    number = run.client.send_request(m.RequestParityProbe(wait_s=30.0))
    run.client.call(m.StopRun(reason="enough"), m.Acknowledged)
    again = run.client.exchange(m.RequestParityProbe(wait_s=1.0))[0]
    assert again == m.RunStopped(reason="enough") and number >= 0


# ---- the learner


class Buffered:
    """A buffer that has a probe when it is asked for the second time."""

    def __init__(self, rows: bytes) -> None:
        self.rows, self.asked = rows, 0

    def exchange(self, request: m.Request, *, wait_s: float = 0.0) -> tuple[m.Reply, list[memoryview]]:
        assert isinstance(request, m.RequestParityProbe)
        self.asked += 1
        return (
            (m.NotReadyYet(waiting_for="engines"), [])
            if self.asked == 1
            else (m.BatchPart(), [memoryview(self.rows)])
        )


def rows_of(folder: Path, trainer: Trainer, spoiled: float = 0.0) -> list[Trajectory]:
    """Sequences of version STEP, whose log-probabilities are the learner's own; but for one token, the
    second of its group's last row."""
    rows = draw_responses(folder)
    learner, at, found = trainer.infer_logprobs(make_step_batch(rows)), 0, []
    for row in rows:
        logprobs, at = learner[at : at + len(row.tokens)].tolist(), at + len(row.tokens)
        versions = [STEP if sampled else -1 for sampled in row.sampled]
        found.append(
            replace(row, logprobs=logprobs, versions=versions, started_at=2.0, generator=f"g{row.group}")
        )
    first = found[3].sampled.index(True)
    found[3].logprobs[first] -= spoiled
    return found


class Probed:
    """A buffer with a probe for each time that it is asked."""

    def __init__(self, probes: list[bytes]) -> None:
        self.probes = probes

    def exchange(self, request: m.Request, *, wait_s: float = 0.0) -> tuple[m.Reply, list[memoryview]]:
        return m.BatchPart(), [memoryview(self.probes.pop(0))]


def probed_twice(world: World, model: Path, folder: Path) -> list[float]:
    """The largest differences of two probes, one after the other, of different sequences."""
    config = configure_step(model, f"learner.ranks={world.size}")
    trainer = Trainer(config, load_models(config), world)
    good = rows_of(model, trainer)
    probes = [bytes(memoryview(encode_batch(to_batch(rows)))) for rows in (good, good[4:])]
    learner = Learner(
        config, folder, Probed(probes), trainer, None, world, rank=world.rank, first_step=STEP, probes=True
    )  # type: ignore[arg-type]  # fmt: skip
    found = []
    for step in (STEP, STEP + 1):
        learner.step = step
        learner._compare_probe()
        found.append(learner._probe_metrics["parity/probe_max"])
    return found


def test_every_rank_hears_of_each_probe_in_turn(fixed_model: Path, tmp_path: Path) -> None:
    for found in on_ranks(2, probed_twice, tmp_path / "two", fixed_model, tmp_path):
        assert max(found) < 1e-4


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except ParityError as error:
        return str(error)
    return ""


def judge_on_ranks(world: World, model: Path, folder: Path) -> tuple[str, str, str]:
    """Returns this rank's errors for a good probe, one with a wrong token, and a half wrong batch."""
    config = configure_step(model, f"learner.ranks={world.size}")
    trainer = Trainer(config, load_models(config), world)
    good, bad = (rows_of(model, trainer, spoiled) for spoiled in (0.0, 0.25))
    client = Buffered(bytes(memoryview(encode_batch(to_batch(bad)))))
    learner = Learner(
        config, folder, client, trainer, None, world, rank=world.rank, first_step=STEP, probes=True
    )  # type: ignore[arg-type]  # fmt: skip
    wrong = error_of(learner._compare_probe)
    clean = error_of(
        lambda: check_probe(
            make_step_batch(good), trainer.infer_logprobs(make_step_batch(good)), config, STEP
        )
    )
    trainer.watch = ParityWatch(config)
    trainer.watch.published_at = 1.0 + world.rank  # only the first rank's counts
    half = [replace(row, logprobs=[p - 0.25 * (row.group % 2) for p in row.logprobs]) for row in good]
    return clean, wrong, error_of(lambda: trainer.train(make_step_batch(half), STEP))


def test_a_wrong_token_ends_the_run_on_every_rank_in_the_same_words(
    fixed_model: Path, tmp_path: Path
) -> None:
    two = on_ranks(2, judge_on_ranks, tmp_path / "two", fixed_model, tmp_path)
    assert two[0] == two[1] and not two[0][0]
    _, wrong, half = two[0]
    rows = draw_responses(fixed_model)
    place = rows[3].sampled.index(True)
    assert (
        f"the parity probe of version {STEP}: token {place} of {len(rows[3].tokens)} of a sequence of "
        "group 0 by g0, id " in wrong
    )
    assert f"id {rows[3].tokens[place]}, has -" in wrong and "up to 0.25" in wrong
    assert f"in the batch of step {STEP}: token " in half and "must agree within 0.001" in half


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("overrides", "covers"),
    [
        (("algo=grpo",), 1.0),
        (("algo=grpo", "learner.minibatches=2"), 1.0),
        (("algo=dapo", "algo.proximal=loglinear", "learner.minibatches=2"), 0.5),
        (("algo=cispo", "algo.proximal=behavior", "algo.correction=none"), 1.0),
    ],
)
def test_each_step_measures_its_fresh_tokens_by_its_own_forward_pass(
    fixed_model: Path, overrides: tuple[str, ...], covers: float
) -> None:
    config = configure_step(fixed_model, *overrides)
    trainer = Trainer(config, load_models(config))
    batch = make_step_batch(rows_of(fixed_model, trainer))
    stale = replace(
        batch,
        versions=torch.where(
            batch.sampled & (batch.groups % 2 == 1)[batch.sequence], STEP - 1, batch.versions
        ),
    )
    assert "parity/tokens" not in trainer.train(stale, STEP)[0]
    trainer = Trainer(config, load_models(config))  # as the rows have it: the policy has moved
    trainer.watch = ParityWatch(config)
    metrics, _ = trainer.train(stale, STEP)
    fresh = find_fresh_tokens(stale, STEP) & (stale.groups < 6 * covers)[stale.sequence]
    assert metrics["parity/tokens"] == float(fresh.sum()) > 0
    assert metrics["parity/mean"] <= metrics["parity/max"] < 2e-5
    later, _ = trainer.train(replace(stale, versions=stale.versions - (stale.versions > 0).int()), STEP)
    assert later["parity/tokens"] == 0.0 and "parity/max" not in later


def test_a_truncated_distribution_is_measured_and_not_judged(trajectories: list[Trajectory]) -> None:
    many = batch_from_arrow(pa.Table.from_batches([to_batch(trajectories)] * 4))
    everything, off = torch.ones_like(many.sampled), many.behavior_logprobs + 0.5
    with pytest.raises(ParityError, match="in the batch of step 0: token"):
        ParityWatch(DEFAULT).check_step(many, off, everything, 0, 0.0)
    truncated = replace(DEFAULT, sampling=replace(DEFAULT.sampling, top_p=0.9, accept_truncation_bias=True))
    found = ParityWatch(truncated).check_step(many, off, everything, 0, 0.0)
    assert found["parity/tokens"] >= MIN_TOKENS and found["parity/mean"] == pytest.approx(0.5)
