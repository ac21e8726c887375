"""Named evaluation sets: configured, leased beside training without holding it up, answered, and recorded
once."""

import asyncio
import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import numpy as np
import pyarrow as pa
import pytest
from buffer_harness import SMALL_RUN, BufferHarness, make_group
from buffer_lives import LIFE_SETTINGS
from generator_run import OVERRIDES, GeneratorRun
from hypothesis import example, given, settings
from hypothesis import strategies as st

from buffers import events as e
from buffers import messages as m
from buffers.buffer import Buffer, LeaseRoom
from buffers.client import RefusedByBuffer
from buffers.evaluation import Evaluations
from buffers.recovery import rebuild_book
from buffers.run_status import EvaluationRecord, GeneratorReport
from buffers.step_records import StepRecords
from buffers.terms import make_terms, record_terms
from buffers.trajectory import Trajectory, encode_batch, to_batch
from buffers.waiting_room import deal_leases
from configs.checks import find_warnings
from configs.load import load_config, parse_config, to_yaml
from configs.schema import Config
from generators.episode import SimulatedEpisodes
from generators.evaluation_episodes import EvaluationEpisodes
from generators.group import GroupProgress, Player
from generators.leased_groups import LeasedGroups
from generators.policy import EnginePolicy
from generators.simulated_engine import SimulatedEngine
from generators.worker import WAIT_BESIDE_EVALUATION_S
from slipstream.evaluation_report import describe_change, describe_entry, list_metrics, make_entry

TWO_SETS = [
    "eval.sets.often.task=sorting", "eval.sets.often.prompts=2", "eval.sets.often.samples=4",
    "eval.sets.often.every=1", "eval.sets.often.k=[1,2]",
    "eval.sets.seldom.task=sorting", "eval.sets.seldom.prompts=3",
]  # fmt: skip


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Callable[..., BufferHarness]]:
    running: list[BufferHarness] = []

    def start(*overrides: str) -> BufferHarness:
        config = load_config([*SMALL_RUN, *overrides])
        running.append(BufferHarness(config, tmp_path / "journal"))
        return running[-1]

    yield start
    for one in running:
        one.close()


def list_prompts(leases: list[m.Lease]) -> list[tuple[str, int]]:
    return [(lease.evaluation, lease.index) for lease in leases if lease.evaluation]


# ---- configuration


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "eval.sets.a.sampels=4",
            "eval.sets.a.sampels must be a key of an evaluation set (nearest: samples)",
        ),
        ("eval.sets={a:{sampels:4}}", "eval.sets.a.sampels must be a key of an evaluation set"),
        ("eval.sets.a.reward.functon=x", "must be a key of an evaluation set (nearest: function"),
        ("eval.sets.a.samples=0", "eval.sets.a.samples must be from 1 to 4096, got 0"),
        ("eval.sets.a.temperature=-1", "eval.sets.a.temperature must be a finite number of at least 0"),
        ("eval.sets.a.k=[2]", "eval.sets.a.k must be numbers from 1 to eval.sets.a.samples, got [2] with 1"),
        ("eval.sets.held_out.samples=2", "eval.sets.held_out must have another name"),
        ("eval.sets.a/b.samples=2", "eval.sets.a/b"),
        ("eval.sets.a.max_tokens=64", "eval.sets.a.max_tokens must be below generators.max_model_len"),
        ("eval.sets.a.reward.args.x=1", "eval.sets.a.reward.args must be empty without reward.function"),
        ("eval.sets=[gsm8k]", "eval.sets must be a mapping, {NAME: {KEY: VALUE}} (benchmarks by name are"),
        ("eval.share=0", "eval.share must be in (0, 1]"),
    ],
)
def test_a_wrong_set_is_refused_by_its_key(override: str, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        load_config([override])
    assert words in str(refused.value)


def test_replies_of_evaluation_that_may_hold_up_a_step_are_told_at_the_start() -> None:
    alone = ["generators.engine=simulated", "learner.engine=simulated", "sync.in_flight=false"]
    (warning,) = find_warnings(load_config([*alone, "staleness.max_versions=0"]))
    assert "eval.generators=1 evaluates on a generator of its own" in warning
    for override in ("eval.generators=1", "eval.prompts=0", "sync.in_flight=true"):
        assert not find_warnings(load_config([*alone, "staleness.max_versions=0", override]))


def test_sets_survive_the_file_of_the_run_and_keep_their_types() -> None:
    config = load_config([*TWO_SETS, "eval.sets.seldom.data=[a.jsonl]", "eval.sets.seldom.args.x.y=1"])
    assert parse_config(to_yaml(config)) == config
    assert config.eval.sets["often"].samples == 4 and config.eval.sets["seldom"].args == {"x": {"y": 1}}
    assert config.eval.sets["often"].pass_ks == [1, 2] and config.eval.sets["seldom"].pass_ks == [1]


# ---- leases


def test_each_set_has_prompts_samples_and_steps_of_its_own(harness: Callable[..., BufferHarness]) -> None:
    run = harness(*TWO_SETS, "staleness.max_versions=0")
    run.publish(0)
    leases = run.ask()
    prompts = [lease for lease in leases if lease.evaluation]
    assert list_prompts(leases) == [("often", 0), ("often", 1), ("seldom", 0), ("seldom", 1), ("seldom", 2)]
    assert [lease.num_samples for lease in prompts] == [4, 4, 1, 1, 1]
    for lease in leases:
        if not lease.evaluation:
            assert run.submit(lease) == "accepted"
    run.answer(prompts[0], 1.0, 0.0, 0.0, 0.0)
    run.answer(prompts[1], 1.0, 1.0, 0.0, 0.0, num_truncated=2, newest_version=0)
    (often,) = run.evaluations()
    assert (often.evaluation_set, often.avg, often.prompts, often.samples) == ("often", 0.375, 2, 8)
    # Chen et al.: 1 − C(3, 2) / C(4, 2) and 1 − C(2, 2) / C(4, 2).
    assert often.passes == {"1": 0.375, "2": pytest.approx((1 / 2 + 5 / 6) / 2)}
    assert (often.tokens, often.truncated, often.versions) == (2.0, 0.25, (0, 0))
    for lease in prompts[2:]:
        run.answer(lease, 1.0)
    assert [one.evaluation_set for one in run.evaluations()] == ["often", "seldom"]
    run.train(0)
    run.publish(1)
    assert list_prompts(run.ask()) == [("often", 0), ("often", 1)], "every step, and the other one is not due"


def test_a_large_set_takes_no_more_than_its_room_and_never_goes_before_the_step_at_hand(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness(
        "eval.prompts=1000", "staleness.max_versions=2", "learner.groups_per_step=3", "run.steps=10"
    )
    run.publish(0)

    def ask(count: int, room: int) -> list[str]:
        request = m.RequestLeases(generator="g", count=count, wait_s=0.1, evaluation_room=room)
        return [lease.split for lease in run.client.call(request, m.LeaseGrant).leases]

    assert ask(2, 100) == ["train"] * 2
    assert ask(4, 2) == ["train", "eval", "eval", "train", "train"], "two prompts of one sample: one group"
    assert ask(2, 0) == ["train"] * 2, "later steps, and no more prompts"
    assert ask(10, 0) == ["train"] * 2 and ask(10, 0) == []
    assert ask(5, 3) == ["eval"] * 3


def test_a_prompt_with_more_samples_than_fit_is_answered_alone(harness: Callable[..., BufferHarness]) -> None:
    run = harness(*TWO_SETS, "staleness.max_versions=0")
    run.publish(0)
    assert len(run.ask(2)) == 2, "the groups of the step"
    request = m.RequestLeases(generator="g", count=8, wait_s=0.1, evaluation_room=1)
    assert list_prompts(run.client.call(request, m.LeaseGrant).leases) == [("often", 0)]
    assert not run.client.call(request, m.LeaseGrant).leases, "not beside another one"
    other = m.RequestLeases(generator="other", count=0, room=3, wait_s=0.1)
    assert list_prompts(run.client.call(other, m.LeaseGrant).leases) == [("often", 1)]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(1, 5),
)
def test_leases_are_dealt_within_each_requests_count_and_room(
    wishes: list[tuple[int, int]], groups: int, prompts: int, samples: int
) -> None:
    def make_lease(number: int, evaluation: str, num_samples: int) -> m.Lease:
        return m.Lease(
            id=number, split="", task="", index=0, seed=0, group=0, due=0, min_version=0,
            num_samples=num_samples, evaluation=evaluation,
        )  # fmt: skip

    left = [make_lease(number, "set", samples) for number in range(prompts)]
    training = [make_lease(number, "", 2) for number in range(groups)]

    holders = set[str]()

    def give(request: m.RequestLeases, room: LeaseRoom) -> m.Lease | None:
        fits = samples <= room.num_evaluated or request.generator not in holders
        if left and room.num_evaluated and fits:
            holders.add(request.generator)
            return left.pop()
        return training.pop() if training and room.takes_groups else None

    requests = [
        m.RequestLeases(generator=str(number), count=count, wait_s=0.0, evaluation_room=room)
        for number, (count, room) in enumerate(wishes)
    ]
    hands = deal_leases(requests, groups + prompts, 2, give)
    assert len(hands) == len(wishes) or not (left or training), "who is not reached has nothing left"
    for request, hand in zip(requests, hands, strict=False):
        evaluated = sum(lease.num_samples for lease in hand if lease.evaluation)
        size, num_prompts = (
            sum(lease.num_samples for lease in hand),
            len([1 for one in hand if one.evaluation]),
        )
        assert evaluated <= max(request.evaluation_room, samples if request.evaluation_room else 0)
        assert size <= 2 * request.count or num_prompts == 1, "one prompt may be larger than what is left"
    if training:
        assert all(
            sum(one.num_samples for one in hand) + 2 > 2 * count
            for hand, (count, _) in zip(hands, wishes, strict=True)
        )


def test_an_answer_that_breaks_a_rule_is_refused_and_its_prompt_is_asked_again(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness(*TWO_SETS, "buffer.max_attempts=3")
    run.publish(0)
    lease = next(lease for lease in run.ask() if lease.evaluation == "often")
    assert run.answer(lease, 1.0) == "failed", "one sample of four"
    for wrong in ({"newest_version": 1}, {"oldest_version": 3, "newest_version": 3}, {"num_truncated": 5}):
        (lease,) = [one for one in run.ask() if one.evaluation] or [None]  # type: ignore[list-item]
        if lease is None:
            break
        assert run.answer(lease, 1.0, 1.0, 1.0, 1.0, **wrong) == "failed"
    assert run.status().refused_requests["malformed evaluation"] == 3, "then the prompt has failed for good"


def test_prompts_that_fail_for_good_are_counted_and_the_result_comes_all_the_same(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness(*TWO_SETS, "buffer.max_attempts=1")
    run.publish(0)
    for lease in [lease for lease in run.ask() if lease.evaluation == "often"]:
        run.client.call(m.FailLease(generator="g", lease=lease.id, num_tokens=3, error="x"), m.LeaseReceipt)
    (found,) = run.evaluations()
    assert (found.avg, found.prompts, found.failed) == (None, 0, 2)
    entry = {**make_entry(EvaluationRecord(number=1, result=found))}
    assert describe_entry(entry) == "version 0 on often: none of 2 prompts could be scored"
    assert list_metrics(entry) == {} and describe_change([entry]) == []


# ---- versions


def answer_all(evaluations: Evaluations, ids: Iterator[int], reward: float) -> None:
    while (lease := evaluations.lease_next(ids, "g", 0.0)) is not None:
        evaluations.submit_answer(
            m.SubmitEvaluation(
                generator="g",
                lease=lease.id,
                rewards=[reward] * lease.num_samples,
                num_tokens=1,
                oldest_version=lease.due,
                newest_version=lease.due,
            )  # fmt: skip
        )


def test_versions_do_not_pile_up_and_every_set_stays_in_turn() -> None:
    """One version is under way and one waits; the sets of a replaced one pass to the newer."""
    config = load_config(
        ["eval.prompts=0", "run.steps=100", *TWO_SETS, "eval.sets.often.every=10", "eval.sets.seldom.every=4"]
    )
    evaluations, ids = Evaluations(config), itertools.count()
    for version in range(41):
        evaluations.request_version(version)
        assert len(evaluations.list_unfinished()) <= 2
    assert evaluations.list_unfinished() == [0, 40] and evaluations.num_skipped > 0
    answer_all(evaluations, ids, 1.0)
    done = [(one.evaluation_set, one.version) for one in evaluations.finish_sweeps()]
    assert done == [("often", 0), ("seldom", 0), ("often", 40), ("seldom", 40)]
    evaluations.request_version(44)
    evaluations.request_version(48)
    evaluations.request_version(50)
    assert [one.split("/") for one in ("44/seldom", "50/often", "50/seldom")] == [
        [str(sweep.version), sweep.evaluation_set.name] for sweep in evaluations._sweeps
    ], "48 of `seldom` became 50"


def list_sweeps(evaluations: Evaluations) -> list[tuple[int, str]]:
    return [(sweep.version, sweep.evaluation_set.name) for sweep in evaluations._sweeps]


def test_a_rewind_moves_what_it_costs_to_the_version_that_the_learner_goes_on_from() -> None:
    config = load_config(["eval.prompts=0", "run.steps=100", *TWO_SETS, "eval.sets.often.every=10"])
    evaluations = Evaluations(config)
    evaluations.request_version(0)
    evaluations.rewind_to(0)
    assert not evaluations.num_skipped and not evaluations.list_carried(), "0 comes again, and is due"
    evaluations.request_version(0)
    evaluations.withdraw_version(0, "often")
    evaluations.rewind_to(7)
    assert evaluations.num_skipped == 1 and evaluations.list_carried() == [(-1, "seldom")]
    evaluations.request_version(7)
    assert list_sweeps(evaluations) == [(7, "seldom")], "it is not due, but the evaluation of 0 was lost"
    evaluations.request_version(10)
    evaluations.rewind_to(9)
    evaluations.request_version(9)
    assert list_sweeps(evaluations) == [(9, "seldom")], "10 comes again, 7 does not"
    answer_all(evaluations, itertools.count(), 1.0)
    assert [one.version for one in evaluations.finish_sweeps()] == [9]
    evaluations.rewind_to(8)
    evaluations.request_version(8)
    assert list_sweeps(evaluations) == [(8, "seldom")], "its only result is void"


@cache
def load_two_sets() -> Config:
    return load_config(
        ["eval.prompts=0", "run.steps=1000", *TWO_SETS, "eval.sets.often.every=5", "eval.sets.often.k=[1]",
         "eval.sets.often.samples=1", "eval.sets.seldom.every=4", "eval.sets.seldom.prompts=2"]
    )  # fmt: skip


MOVES = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 5)),
    st.tuples(st.just("lease"), st.integers(1, 4)),
    st.tuples(st.just("answer"), st.integers(0, 9)),
    st.tuples(st.just("rewind"), st.integers(1, 6)),
    st.tuples(st.just("state"), st.just(0)),
    st.tuples(st.just("open"), st.just(0)),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(MOVES, max_size=40))
@example(  # 8 of `seldom` is carried to 10 behind 4, and 0 is evaluated
    [("lease", 4), *[("answer", 0)] * 4, ("publish", 4), ("publish", 4), ("publish", 2)]
)
@example([("lease", 4), *[("answer", 0)] * 4, ("publish", 5), ("publish", 2), ("rewind", 1)])
@example([("publish", 5), ("lease", 6), ("publish", 3), *[("answer", 0)] * 6])
def test_no_opening_of_a_buffer_loses_an_evaluation_that_is_to_come(moves: list[tuple[str, int]]) -> None:
    """A set that waits for its evaluation when a buffer ends waits for it after the next opening too, or was
    evaluated on a newer version."""
    config = load_two_sets()
    terms, one, ids, version = make_terms(config), Evaluations(config), itertools.count(), 0
    state: Any = None
    log: list[e.AnyEvent] = [e.Published(0, "w", 0.0)]
    one.request_version(0, "w")

    def make_state() -> Any:
        return SimpleNamespace(
            terms=record_terms(terms), book=None, manifest_locator="", evaluations=one.list_results(),
            unevaluated=one.list_unfinished(), carried_evaluations=one.list_carried(),
            unevaluated_locators=one.list_unfinished_locators(), num_evaluations=one.num_records,
            evaluation_numbers=[record.number for record in one.records], step_records=None,
        )  # fmt: skip

    def open_again() -> Evaluations:
        again, tail = Evaluations(config), SimpleNamespace(lines=[SimpleNamespace(event=x) for x in log])
        found: Any = SimpleNamespace(state=state, tail=tail)
        with patch.multiple(
            "buffers.recovery", apply_event=DEFAULT, restore_book=DEFAULT, check_terms=DEFAULT
        ):
            rebuild_book(Mock(), again, found, terms, 0.0, StepRecords())
        assert again.records == one.records
        to_come = {name for _, name in (*list_sweeps(again), *again.list_carried())}
        assert to_come >= {name for asked, name in one.list_carried() if asked < 0}
        for asked, name in list_sweeps(one):
            newest = max((x.version for x in one.list_results() if x.evaluation_set == name), default=-1)
            assert name in to_come or newest > asked, (asked, name)
        return again

    for kind, number in moves:
        if kind == "publish" or (kind == "rewind" and version >= number):
            if kind == "rewind":
                log.append(e.Rewound(version - number))
                one.rewind_to(version - number)
            version += number if kind == "publish" else -number
            log.append(e.Published(version, "w", 0.0))
            one.request_version(version, "w")
        elif kind == "lease":
            for _ in range(number):
                one.lease_next(ids, "g", 0.0)
        elif kind == "answer" and (held := list(one._leases)):
            lease = held[number % len(held)]
            due = one.find_prompt(lease)[1]
            one.submit_answer(
                m.SubmitEvaluation(
                    generator="g", lease=lease, rewards=[1.0], num_tokens=1, oldest_version=due,
                    newest_version=due,
                )
            )  # fmt: skip
            log += [e.Evaluated(version=x.version, at=0.0, result=x) for x in one.finish_sweeps()]
        elif kind == "open":
            one = open_again()
        if kind in ("state", "open"):
            state, log = make_state(), []
    open_again()
    state, log = make_state(), []
    open_again()


@pytest.mark.parametrize("in_good_order", [False, True])
def test_what_is_to_be_evaluated_survives_the_end_of_a_buffer(tmp_path: Path, in_good_order: bool) -> None:
    config = load_config([*LIFE_SETTINGS, *TWO_SETS, "run.steps=9", "eval.sets.seldom.every=3"])
    lives = itertools.count()

    def reopen(buffer: Buffer) -> Buffer:
        buffer.commit()
        if in_good_order:
            buffer.close()
        folder = tmp_path / str(next(lives)) / "journal"
        shutil.copytree(buffer.journal.folder, folder)
        if not in_good_order:
            buffer.close()
        return Buffer(config, folder)

    buffer = Buffer(config, tmp_path / "first" / "journal")
    for version in (0, 3, 4):
        buffer.progress.publish_version(version, f"host#x#abc#w{version}")
    expected = [(0, "often"), (0, "seldom"), (4, "often"), (4, "seldom")]
    assert list_sweeps(buffer.evaluations) == expected, "the sets of 3 passed to 4"
    buffer = reopen(buffer)
    assert list_sweeps(buffer.evaluations) == expected
    buffer.progress.rewind_to(0)
    buffer = reopen(reopen(buffer))
    assert list_sweeps(buffer.evaluations) == []
    assert buffer.evaluations.list_carried() == [(-1, "seldom")]
    buffer.progress.publish_version(0, "host#x#abc#w0")
    assert list_sweeps(buffer.evaluations) == [(0, "often"), (0, "seldom")]

    ids = itertools.count(1 << 40)

    def lease_rest() -> list[m.Lease]:
        return list(iter(lambda: buffer.evaluations.lease_next(ids, "g", 0.0), None))

    def answer(lease: m.Lease) -> None:
        answer = m.SubmitEvaluation(
            generator="g", lease=lease.id, rewards=[0.5] * lease.num_samples, num_tokens=1,
            oldest_version=lease.due, newest_version=lease.due,
        )  # fmt: skip
        assert buffer.submit_evaluation(answer) == "accepted"

    first, *others = lease_rest()
    buffer.progress.publish_version(3, "host#x#abc#w3")
    others += lease_rest()
    buffer.progress.publish_version(4, "host#x#abc#w4")
    for lease in [*others, first]:
        answer(lease)
    assert list_sweeps(buffer.evaluations) == [(4, "often")]
    buffer = reopen(buffer)
    assert list_sweeps(buffer.evaluations) == [(4, "often")], "3 had begun, so 4 has not taken its place"
    done = {(one.version, one.evaluation_set) for one in buffer.evaluations.list_results()}
    assert done == {(version, name) for version in (0, 3) for name in ("often", "seldom")}
    buffer.close()


def test_results_survive_a_kill_are_never_doubled_and_are_undone_by_a_rewind(tmp_path: Path) -> None:
    config = load_config([*LIFE_SETTINGS, *TWO_SETS, "learner.groups_per_step=1"])
    buffer = Buffer(config, tmp_path / "journal")
    ids = itertools.count(1 << 40)
    buffer.progress.publish_version(0, "host#x#abc#w0")

    def answer_next(version: int) -> None:
        lease = buffer.evaluations.lease_next(ids, "g", 0.0)
        assert lease is not None
        answer = m.SubmitEvaluation(
            generator="g", lease=lease.id, rewards=[0.5] * lease.num_samples, num_tokens=1,
            oldest_version=version, newest_version=version,
        )  # fmt: skip
        assert buffer.submit_evaluation(answer) == "accepted"

    for _ in range(3):
        answer_next(0)
    buffer.commit()
    for number in range(3):
        # The second time from a state, the third from the state that this has written.
        shutil.copytree(buffer.journal.folder, tmp_path / f"killed-{number}")
        if number:
            buffer.close()
        buffer = Buffer(config, tmp_path / f"killed-{number}")
        results = buffer.evaluations.list_results()
        assert [(one.evaluation_set, one.version, one.digest) for one in results] == [("often", 0, "abc")]
        assert buffer.evaluations.num_unanswered == 3, "the other set begins anew: no result is half of one"
    for _ in range(3):
        answer_next(0)
    assert [one.evaluation_set for one in buffer.evaluations.list_results()] == ["often", "seldom"]
    numbers = [record.number for record in buffer.evaluations.records]
    buffer.progress.rewind_to(0)
    assert buffer.evaluations.records == []
    buffer.progress.publish_version(0, "host#x#def#w0")
    for _ in range(5):
        answer_next(0)
    assert {one.digest for one in buffer.evaluations.list_results()} == {"def"}
    assert min(record.number for record in buffer.evaluations.records) > max(numbers), "or none is told"
    buffer.close()


# ---- generators


class ListedEngine(SimulatedEngine):
    """Keeps the samples that it is given."""

    def __init__(self) -> None:
        super().__init__(tokens_per_s=2000, slots=16, mean_tokens=6, cv=0.5)
        self.added: list[Any] = []

    def add_sample(self, sample: Any) -> None:
        self.added.append(sample)
        super().add_sample(sample)


def test_a_generator_samples_each_set_at_its_own_temperature_and_length(tmp_path: Path) -> None:
    engine, temperature = (
        ListedEngine(),
        ["eval.sets.often.temperature=0.6", "eval.sets.seldom.temperature=0"],
    )
    config = load_config([*OVERRIDES, *TWO_SETS, *temperature, "eval.sets.often.max_tokens=5"])
    run = GeneratorRun(config, tmp_path, SimulatedEpisodes(), engine=engine)
    run.publish_version(0)
    run.wait_for(
        lambda status: len(run.client.call(m.WatchRun(after=0, wait_s=0), m.RunNews).evaluations) == 2
    )
    results = [one.result for one in run.client.call(m.WatchRun(after=0, wait_s=0), m.RunNews).evaluations]
    found = {one.evaluation_set: one for one in results}
    assert (found["often"].samples, found["often"].versions, found["seldom"].samples) == (8, (0, 0), 3)
    assert len(found["often"].digest) == 32 and found["often"].truncated > 0
    run.close()
    sampled = {(one.temperature, one.greedy, one.max_tokens) for one in engine.added}
    usual = config.sampling.max_tokens
    assert sampled == {(None, False, usual), (0.6, False, 5), (None, True, usual)}
    evaluated = [one.seed for one in engine.added if one.temperature or one.greedy]
    assert len(set(evaluated)) == 11, "no two sets draw alike"


class CountedEpisodes(SimulatedEpisodes):
    """Counts how often episodes are opened and closed."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name, self._told = name, told

    async def open(self) -> None:
        self._told.append(f"open {self._name}")
        if self._name == "broken":
            raise ValueError("no such task")

    async def close(self) -> None:
        self._told.append(f"close {self._name}")


def test_a_sets_episodes_are_open_while_its_prompts_are_played_and_no_longer() -> None:
    told: list[str] = []
    config = load_config([*TWO_SETS, "eval.sets.seldom.task=broken", "task.name=own"])
    lease = m.Lease(
        id=1, split="eval", task="", index=0, seed=0, group=0, due=0, min_version=0, num_samples=1,
        evaluation="often",
    )  # fmt: skip

    async def play() -> None:
        def make(one: Any) -> CountedEpisodes:
            return CountedEpisodes(one.task.name, told)

        episodes = EvaluationEpisodes(config, make, idle_s=0.05, pauses_s=())
        await episodes.open()
        assert told == ["open own"]
        first, second = await asyncio.gather(episodes.begin_group(lease), episodes.begin_group(lease))
        assert told == ["open own", "open sorting"], "once for both"
        lease.evaluation = "held_out"
        await episodes.begin_group(lease)
        lease.evaluation = "seldom"
        for _ in range(2):
            with pytest.raises(ValueError, match="no such task"):
                await episodes.begin_group(lease)
        assert told.count("open broken") == 1
        while "close sorting" not in told:
            await asyncio.sleep(0.01)
        player = Player(None, lease, 0, 4, GroupProgress(1, 1))  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            await episodes.play_episode(player, second)
        lease.evaluation = "often"
        await episodes.begin_group(lease)
        assert told.count("open sorting") == 2
        await episodes.close()
        assert told[-1] == "close own" and told.count("close sorting") == 2 and first is not second

    asyncio.run(play())


class RecordedCrowd(SimulatedEngine):
    """Records the most samples that it had at a time."""

    def __init__(self) -> None:
        super().__init__(tokens_per_s=400, slots=64, mean_tokens=20, cv=0.1)
        self.most = 0

    def add_sample(self, sample: Any) -> None:
        super().add_sample(sample)
        self.most = max(self.most, self.num_unfinished)


@pytest.mark.parametrize("is_own", [False, True], ids=["generators that train", "one of its own"])
def test_prompts_fill_an_engine_sample_by_sample(tmp_path: Path, is_own: bool) -> None:
    """A group has as many samples as the engine has places, so in groups there is never room for another."""
    crowd = RecordedCrowd()
    config = load_config(
        [
            *OVERRIDES, "learner.groups_per_step=1", "learner.samples_per_prompt=16", "run.steps=1",
            "eval.prompts=0", "eval.sets.odd.task=sorting", "eval.sets.odd.prompts=30",
            "eval.sets.odd.samples=3", f"eval.generators={int(is_own)}",
        ]
    )  # fmt: skip
    run = GeneratorRun(
        config, tmp_path, SimulatedEpisodes(), engine=None if is_own else crowd,
        evaluator=crowd if is_own else None,
    )  # fmt: skip
    run.publish_version(0)
    run.train_step(0)
    crowd.most = 0
    run.publish_version(1)
    deadline = time.monotonic() + 60
    while len(run.list_results()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.close()
    assert crowd.most == 15, "five prompts of three samples, and 16 places"


def test_a_set_that_cannot_be_opened_at_once_is_tried_again_and_not_without_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    failures = {"sorting": 2, "addition": 99}

    class LateEpisodes(CountedEpisodes):
        async def open(self) -> None:
            told.append(f"try {self._name}")
            failures[self._name] = failures.get(self._name, 0) - 1
            if failures[self._name] >= 0:
                raise OSError("the judge is not up yet")

    config = load_config([*TWO_SETS, "eval.sets.seldom.task=addition", "task.name=own"])

    async def play() -> None:
        episodes = EvaluationEpisodes(
            config, lambda one: LateEpisodes(one.task.name, told), idle_s=0.2, pauses_s=(0.01, 0.02)
        )
        await episodes.open()
        await episodes.begin_group(make_prompt_lease("often"))
        assert told.count("try sorting") == 3, "its prompt waits, and does not fail"
        for number in range(1, 6):
            with pytest.raises(OSError, match="not up yet"):
                await episodes.begin_group(make_prompt_lease("seldom"))
            assert told.count("try addition") == 3, number
        deadline = time.monotonic() + 30
        while told.count("try addition") < 6:  # prompts that keep coming do not hold up another attempt
            assert time.monotonic() < deadline
            with pytest.raises(OSError, match="not up yet"):
                await episodes.begin_group(make_prompt_lease("seldom"))
            await asyncio.sleep(0.01)
        await episodes.close()
        assert told.count("close addition") == told.count("try addition"), "nothing is left of an attempt"

    asyncio.run(play())
    assert (
        "the evaluation set often cannot be opened (attempt 2 of 3, the next in 0.02 s): OSError"
        in caplog.text
    )


def test_a_prompt_of_a_version_that_is_not_here_yet_holds_up_no_group(tmp_path: Path) -> None:
    config = load_config([*TWO_SETS, "generators.engine=simulated", "learner.engine=simulated"])
    client: Any = SimpleNamespace(send_request=lambda *_: 1)
    groups = LeasedGroups(
        "g", config, client, ListedEngine(), SimulatedEpisodes(), EnginePolicy(lambda: None),
        GeneratorReport(), lambda: None,
    )  # fmt: skip
    prompt, first, second = (
        make_prompt_lease("often", 1, 5),
        make_prompt_lease("", 2),
        make_prompt_lease("", 3),
    )
    groups.add_leases([prompt, first, second])
    groups.begin_groups(4)
    assert sorted(groups._playing) == [2, 3] and groups.awaited_version == 5
    groups.begin_groups(5)
    assert sorted(groups._playing) == [1, 2, 3] and groups.awaited_version is None
    groups.close()


def make_prompt_lease(evaluation: str, number: int = 1, version: int = 0) -> m.Lease:
    return m.Lease(
        id=number, split="eval", task="", index=0, seed=0, group=0, due=version, min_version=version,
        num_samples=1, evaluation=evaluation,
    )  # fmt: skip


# ---- samples


def test_all_samples_of_a_result_are_kept_and_others_are_not(tmp_path: Path) -> None:
    config = load_config([*OVERRIDES, *TWO_SETS, "eval.sets.seldom.prompts=30"])
    (tmp_path / "evaluations" / "often").mkdir(parents=True)
    (tmp_path / "evaluations" / "often" / "v7.unfinished").write_bytes(b"left by a killed buffer")
    run = GeneratorRun(config, tmp_path, SimulatedEpisodes())
    for step in range(2):
        run.publish_version(step)
        run.train_step(step)
    run.wait_for(lambda status: len(run.list_results()) >= 2)
    for one in run.list_results():
        path = tmp_path / "evaluations" / one.evaluation_set / f"v{one.version}.arrow"
        with pa.memory_map(str(path)) as file:
            rows = pa.ipc.open_file(file).read_all()
        assert rows.num_rows == one.samples and len(set(rows["prompt_id"].to_pylist())) == one.prompts
        assert np.mean(rows["reward"].to_numpy()) == pytest.approx(one.avg)
        assert set(rows["due"].to_pylist()) == {one.version}
        versions = {version for row in rows["versions"].to_pylist() for version in row} - {-1}
        assert (min(versions), max(versions)) == one.versions
    run.client.call(m.RewindToStep(step=1), m.Acknowledged)
    left = {path.name for path in (tmp_path / "evaluations").glob("*/*")}
    assert left <= {"v0.arrow"}, "what is undone goes, and what is unfinished"
    run.close()
    assert not list((tmp_path / "evaluations").glob("*/*.unfinished"))


def test_rows_that_break_a_rule_cost_their_prompt_an_attempt_and_reach_no_file(
    harness: Callable[..., BufferHarness], tmp_path: Path
) -> None:
    run = harness(*TWO_SETS, "buffer.max_attempts=100")
    run.publish(0)
    lease = next(lease for lease in run.ask() if lease.evaluation == "seldom")

    def hand_in(lease: m.Lease, rows: list[Trajectory], reward: float = 1.0, num_rows: int = 1) -> str:
        request = m.SubmitEvaluation(
            generator="g", lease=lease.id, rewards=[reward], num_tokens=2, oldest_version=0, newest_version=0,
            num_rows=num_rows,
        )  # fmt: skip
        reply, _ = run.client.exchange(request, payload=encode_batch(to_batch(rows)))
        assert isinstance(reply, m.LeaseReceipt)
        return reply.verdicts[0]

    group = make_group(lease)
    wrong: list[dict[str, Any]] = [
        {"rows": make_group(lease, reward=0.5, rewards={})},
        {"rows": make_group(lease, prompt_id=99)},
        {"rows": make_group(lease, logprobs=[0.0, float("nan"), -1.0])},
        {"rows": group * 2},
        {"rows": group, "num_rows": 2},
        {"rows": make_group(lease, version=5)},
    ]
    for changes in wrong:
        assert hand_in(lease, **changes) == "failed", changes
        lease = next(one for one in run.ask() if one.evaluation == "seldom" and one.index == lease.index)
    assert run.status().refused_requests == {"malformed evaluation": len(wrong)}
    assert not list((tmp_path / "evaluations").glob("seldom/*"))
    assert hand_in(lease, make_group(lease)) == "accepted"
    assert [path.name for path in (tmp_path / "evaluations").glob("seldom/*")] == ["v0.unfinished"]


# ---- generators of their own


class Heard:
    """A generator that only asks, and what it has been told."""

    def __init__(self, run: BufferHarness, name: str, *, evaluates: bool) -> None:
        self.run, self.name = run, name
        run.client.call(m.JoinRun(generator=name, evaluates=evaluates), m.JoinedRun)

    def ask(self, count: int = 100) -> m.LeaseGrant:
        return self.run.client.call(
            m.RequestLeases(generator=self.name, count=count, wait_s=0.1), m.LeaseGrant
        )

    def answer(self, leases: list[m.Lease], digest: str) -> list[str]:
        return [
            self.run.answer(lease, *[1.0] * lease.num_samples, generator=self.name, digest=digest)
            for lease in leases
        ]


def publish(run: BufferHarness, version: int) -> list[int]:
    """Publishes a version whose digest is its number; returns those that the learner has to keep."""
    request = m.PublishVersion(version=version, manifest_locator=f"host#x#d{version}#w{version}")
    return run.client.call(request, m.PublishedVersion).needed_versions


def test_own_generators_get_prompts_alone_of_one_version_and_the_others_get_none(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness("eval.generators=1", *TWO_SETS, "learner.groups_per_step=1", "staleness.max_versions=3")
    trainer, own = Heard(run, "g", evaluates=False), Heard(run, "own", evaluates=True)
    assert publish(run, 0) == [0]
    grant = trainer.ask()
    assert grant.version == 0 and not list_prompts(grant.leases) and len(grant.leases) == 4
    for lease in grant.leases:
        assert run.submit(lease) == "accepted"
    held = own.ask()
    assert held.version == 0 and len(list_prompts(held.leases)) == len(held.leases) == 5
    for version in (1, 2, 3):
        run.train(version - 1)
        needed = publish(run, version)
        assert needed == [0, version], "the one under way and the newest that waits"
        told = own.ask()
        assert (told.version, told.leases) == (0, []), "no prompt of another version, and no group"
        assert trainer.ask().version == version
    assert own.answer(held.leases[:-1], "d0") == ["accepted"] * 4
    assert own.ask().version == 0
    number = own.ask().announcement_number
    assert own.answer(held.leases[-1:], "d0") == ["accepted"]
    after = own.ask()
    assert after.version == 3 and after.announcement_number > number, "or the generator would not believe it"
    assert own.answer(after.leases, "d0") == ["failed"] * len(after.leases), "other weights than announced"
    after = own.ask()
    assert [run.answer(lease, *[1.0] * 4, generator="own", digest="d3", newest_version=3, oldest_version=3)
            for lease in after.leases] == ["accepted"] * 2  # fmt: skip
    last = own.ask()
    assert (last.version, last.leases) == (-1, []), "nothing to take up"
    assert [(one.evaluation_set, one.version, one.digest, one.versions) for one in run.evaluations()] == [
        ("often", 0, "d0", (0, 0)), ("seldom", 0, "d0", (0, 0)), ("often", 3, "d3", (3, 3)),
    ]  # fmt: skip
    status = run.status()
    assert (status.evaluators, status.skipped_evaluations) == (["own"], 2)
    run.train(3)
    assert publish(run, 4) == [4]
    assert own.ask().version == 4
    run.client.call(m.RewindToStep(step=2), m.Acknowledged)
    assert own.ask().version == -1
    assert publish(run, 2) == [2] and own.ask().version == 2, "a lower version than before"


def test_a_generator_for_evaluation_is_refused_where_the_others_evaluate(
    harness: Callable[..., BufferHarness],
) -> None:
    with pytest.raises(RefusedByBuffer, match="eval.generators must be at least 1 in the run"):
        Heard(harness(), "own", evaluates=True)


def test_own_generators_need_a_transport_that_brings_older_versions() -> None:
    with pytest.raises(ValueError, match="sync.transport must be one of auto, .*eval.generators"):
        load_config(["eval.generators=1", "sync.transport=nccl"])


@pytest.mark.parametrize("far", [False, True], ids=["on the learner's host", "elsewhere"])
def test_own_generators_answer_every_version_with_its_own_weights_while_training_goes_on(
    tmp_path: Path, far: bool
) -> None:
    """Versions come far faster than evaluations end. The publisher keeps what is needed, and no more."""
    config = load_config(
        [*OVERRIDES, *TWO_SETS, "eval.generators=1", "run.steps=12", "eval.sets.seldom.every=3"]
    )
    slow = SimulatedEngine(tokens_per_s=100, slots=4, mean_tokens=6, cv=0.5)
    run = GeneratorRun(config, tmp_path, SimulatedEpisodes(), far=far, evaluator=slow)
    kept: list[set[int]] = []
    for version in range(13):
        run.publish_version(version)
        kept.append({int(path.stem[1:].split("-")[0]) for path in (tmp_path / "weights").glob("v*.json")})
        if version < 12:
            run.train_step(version)
    assert all({version - 1, version} - {-1} <= on_disk for version, on_disk in enumerate(kept))
    assert max(map(len, kept)) <= 4, "the newest two, the one under way and one that waits"
    run.client.call(m.AwaitEvaluations(wait_s=30.0), m.Acknowledged)
    results = run.list_results()
    assert results[0].version == 0 and results[-1].version == 12
    for one in results:
        assert one.versions == (one.version, one.version) and one.digest == run.digests[one.version]
    run.close()


def test_a_set_without_a_reward_takes_the_runs_for_rows_of_files_alone() -> None:
    words = ["reward.function=math", "eval.sets.files.data=[{task: sorting},{path: a.jsonl}]"]
    words += ["eval.sets.own.data=a.jsonl", "eval.sets.own.reward.function=exact_match"]
    config = load_config([*words, "eval.sets.tasks.data={task: sorting}", "eval.sets.tasks.prompts=4"])
    functions = {name: config.for_evaluation(one).reward.function for name, one in config.eval.sets.items()}
    assert functions == {"files": "math", "own": "exact_match", "tasks": None}


def test_a_generator_that_evaluates_alone_asks_again_soon_while_it_has_prompts(tmp_path: Path) -> None:
    """A request keeps the room that it was sent with, and the first sample that ends makes room for no other
    prompt."""
    config = load_config([*OVERRIDES, *TWO_SETS, "eval.generators=1", "eval.sets.often.prompts=12"])
    run = GeneratorRun(config, tmp_path, SimulatedEpisodes(), evaluator=ListedEngine())
    own, asked = run.generators[-1], list[tuple[bool, float]]()
    send = own._client.send_request

    def listen(request: Any, *rest: Any, **more: Any) -> int:
        if isinstance(request, m.RequestLeases):
            asked.append((own._groups.is_evaluating, request.wait_s))
        return send(request, *rest, **more)

    own._client.send_request = listen  # type: ignore[method-assign]
    run.publish_version(0)
    run.wait_for(lambda _: len(run.list_results()) == 2)
    run.close()
    assert {wait_s for is_evaluating, wait_s in asked if is_evaluating} == {WAIT_BESIDE_EVALUATION_S}
    assert {wait_s for is_evaluating, wait_s in asked if not is_evaluating} <= {5.0}


def test_only_requests_for_groups_are_said_to_wait_for_leases(harness: Callable[..., BufferHarness]) -> None:
    run = harness("eval.generators=1", *TWO_SETS, "staleness.max_versions=0")
    trainer, own = Heard(run, "g", evaluates=False), Heard(run, "own", evaluates=True)
    publish(run, 0)
    assert trainer.ask().leases and own.ask().leases
    words = "the learner trains step 0"
    run.client.send_request(m.RequestLeases(generator="own", count=0, wait_s=30.0, room=3))
    assert run.status().waiting_for == words, "the evaluator has all prompts that there are"
    run.client.send_request(m.RequestLeases(generator="g", count=1, wait_s=30.0))
    said = f"{words}; 1 generators wait for leases: the staleness bound admits no more groups"
    assert run.status().waiting_for == said
