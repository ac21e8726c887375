"""Groups of variable numbers of rows: an episode has a row for each of its branches."""

import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from branched_groups import count_sampled, draw_group
from buffer_harness import BufferHarness, make_group
from buffer_lives import LIFE_SETTINGS, copy_killed, lose_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers import events as e
from buffers import messages as m
from buffers.buffer import Buffer
from buffers.client import BufferClient, RefusedByBuffer, TakenBatch, send_groups
from buffers.group_checks import CheckedMessage, ExpectedGroup, GroupFacts, check_groups
from buffers.repair import repair_journal
from buffers.segments import Reader
from buffers.trajectory import SCHEMA_VERSION, MalformedGroup, Trajectory, encode_batch, to_batch
from configs.load import load_config
from configs.staleness import OnLate
from learners.packing import batch_from_arrow


def make_lease(number: int = 0, num_samples: int = 2) -> m.Lease:
    return m.Lease(
        id=number, split="train", task="t", index=number + 7, seed=0, group=number, due=number // 2,
        min_version=0, num_samples=num_samples,
    )  # fmt: skip


def check(groups: list[list[Trajectory]], **rules: Any) -> CheckedMessage:
    """Checks a message of groups 0, 1, …, of whose leases `make_lease` tells."""
    expected = [
        ExpectedGroup(number, number // 2, number + 7, len(rows)) for number, rows in enumerate(groups)
    ]
    data = encode_batch(to_batch([row for rows in groups for row in rows]))
    limits: dict[str, Any] = {"num_samples": 2, "newest_version": 9, **rules}
    return check_groups(data, expected, **limits)


# ---- whole groups


@given(rng=st.randoms(use_true_random=False), num_groups=st.integers(1, 4), num_samples=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_groups_with_branches_are_taken_and_their_facts_are_those_of_a_slow_count(
    rng: random.Random, num_groups: int, num_samples: int
) -> None:
    groups = [
        draw_group(rng, make_lease(number, num_samples), versions=(2, 9)) for number in range(num_groups)
    ]
    found = check(groups, num_samples=num_samples, max_turns=5)
    assert found.is_storable
    for rows, facts in zip(groups, found.verdicts, strict=True):
        assert isinstance(facts, GroupFacts), facts
        rewards = [row.reward for row in rows if row.branch == 0]
        assert facts.reward_mean == pytest.approx(statistics.fmean(rewards), abs=1e-6)
        assert facts.reward_std == pytest.approx(statistics.pstdev(rewards), abs=1e-6)
        versions = Counter(version for row in rows for version in row.versions if version >= 0)
        assert facts.num_tokens == versions.total()
        assert (facts.oldest_version, facts.newest_version) == (min(versions), max(versions))
        assert facts.tokens_by_version == (versions if len(versions) > 1 else {})


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_a_row_that_tells_no_turns_is_of_turn_0(rng: random.Random) -> None:
    groups = [draw_group(rng, make_lease(number), max_turns=2) for number in range(3)]
    silent = [[tell_no_turn(row) if rng.random() < 0.8 else row for row in rows] for rows in groups]
    told, untold = check(groups), check(silent)
    assert told.verdicts == untold.verdicts and isinstance(told.verdicts[0], GroupFacts)
    columns = [batch_from_arrow(pa.Table.from_batches([found.batch])) for found in (told, untold)]
    assert columns[0].turns is not None and columns[1].turns is not None
    assert columns[0].turns.tolist() == columns[1].turns.tolist()
    assert columns[0].truncated.tolist() == columns[1].truncated.tolist()


def tell_no_turn(row: Trajectory) -> Trajectory:
    return replace(row, turn=[]) if max(row.turn) == 0 else row


def make_branched(number: int = 1) -> list[Trajectory]:
    """Returns a group whose first sample has turns 0 and 2 on branch 0, and turn 1 on branch 1."""
    lease = make_lease(number)
    first, second = make_group(
        lease,
        tokens=[5, 6, 7, 8],
        sampled=[False, True, False, True],
        logprobs=[0.0, -0.5, 0.0, -1.0],
        versions=[-1, 3, -1, 3],
        turn=[-1, 0, -1, 2],
        token_rewards=[0.0, 0.25, 0.0, 0.5],
    )
    branch = replace(first, branch=1, turn=[-1, 1, -1, 1], token_rewards=[0.0, 0.0, 0.0, 0.25])
    return [first, branch, replace(second, turn=[-1, 0, -1, 1], token_rewards=[], reward=0.5)]


def change(place: int, **fields: Any) -> Callable[[list[Trajectory]], list[Trajectory]]:
    """Returns a fault: one row gets other fields."""

    def alter(rows: list[Trajectory]) -> list[Trajectory]:
        return [replace(row, **fields) if number == place else row for number, row in enumerate(rows)]

    return alter


NAN, INFINITE = float("nan"), float("inf")
NUMBERING = "samples must be 0..1, in order, and branches of each must count from 0"
BROKEN: dict[str, tuple[Callable[[list[Trajectory]], list[Trajectory]], str]] = {
    "a sample without a row": (lambda rows: rows[:2], NUMBERING),
    "a sample too many": (lambda rows: [*rows, replace(rows[2], sample=2)], NUMBERING),
    "samples out of order": (lambda rows: [rows[2], rows[0], rows[1]], NUMBERING),
    "branches out of order": (lambda rows: [rows[1], rows[0], rows[2]], NUMBERING),
    "a branch that is missing": (change(1, branch=2), NUMBERING),
    "a branch twice": (change(1, branch=0), NUMBERING),
    "a branch below 0": (change(2, branch=-1), NUMBERING),
    "no branch 0": (lambda rows: rows[1:], NUMBERING),
    "a branch of another sample": (change(1, sample=1), NUMBERING),
    "too many branches": (
        lambda rows: [*rows, *(replace(rows[2], branch=1 + i) for i in range(3))],
        r"at most 3 branches \(episodes.max_turns\), got 4",
    ),
    "another reward on a branch": (change(1, reward=0.5), "`reward` must be equal on all branches"),
    "another component on a branch": (change(1, rewards={"correct": 0.5}), "`rewards` must be equal on all"),
    "a component less on a branch": (change(1, rewards={}), "`rewards` must be equal on all branches"),
    "another end on a branch": (change(1, stop="timeout"), "`stop` must be equal on all branches"),
    "an unknown end": (change(2, stop="bored"), "stop must be one of completed, .*, got 'bored'"),
    "an endless end": (change(2, stop="x" * 5000), "stop must be one of completed, .*, got 'x{40}'"),
    "a long renderer": (change(2, renderer="x" * 201), "renderer must have at most 200 bytes, got 201"),
    "a turn where nothing was sampled": (change(0, turn=[0, 0, -1, 2]), "turns must be >= 0 where sampled"),
    "no turn where a token was sampled": (change(0, turn=[-1, -1, -1, 2]), "turns must be >= 0 where"),
    "a turn below -1": (change(0, turn=[-2, 0, -1, 2]), "turns must be >= 0 where sampled, and -1 elsewhere"),
    "a turn beyond the last": (change(0, turn=[-1, 0, -1, 3]), r"below 3 \(episodes.max_turns\), got 3"),
    "turns backwards": (change(0, turn=[-1, 2, -1, 0]), "turns must not decrease"),
    "turns backwards in the last row": (change(2, turn=[-1, 1, -1, 0]), "turns must not decrease"),
    "a turn on two branches": (change(1, turn=[-1, 1, -1, 2]), "a turn must stand on one branch"),
    "a turn on two branches, first": (change(1, turn=[-1, 0, -1, 1]), "a turn must stand on one branch"),
    "the same turn on two branches, unsaid": (change(1, turn=[], token_rewards=[0.0, 0.0, 0.0, 0.25]),
                                              "a turn must stand on one branch"),
    "turns of another length": (change(0, turn=[-1, 0, -1]), "`turn` must be empty or as long as `tokens`"),
    "rewards of another length": (change(0, token_rewards=[1.0]), "must be empty or as long as `tokens`"),
    "rewards on one branch only": (change(1, token_rewards=[]), "must be given on all branches"),
    "rewards that are NaN": (change(0, token_rewards=[NAN] * 4), "token_rewards must be finite"),
    "rewards that are infinite": (change(1, token_rewards=[0.0, 0.0, 0.0, INFINITE]), "must be finite"),
    "rewards that sum to more": (
        change(1, token_rewards=[0.0, 0.0, 0.0, 0.5]),
        "token_rewards of an episode must sum to its reward, 1, got 1.25",
    ),
    "rewards beyond rounding": (change(1, token_rewards=[0.0, 0.0, 0.0, 0.2501]), "must sum to its reward"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named_and_costs_no_other_group_of_the_message(name: str) -> None:
    damage, rule = BROKEN[name]
    others = [draw_group(random.Random(name), make_lease(number), max_turns=3) for number in (0, 2)]
    bad = damage(make_branched())
    first, broken, last = check([others[0], bad, others[1]], max_turns=3).verdicts
    assert isinstance(first, GroupFacts) and isinstance(last, GroupFacts)
    assert isinstance(broken, MalformedGroup)
    with pytest.raises(MalformedGroup, match=f"^group 1: .*{rule}"):
        raise broken


def test_the_group_that_the_faults_are_put_into_keeps_all_rules() -> None:
    (facts,) = check([make_branched(0)], max_turns=3).verdicts
    assert isinstance(facts, GroupFacts), facts
    assert (facts.num_tokens, facts.reward_mean, facts.reward_std) == (6, 0.75, 0.25)


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1.0, 1e7, 1e30])
def test_rewards_of_tokens_that_were_rounded_to_float32_still_sum_to_the_reward(scale: float) -> None:
    rng = random.Random(0)
    paid = [rng.uniform(-1, 1) * scale for _ in range(400)]
    (row,) = make_group(
        make_lease(0, 1),
        tokens=[1] * 400,
        sampled=[False] + [True] * 399,
        logprobs=[0.0] * 400,
        versions=[-1] + [0] * 399,
        token_rewards=paid,
        reward=sum(paid),
    )
    (facts,) = check([[row]], num_samples=1).verdicts
    assert isinstance(facts, GroupFacts), facts


def test_an_episode_that_ends_in_its_prompt_has_no_turn_and_its_group_counts_the_others_tokens() -> None:
    first, second = make_group(make_lease())
    empty = replace(
        first, sampled=[False] * 3, logprobs=[0.0] * 3, versions=[-1] * 3, stop="context_overflow"
    )
    (facts,) = check([[empty, second]]).verdicts
    assert isinstance(facts, GroupFacts) and facts.num_tokens == 2


def test_rows_that_are_not_those_of_the_request_cost_the_message() -> None:
    rows = make_branched(0)
    data = encode_batch(to_batch(rows))
    for count in (1, 2, 4):
        with pytest.raises(MalformedGroup, match=f"in {count} rows, got 3 rows"):
            check_groups(data, [ExpectedGroup(0, 0, 7, count)], num_samples=2, newest_version=9)


# ---- through the buffer


def test_groups_of_different_sizes_come_in_one_message_and_go_to_the_learner_whole(
    harness: Callable[..., BufferHarness],
) -> None:
    run, rng = harness("staleness.max_versions=1"), random.Random(1)
    run.publish(0)
    leases = run.ask()
    groups = [draw_group(rng, lease) for lease in leases]
    rows = [len(group) for group in groups]
    assert len(set(rows)) > 1, rows
    batch = to_batch([row for group in groups for row in group])
    ids = [lease.id for lease in leases]
    assert run.client.submit_groups("g", ids, rows, batch) == ["accepted"] * len(ids)
    taken = run.client.take_batch(0, wait_s=1.0)
    assert isinstance(taken, TakenBatch)
    assert taken.table.to_batches()[0].num_rows <= taken.table.num_rows
    assert taken.table.combine_chunks().to_pylist() == to_batch(groups[0] + groups[1]).to_pylist()
    assert run.status().tokens.total == sum(map(count_sampled, groups))
    assert run.client.submit_groups("g", ids, rows, batch) == ["accepted"] * len(ids), "receipts were lost"
    assert run.status().tokens.total == sum(map(count_sampled, groups))


def test_wrong_counts_of_rows_are_refused_with_rule_and_value(harness: Callable[..., BufferHarness]) -> None:
    run = harness("episodes.max_turns=3", "buffer.max_attempts=1")
    run.publish(0)
    one, other, *_ = run.ask()
    batch = to_batch(draw_group(random.Random(2), one, max_turns=3))
    with pytest.raises(RefusedByBuffer, match="rows of a lease must be at most 6, got 7"):
        run.client.submit_groups("g", [one.id], [7], batch)
    with pytest.raises(RefusedByBuffer, match="Expected `int` <= 1048576"):
        run.client.submit_groups("g", [one.id], [2**20 + 1], batch)
    with pytest.raises(RefusedByBuffer, match="Expected `int` >= 1"):
        run.client.submit_groups("g", [one.id], [0], batch)
    assert run.status().groups.rejected.get("failed", 0) == 0, "nothing was booked"
    assert run.client.submit_groups("g", [one.id], [2, 2], batch) == ["failed"]
    assert run.client.submit_groups("g", [other.id], [6], batch) == ["failed"]
    told = run.status().quarantined
    assert "`rows` must be as long as `leases`, 1, got 2" in told[0] and "in 6 rows, got" in told[1]


def test_groups_of_different_sizes_are_divided_where_one_message_would_be_too_large(
    harness: Callable[..., BufferHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rng = harness("staleness.max_versions=1"), random.Random(3)
    run.publish(0)
    leases = run.ask()
    groups = [draw_group(rng, lease) for lease in leases]
    largest = max(encode_batch(to_batch(group)).size for group in groups)
    monkeypatch.setattr(m, "MAX_PAYLOAD_BYTES", largest)
    batch = to_batch([row for group in groups for row in group])
    send_groups(run.client, "g", [lease.id for lease in leases], [len(group) for group in groups], batch)
    verdicts: dict[int, str] = {}
    while len(verdicts) < len(leases):
        for answer in run.client.receive_answers(5.0):
            assert isinstance(answer.reply, m.LeaseReceipt), answer
            verdicts |= dict(zip(answer.reply.leases, answer.reply.verdicts, strict=True))
    assert set(verdicts.values()) == {"accepted"}
    taken = run.client.take_batch(0, wait_s=1.0)
    assert isinstance(taken, TakenBatch)
    assert taken.table.combine_chunks().to_pylist() == to_batch(groups[0] + groups[1]).to_pylist()


def test_a_duplicate_with_other_rows_beside_a_wanted_group_counts_all_its_tokens(
    harness: Callable[..., BufferHarness],
) -> None:
    run, rng = harness("staleness.max_versions=1"), random.Random(4)
    run.publish(0)
    first, second, third, *_ = run.ask()
    run.client.call(m.LeaveRun(generator="g", error="was stopped"), m.Acknowledged)
    run.client.call(m.JoinRun(generator="g"), m.JoinedRun)
    again = {lease.group: lease for lease in run.ask()}
    mine = draw_group(rng, again[first.group])
    assert run.submit(again[first.group], encode_batch(to_batch(mine)), len(mine)) == "accepted"
    late, wanted = draw_group(rng, first), draw_group(rng, again[third.group])
    verdicts = run.client.submit_groups(
        "g", [first.id, again[third.group].id], [len(late), len(wanted)], to_batch(late + wanted)
    )
    assert verdicts == ["duplicate", "accepted"]
    tokens = run.status().tokens
    assert tokens.rejected["duplicate"] == count_sampled(late)
    assert tokens.total == count_sampled(mine + late + wanted)


# ---- the ledger, over lives


class BranchedRun:
    """A run whose every group has random branches, and whose buffer is killed and opened again."""

    def __init__(self, folder: Path, on_late: OnLate, seed: int) -> None:
        self.rng = random.Random(seed)
        settings = [
            *LIFE_SETTINGS, f"staleness.on_late={on_late}", "staleness.max_versions=2", "buffer.lease_s=1000",
        ]  # fmt: skip
        if on_late is OnLate.cancel:
            settings.append("staleness.straggler_timeout_s=100")
        self.config = load_config(settings)
        self.folder, self.lives = folder, 0
        self.buffer = Buffer(self.config, folder / "0")
        self.sent: dict[int, list[Trajectory]] = {}
        """The rows that were accepted, by group."""
        self.spent = 0
        """Tokens of all groups that were handed in, and of those that failed."""

    def submit_some(self, step: int) -> None:
        """Hands in the groups of some leases in one message, and some of them twice."""
        leases = []
        while (lease := self.buffer.lease_next("g")) is not None:
            leases.append(lease)
        self.rng.shuffle(leases)
        while leases:
            some, leases = leases[:3], leases[3:]
            if self.rng.random() < 0.1:
                self.buffer.fail_lease(some[0].id, 5, "ValueError: no")
                self.spent += 5
                some = some[1:]
            if not some:
                continue
            groups = [
                draw_group(self.rng, lease, versions=(lease.min_version, step), reward=1.0, token_rewards=[])
                for lease in some
            ]
            verdicts = self.submit(some, groups)
            for lease, rows, verdict in zip(some, groups, verdicts, strict=True):
                assert verdict == "accepted"
                self.sent[lease.group] = rows
                self.spent += count_sampled(rows)
            if self.rng.random() < 0.3:
                assert self.submit(some, groups) == ["accepted"] * len(some), "sent again"

    def submit(self, leases: list[m.Lease], groups: list[list[Trajectory]]) -> list[str]:
        data = memoryview(encode_batch(to_batch([row for rows in groups for row in rows]))).cast("B")
        ids, counts = [lease.id for lease in leases], [len(rows) for rows in groups]
        return self.buffer.intake.submit_groups("g", ids, counts, SCHEMA_VERSION, data)

    def train_step(self, step: int) -> None:
        reader = Reader(self.buffer.journal.folder)
        handout = self.buffer.progress.hand_out(step)
        assert handout is not None
        trained = 0
        for group in handout.groups:
            content = self.buffer.book.pool.get_content(group)
            assert reader.read(content).to_pylist() == to_batch(self.sent[group]).to_pylist()
            versions = [v for row in self.sent[group] for v in row.versions if v >= 0]
            trained += sum(step - version <= self.config.max_versions for version in versions)
        self.buffer.progress.finish_step(
            m.ReportTrainedStep(step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={})
        )
        self.buffer.commit()

    def die_and_open(self) -> None:
        self.lives += 1
        folder = copy_killed(self.buffer, self.folder / str(self.lives))
        self.buffer.close()
        self.buffer = Buffer(self.config, folder)

    def check_ledger(self) -> None:
        ledger = self.buffer.book.ledger
        assert ledger.closes() and ledger.generated == self.spent


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("on_late", list(OnLate))
def test_the_ledger_closes_in_tokens_of_all_branches_whatever_becomes_of_a_group(
    tmp_path: Path, on_late: OnLate, seed: int
) -> None:
    run = BranchedRun(tmp_path, on_late, seed)
    for step in range(6):
        run.buffer.progress.publish_version(step, f"w{step}")
        run.submit_some(step)
        run.check_ledger()
        run.train_step(step)
        run.check_ledger()
        if run.rng.random() < 0.5:
            run.die_and_open()
            run.check_ledger()
    run.buffer.close()


def test_a_straggler_is_cancelled_and_its_branches_count_as_a_duplicate_when_they_come_after_all(
    tmp_path: Path,
) -> None:
    config = load_config(
        [*LIFE_SETTINGS, "staleness.on_late=cancel", "staleness.straggler_timeout_s=1", "buffer.lease_s=1000"]
    )
    buffer, rng = Buffer(config, tmp_path / "journal"), random.Random(5)
    buffer.progress.publish_version(0, "w0")
    leases = [lease for _ in range(3) if (lease := buffer.lease_next("g")) is not None]
    groups = [draw_group(rng, lease) for lease in leases]

    def submit(places: range) -> list[str]:
        data = memoryview(encode_batch(to_batch([row for i in places for row in groups[i]]))).cast("B")
        ids, counts = [leases[i].id for i in places], [len(groups[i]) for i in places]
        return buffer.intake.submit_groups("g", ids, counts, SCHEMA_VERSION, data)

    assert submit(range(1, 3)) == ["accepted"] * 2
    now = 1e12
    assert buffer.book.history.hand_out(0, now) is None
    assert buffer.book.leases.cancel_stragglers(now + 2) == [leases[0].group]
    assert submit(range(1)) == ["duplicate"]
    ledger = buffer.book.ledger
    assert ledger.closes() and ledger.generated == sum(map(count_sampled, groups))
    buffer.close()


def test_a_repair_finds_each_group_of_a_message_by_its_branches(tmp_path: Path) -> None:
    run = BranchedRun(tmp_path, OnLate.wait, 7)
    run.buffer.progress.publish_version(0, "w0")
    run.submit_some(0)
    run.train_step(0)
    folder = copy_killed(run.buffer, tmp_path / "killed")
    run.buffer.close()
    for path in (folder / "state").glob("*"):
        path.unlink()
    lost = sorted(run.sent)[:2]
    lose_lines(folder, lambda event: isinstance(event, e.Accepted) and event.group in lost)
    report = repair_journal(folder)
    assert sum("its rows are well formed" in line for line in report.saved) == 2, report
    life, reader = Buffer(run.config, folder), Reader(folder)
    assert life.progress.next_step == 1
    contents = {group: life.book.pool.get_content(group) for group in life.book.pool.groups}
    for group, content in contents.items():
        assert reader.read(content).to_pylist() == to_batch(run.sent[group]).to_pylist()
        assert content.tokens == count_sampled(run.sent[group])
    assert contents
    life.close()


def test_a_client_elsewhere_is_sent_the_rows_of_groups_of_different_sizes(
    harness: Callable[..., BufferHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rng = harness(), random.Random(8)
    run.publish(0)
    leases = run.ask()
    groups = [draw_group(rng, lease) for lease in leases]
    for lease, rows in zip(leases, groups, strict=True):
        assert run.submit(lease, encode_batch(to_batch(rows)), len(rows)) == "accepted"
    monkeypatch.setattr("buffers.client.is_on_this_host", lambda folder, mark: False)
    far = BufferClient(run.server.address, timeout_s=5.0)
    taken = far.take_batch(0, wait_s=1.0)
    assert isinstance(taken, TakenBatch)
    assert taken.table.combine_chunks().to_pylist() == to_batch(groups[0] + groups[1]).to_pylist()
    far.close()
