"""The choice of prompts by what the policy has made of them: pools, levels, refills, and their record."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from buffer_harness import BufferHarness, make_group
from hypothesis import given, settings
from hypothesis import strategies as st
from staleness_world import StalenessWorld, make_world_terms

from buffers.book import Book
from buffers.buffer import Buffer
from buffers.curriculum import POOLS, LevelCurriculum, PoolCurriculum, draw_place
from buffers.events import Accepted, Leased, Rejected
from buffers.messages import ReportTrainedStep
from buffers.prompts import decode_index
from buffers.refills import is_within
from buffers.state import encode_state, read_state, state_numbers, write_state
from buffers.terms import CurriculumTerms, SourceTerms, Terms, make_terms
from buffers.trajectory import encode_batch, to_batch
from buffers.watchdog import Stuck
from configs.curriculum import CurriculumKind
from configs.load import load_config
from configs.staleness import OnLate
from generators.data.sources import read_sources
from generators.task import PromptSource
from generators.user_code.task_kinds import find_size
from slipstream_bench.audit import describe_logged_book

SOURCES = (SourceTerms("a", 7, 2.0, 0), SourceTerms("b", 3, 1.0, 1), SourceTerms("c", None, 1.0, 2))
kinds = st.sampled_from(
    [
        CurriculumTerms(),
        CurriculumTerms(kind=CurriculumKind.pools, weights=(1.0, 1.0, 0.0, 0.5)),
        CurriculumTerms(kind=CurriculumKind.pools, weights=(9.0, 1.0, 1.0, 0.2)),
        CurriculumTerms(kind=CurriculumKind.levels, window=2, raise_at=0.5, lower_at=0.4),
    ]
)
worlds = st.builds(
    StalenessWorld,
    terms=st.builds(
        make_world_terms, st.sampled_from(list(OnLate)), st.integers(0, 3), st.integers(1, 4),
        curriculum=kinds, sources=st.sampled_from([SOURCES, SOURCES[:1], SOURCES[:2]]),
    ),
    rng=st.integers(0, 2**32).map(random.Random),
    num_generators=st.integers(1, 4),
    keep=st.sampled_from([None, (0.2, 0.9)]),
)  # fmt: skip


def make_some_terms(sources: tuple[SourceTerms, ...] = SOURCES, **curriculum: object) -> Terms:
    return make_world_terms(
        OnLate.wait,
        2,
        4,
        steps=10**6,
        sources=sources,
        curriculum=CurriculumTerms(**curriculum),  # type: ignore[arg-type]
    )


@settings(max_examples=60, deadline=None)
@given(worlds)
def test_the_record_alone_says_each_prompt_and_the_accounts_close_whatever_crashes(
    world: StalenessWorld,
) -> None:
    """The world itself compares a book made of the log with one made of a state after each crash."""
    world.run()
    prompts: dict[int, int] = {}
    for event in world.events_noted:
        if isinstance(event, Leased | Accepted):
            assert prompts.setdefault(event.group, event.prompt) == event.prompt >= 0, "it never changes"
    reports, sources = world.book.supply.list_reports(), world.terms.sources
    leased = Counter(sources[decode_index(prompt, len(sources))[0]].name for prompt in prompts.values())
    waiting = Counter(
        sources[decode_index(group.prompt, len(sources))[0]].name
        for group in world.book.list_groups().values()
        if not group.num_uses
    )
    for name, report in reports.items():
        assert report.leased == leased[name]
        assert report.leased == report.trained + report.rejected + waiting[name]
    assert sum(report.trained for report in reports.values()) == len(world.uses)
    rejected = {event.group for event in world.events_noted if isinstance(event, Rejected)}
    assert sum(report.rejected for report in reports.values()) == len(rejected)


@settings(max_examples=50, deadline=None)
@given(worlds.filter(lambda world: world.terms.curriculum.kind == CurriculumKind.pools))
def test_each_prompt_stands_in_one_pool_or_is_under_way_once(world: StalenessWorld) -> None:
    world.run()
    curriculum = world.book.supply.curriculum
    assert isinstance(curriculum, PoolCurriculum)
    open_prompts = [group.prompt for group in world.book.leases.open_groups.values()]
    assert Counter(open_prompts) == Counter([*curriculum._under_way]) + curriculum._again
    for source, queues in enumerate(curriculum._queues):
        begun = {
            curriculum.order.find_row(source, place) * len(world.terms.sources) + source
            for place in range(curriculum._next_row[source])
        }
        standing = [prompt for pool in POOLS for prompt in queues[pool]]
        under_way = [one for one in curriculum._under_way if one % len(world.terms.sources) == source]
        if world.terms.sources[source].size is not None:
            assert sorted([*standing, *under_way]) == sorted(begun)
        else:  # those without a result are not asked again
            assert {*standing, *under_way} <= begun and len({*standing}) == len(standing)


@pytest.mark.parametrize("trouble", ["fail", "silent", "hang"])
@pytest.mark.parametrize(
    "curriculum",
    [
        CurriculumTerms(kind=CurriculumKind.pools),
        CurriculumTerms(kind=CurriculumKind.pools, weights=(None, 1.0, 0.0, 0.0)),
        CurriculumTerms(kind=CurriculumKind.levels),
    ],
)
def test_a_prompt_that_never_has_a_result_does_not_hold_the_run_up(
    curriculum: CurriculumTerms, trouble: str
) -> None:
    """Three epochs; the world compares the book with one made of its record after each crash."""
    sources = (SourceTerms("a", 12, 3.0, 0), SourceTerms("single", 1, 1.0, 0))
    terms = make_world_terms(OnLate.cancel, 1, 2, steps=20, sources=sources, curriculum=curriculum)
    world = StalenessWorld(terms, random.Random(5), bad={8: trouble, 1: trouble})
    world.run()
    asked = Counter(event.prompt for event in world.events_noted if isinstance(event, Leased))
    assert asked[8] >= 2 and asked[1] >= 2, "they have their turns all the same"
    made_again = world.rebuild_book(None, world.events_noted)
    assert describe_logged_book(made_again) == describe_logged_book(world.book)


@pytest.mark.parametrize("pool", [0.1, 0.5, 0.9])
def test_a_prompt_that_fails_is_asked_as_often_as_the_others_wherever_they_stand(pool: float) -> None:
    terms = make_some_terms((SourceTerms("a", 20),), kind=CurriculumKind.pools)
    curriculum, asked = PoolCurriculum(terms), 0
    for group in range(1000):
        index = curriculum.choose_prompt(group)
        asked += index == 7
        # It has a result once, so that it stands in a pool of its own before it fails.
        play_group(curriculum, group, pool if index != 7 else 0.5 if asked == 1 else None)
    assert 20 < asked < 90


def test_prompts_that_hold_the_step_at_hand_up_are_cancelled_wherever_their_groups_fall_due() -> None:
    terms = make_world_terms(
        OnLate.cancel, 2, 1, sources=(SourceTerms("a", 2),),
        curriculum=CurriculumTerms(kind=CurriculumKind.pools),
    )  # fmt: skip
    book = Book(terms)
    book.history.publish_version(0)
    first, second = (book.leases.lease_next("g", 0.0) for _ in range(2))
    assert first is not None and second is not None and second.due == 1
    for _ in range(terms.max_attempts):  # the place at hand is free, and its prompt comes back
        book.leases.fail_lease(first.id, 1, "it raised")
        first = book.leases.lease_next("g", 0.0) or first
    while (lease := book.leases.lease_next("g", 0.0)) is not None:
        pass  # both prompts are under way for whatever steps
    assert book.history.hand_out(0, 1.0) is None
    book.leases.cancel_stragglers(100.0)
    assert (lease := book.leases.lease_next("g", 100.0)) is not None and lease.due == 0


def test_bounds_hold_for_rewards_of_32_bits() -> None:
    for bound in (0.1, 0.2, 0.3, 0.7, 0.8, 1000.1):
        mean = float(np.float32(bound))
        assert is_within(mean, (bound, bound + 1)) and is_within(mean, (bound - 1, bound))
        assert not is_within(bound - 1e-4 * bound, (bound, 2 * bound))
    pools = PoolCurriculum(make_some_terms(SOURCES[:1], kind=CurriculumKind.pools, hard_up_to=0.1))
    assert pools._name_pool(float(np.float32(0.1))) == "hard"
    assert pools._name_pool(0.1001) == "normal"


def play_group(curriculum: PoolCurriculum | LevelCurriculum, group: int, reward: float | None) -> int:
    index = curriculum.choose_prompt(group)
    assert index is not None
    curriculum.start_prompt(index)
    curriculum.end_prompt(index, reward)
    return index


def test_pools_are_drawn_by_their_weights_after_every_prompt_was_seen_once() -> None:
    size = 90
    terms = make_some_terms(
        (SourceTerms("a", size),), kind=CurriculumKind.pools, weights=(None, 1.0, 2.0, 0.0)
    )
    curriculum = PoolCurriculum(terms)
    rewards = {row: (0.25, 0.75, 0.76)[row % 3] for row in range(size)}
    first = []
    for group in range(size):
        index = curriculum.choose_prompt(group)
        assert index is not None
        first.append(play_group(curriculum, group, rewards[index]))
    assert sorted(first) == list(range(size)), "unseen prompts come first"
    assert curriculum.list_figures() == {
        "pool_hard": 30, "pool_normal": 30, "pool_easy": 30, "pool_unseen": 0, "under_way": 0,
    }  # fmt: skip
    drawn = Counter()  # type: ignore[var-annotated]
    for group in range(size, 10 * size):
        index = curriculum.choose_prompt(group)
        assert index is not None
        drawn[index] += 1
        play_group(curriculum, group, rewards[index])
    hard, normal, easy = ([drawn[row] for row in range(size) if row % 3 == pool] for pool in range(3))
    assert sum(easy) == 0, "a pool of weight 0 waits until nothing else is left"
    assert 1.5 < sum(normal) / sum(hard) < 2.7
    assert max(hard) - min(hard) <= 1 and max(normal) - min(normal) <= 1, "nobody of a pool starves"


def test_a_pool_of_weight_zero_gives_prompts_when_nothing_else_is_left_and_none_comes_twice() -> None:
    terms = make_some_terms((SourceTerms("a", 3),), kind=CurriculumKind.pools, weights=(None, 1.0, 1.0, 0.0))
    curriculum = PoolCurriculum(terms)
    for group in range(3):
        play_group(curriculum, group, 1.0)
    for group in range(3, 6):
        index = curriculum.choose_prompt(group)
        assert index is not None
        curriculum.start_prompt(index)
    assert curriculum.choose_prompt(6) is None, "all are under way"
    curriculum.end_prompt(1, None)
    assert curriculum.choose_prompt(6) == 1


def test_a_prompt_without_a_result_goes_back_behind_the_others_of_its_pool() -> None:
    curriculum = PoolCurriculum(make_some_terms((SourceTerms("a", 4),), kind=CurriculumKind.pools))
    failed = play_group(curriculum, 0, None)
    others = [play_group(curriculum, group, 0.5) for group in (1, 2, 3)]
    assert failed not in others and play_group(curriculum, 4, 0.5) == failed


def test_sources_keep_their_shares_under_pools() -> None:
    curriculum = PoolCurriculum(make_some_terms((SourceTerms("a", 50, 3.0), SourceTerms("b", 50, 1.0)),
                                           kind=CurriculumKind.pools))  # fmt: skip
    counts = Counter(play_group(curriculum, group, 0.5) % 2 for group in range(400))
    assert counts == {0: 300, 1: 100}


def test_levels_open_when_mastered_and_close_when_lost() -> None:
    sources = (
        *(SourceTerms(f"s@{level}", None, 1.0, level) for level in (0, 1, 4)),
        SourceTerms("always", None, 1.0),
    )
    terms = make_some_terms(sources, kind=CurriculumKind.levels, window=10, review=0.25)
    curriculum = LevelCurriculum(terms)

    def play(first: int, count: int, reward: float) -> Counter[int]:
        return Counter(play_group(curriculum, group, reward) % 4 for group in range(first, first + count))

    counts = play(0, 400, 0.5)
    assert set(counts) == {0, 3} and 150 < counts[0] < 250, "other levels are closed"
    assert curriculum.list_figures() == {"level": 0}
    group = 400
    while curriculum.list_figures() == {"level": 0}:
        play(group, 1, 0.9)
        group += 1
    assert 400 < group < 450, "10 groups of the level, with the source that is always open between"
    counts = play(group, 2000, 0.5)
    assert set(counts) == {0, 1, 3} and 0.15 < counts[0] / (counts[0] + counts[1]) < 0.35, "review"
    assert 0.4 < counts[3] / 2000 < 0.6, "levels together weigh as much as the present one"
    group += 2000
    while curriculum.list_figures() == {"level": 1}:
        play(group, 1, 1.0)
        group += 1
    assert curriculum.list_figures() == {"level": 4}
    while curriculum.list_figures() == {"level": 4}:
        play(group, 1, 0.1)
        group += 1
    assert curriculum.list_figures() == {"level": 1}
    state = curriculum.export_state()
    again = LevelCurriculum(terms)
    again.restore_state(state)
    assert [play_group(again, n, 0.5) for n in range(group, group + 50)] == [
        play_group(curriculum, n, 0.5) for n in range(group, group + 50)
    ]


def test_a_place_is_drawn_in_proportion_and_never_one_of_weight_zero() -> None:
    counts = Counter(draw_place([0.0, 1.0, 3.0, 0.0], step / 1000) for step in range(1000))
    assert counts == {1: 250, 2: 750}
    assert draw_place([1.0, 0.0], 1.0 - 1e-17) == 0


def test_a_source_without_end_needs_a_weight_for_what_was_never_seen() -> None:
    with pytest.raises(ValueError, match="curriculum.pools.unseen_weight must be a number .*source 'a'"):
        Book(make_some_terms((SourceTerms("a"),), kind=CurriculumKind.pools))


def test_a_size_is_that_of_the_only_source_and_is_refused_beside_several() -> None:
    one = load_config(["task.sources=[{name: a}]", "task.size=7"])
    assert make_terms(one).list_sources() == (SourceTerms("a", 7),)
    with pytest.raises(ValueError, match="task.size must not be set for a task of several .* got 7 with 2"):
        make_terms(load_config(["task.sources=[{name: a}, {name: b}]", "task.size=7"]))


def test_a_size_above_the_number_of_prompts_is_refused_with_both_numbers() -> None:
    by_number, by_source = SimpleNamespace(num_prompts=20), SimpleNamespace(sources=[PromptSource("a", 20)])
    for task in (by_number, by_source):
        assert find_size(task, 20) == 20
        with pytest.raises(ValueError, match="task.size must be at most the 20 prompts .* has, got 30"):
            find_size(task, 30)
    assert (find_size(by_number, None), find_size(None, 30)) == (20, 30)


def test_rows_of_files_have_the_level_of_their_source(tmp_path: Path) -> None:
    data = {"train": [{"name": n, "path": str(tmp_path), "level": n == "hard"} for n in ("easy", "hard")]}
    with pytest.raises(ValueError, match=r"data.train\[0\].level must be a whole number, got False"):
        read_sources(data, "train")
    data = {"train": [{"name": "easy", "path": "a", "level": 0}, {"name": "any", "task": "sorting"}]}
    assert [one.level for one in read_sources(data, "train")] == [0, None]


def test_pools_that_are_never_drawn_from_are_refused() -> None:
    weights = [f"curriculum.pools.{pool}_weight=0" for pool in POOLS[1:]]
    with pytest.raises(ValueError, match="normal_weight must be above 0 where hard_weight and easy_weight"):
        load_config(["curriculum.kind=pools", *weights])


def test_levels_without_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="curriculum.kind=levels must have a task whose sources have levels"):
        Book(make_some_terms((SourceTerms("a"),), kind=CurriculumKind.levels))


# ---- in a buffer, with its journal


def make_config(*settings: str) -> list[str]:
    return ["learner.groups_per_step=2", "learner.samples_per_prompt=2", "eval.prompts=0", *settings]


SOME_SOURCES = "task.sources=[{name: a, size: 3, weight: 1}, {name: b, size: 40, weight: 3}]"


@pytest.mark.parametrize("kind", ["none", "pools"])
def test_a_killed_buffer_goes_on_with_the_same_prompts(tmp_path: Path, kind: str) -> None:
    settings = make_config(SOME_SOURCES, f"curriculum.kind={kind}", "staleness.max_versions=2")
    config = load_config(settings)
    buffer = Buffer(config, tmp_path)
    buffer.progress.publish_version(0, "w")
    before = [lease for lease in iter(lambda: buffer.lease_next("g"), None)]
    buffer.commit()
    buffer.journal.close()  # as a killed process: no state
    again = Buffer(config, tmp_path)
    again.join_generator("g")
    again.progress.publish_version(1, "w")
    after = [lease for lease in iter(lambda: again.lease_next("g"), None)]
    again.close()
    known = {lease.group: lease.index for lease in before}
    assert {lease.group: lease.index for lease in after if lease.group in known} == known
    assert len({lease.index for lease in after}) == len(after), "each prompt once"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            "task.sources=[{name: a, size: 4, weight: 1}, {name: b, size: 40, weight: 3}]",
            "size of the source 'a' must stay 3 .the journal rests on it., got 4",
        ),
        (
            "task.sources=[{name: a, size: 3, weight: 2}, {name: b, size: 40, weight: 3}]",
            "weight of the source 'a' must stay 1.0 .*, got 2.0",
        ),
        (
            "task.sources=[{name: a, size: 3, weight: 1}]",
            "sources of prompts must stay a, b .*, got a$",
        ),
        ("curriculum.kind=none", "curriculum.kind must stay pools .*, got none"),
    ],
)
def test_a_resumed_run_with_other_prompts_is_refused_by_name(
    tmp_path: Path, change: str, problem: str
) -> None:
    settings = make_config(SOME_SOURCES, "curriculum.kind=pools")
    Buffer(load_config(settings), tmp_path).close()
    with pytest.raises(ValueError, match=problem):
        Buffer(load_config([*settings, change]), tmp_path)
    Buffer(load_config([*settings, "curriculum.pools.hard_up_to=0.1"]), tmp_path).close()


def submit_reward(run: BufferHarness, lease: object, reward: float) -> str:
    rows = make_group(lease, reward=reward)  # type: ignore[arg-type]
    return run.submit(lease, encode_batch(to_batch(rows)))


def test_groups_outside_the_band_are_rejected_counted_and_made_anew(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness("staleness.max_versions=0", "curriculum.keep=[0.1,0.9]", "task.size=9")
    run.publish(0)
    first, second = run.ask()
    assert submit_reward(run, first, 0.0) == "uninformative"
    assert submit_reward(run, second, 0.9) == "accepted", "the ends are kept"
    (refill,) = run.ask()
    assert (refill.group, refill.due) == (2, 0)
    assert submit_reward(run, refill, 1.0) == "uninformative"
    (refill,) = run.ask()
    assert submit_reward(run, refill, 0.1) == "accepted"
    assert run.train(0) == [1, 3]
    status = run.status()
    assert status.tokens.rejected["uninformative"] == 8 and status.groups.rejected["uninformative"] == 2
    assert status.curriculum["refilled_share"] == 0.5
    report = status.sources["sorting"]
    assert (report.trained, report.rejected) == (2, 2)
    assert report.reward_mean == pytest.approx((0.0 + 0.9 + 1.0 + 0.1) / 4)
    assert report.epochs == report.leased / 9


def test_a_run_whose_groups_all_teach_nothing_ends_with_the_reason(tmp_path: Path) -> None:
    config = load_config(make_config("curriculum.keep=[0.1,0.9]", "curriculum.max_refills=5"))
    buffer = Buffer(config, tmp_path)
    buffer.progress.publish_version(0, "w")
    assert "refilled_share" not in buffer.make_status("").curriculum, "nothing was judged"
    for done in range(5):
        if done in (2, 4):  # a killed buffer counts on, from a state or from the log alone
            buffer.commit()
            buffer.close() if done == 2 else buffer.journal.close()
            buffer = Buffer(config, tmp_path)
            buffer.join_generator("g")
            assert buffer.make_status("").curriculum["refilled_share"] == 1.0
        buffer.check_time()
        lease = buffer.lease_next("g")
        assert lease is not None
        data = memoryview(encode_batch(to_batch(make_group(lease, reward=0.0)))).cast("B")
        assert buffer.intake.submit_groups("g", [lease.id], [2], 3, data) == ["uninformative"]
    with pytest.raises(Stuck, match="5 groups in a row teach nothing.*5 uninformative"):
        buffer.check_time()
    assert buffer.book.ledger.closes()
    buffer.close()
    # Who resumes such a run, with another `curriculum.keep`, has not ended at the first group.
    buffer = Buffer(config, tmp_path)
    buffer.join_generator("g")
    lease = buffer.lease_next("g")
    assert lease is not None
    data = memoryview(encode_batch(to_batch(make_group(lease, reward=0.0)))).cast("B")
    assert buffer.intake.submit_groups("g", [lease.id], [2], 3, data) == ["uninformative"]
    buffer.check_time()
    buffer.close()


def test_a_journal_of_before_sources_has_an_account_that_closes_after_a_rewind(tmp_path: Path) -> None:
    config = load_config(make_config("task.size=9", "staleness.max_versions=1"))
    buffer = Buffer(config, tmp_path)
    buffer.progress.publish_version(0, "w")
    for step in range(4):
        while (lease := buffer.lease_next("g")) is not None:
            data = memoryview(encode_batch(to_batch(make_group(lease, version=step)))).cast("B")
            buffer.intake.submit_groups("g", [lease.id], [2], 3, data)
        handout = buffer.progress.hand_out(step)
        assert handout is not None
        num_trained = sum(buffer.book.pool.get_content(group).tokens for group in handout.groups)
        buffer.progress.finish_step(
            ReportTrainedStep(step=step, num_trained=num_trained, idle_s=0.0, alive_s=1.0, metrics={})
        )
        buffer.progress.publish_version(step + 1, "w")
    buffer.commit()
    buffer.close()
    for number in state_numbers(tmp_path):
        state = read_state(tmp_path, number)
        assert state is not None
        state.book.supply = None
        for group in (*state.book.groups, *state.book.retired):
            group.prompt = -1
        write_state(tmp_path, number, encode_state(state), sync=False)
    again = Buffer(config, tmp_path, resume_step=1)
    (report,) = again.book.supply.list_reports().values()
    waiting = sum(not group.num_uses for group in again.book.list_groups().values())
    assert (report.leased, report.trained, report.rejected, waiting) == (10, 2, 0, 8)
    again.close()


def test_generators_that_wait_for_prompts_are_told_so(tmp_path: Path) -> None:
    settings = make_config("curriculum.kind=pools", "task.size=3", "staleness.max_versions=4")
    buffer = Buffer(load_config(settings), tmp_path)
    buffer.progress.publish_version(0, "w")
    while buffer.lease_next("g") is not None:
        pass
    waiting = buffer.describe_waiting(learner_waits=False, num_asking=1)
    assert waiting.endswith("1 generators wait for leases: all prompts of the curriculum are under way")
    buffer.close()


def test_a_request_that_leases_are_to_be_had_for_blames_no_curriculum(tmp_path: Path) -> None:
    buffer = Buffer(load_config(make_config("staleness.max_versions=1")), tmp_path)
    buffer.progress.publish_version(0, "w")
    words = "the learner trains step 0"
    assert buffer.describe_waiting(learner_waits=False, num_asking=1) == words
    while buffer.lease_next("g") is not None:
        pass
    waiting = buffer.describe_waiting(learner_waits=False, num_asking=1)
    assert waiting == f"{words}; 1 generators wait for leases: the staleness bound admits no more groups"
    buffer.close()
