"""The buffer over real sockets: what it gives out, takes in, refuses and remembers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from buffer_harness import SMALL_RUN, BufferHarness, compress_batch, make_group

from buffers import messages as m
from buffers.buffer import Buffer
from buffers.client import BufferClient, RefusedByBuffer, TakenBatch
from buffers.role_registry import GONE_S
from buffers.server import BufferServer, Stuck
from buffers.trajectory import SCHEMA, SCHEMA_VERSION, encode_batch, to_batch
from configs.load import load_config


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Callable[..., BufferHarness]]:
    running: list[BufferHarness] = []

    def start(*overrides: str, resume_step: int | None = None) -> BufferHarness:
        running.append(
            BufferHarness(load_config([*SMALL_RUN, *overrides]), tmp_path / "journal", resume_step)
        )
        return running[-1]

    yield start
    for one in running:
        one.close()


def test_groups_flow_from_lease_to_batch_and_the_ledger_closes(harness: Callable[..., BufferHarness]) -> None:
    run = harness("staleness.max_versions=1")
    assert run.ask() == [], "no lease before version 0"
    run.publish(0)
    leases = run.ask()
    assert [lease.group for lease in leases] == [0, 1, 2, 3]
    assert all(run.submit(lease) == "accepted" for lease in reversed(leases))
    assert run.submit(leases[0]) == "accepted", "sent again"
    assert run.train(0) == [0, 1]
    assert run.train(1) == [2, 3]
    status = run.status()
    assert (status.tokens.total, status.tokens.trained, status.tokens.in_flight) == (16, 16, 0)
    assert (status.groups.total, status.groups.trained) == (4, 4)
    assert status.staleness_histogram == {0: 8, 1: 8}


@pytest.mark.parametrize("budget", ["max_groups", "max_tokens", "max_bytes"])
def test_a_budget_holds_back_what_the_step_at_hand_does_not_need(
    harness: Callable[..., BufferHarness], budget: str
) -> None:
    run = harness("staleness.max_versions=3", f"buffer.{budget}=1")
    run.publish(0)
    (first,) = run.ask(1)
    run.submit(first)
    (second,) = run.ask()
    assert first.due == second.due == 0 and run.ask() == [], "one group or token or byte is held already"
    assert f"buffer.{budget} is reached" in run.server.buffer.describe_waiting(learner_waits=False)
    run.submit(second)
    run.train(0)
    run.publish(1)
    assert run.ask()[0].due == 1, "what is trained is not held any more"


def test_what_one_sender_sends_is_handled_in_its_order(harness: Callable[..., BufferHarness]) -> None:
    run = harness("buffer.max_attempts=1")
    run.publish(0)
    lease, *_ = run.ask()
    run.client.send_request(
        m.SubmitGroups(generator="g", leases=[lease.id], rows=[lease.num_samples], schema=SCHEMA_VERSION),
        encode_batch(to_batch(make_group(lease))),
    )
    run.client.call(m.LeaveRun(generator="g", error="was stopped"), m.Acknowledged)
    status = run.status()
    assert status.tokens.total == 4 and status.groups.rejected["failed"] == 5, (
        "what was sent before leaving counts"
    )
    assert lease.group not in status.quarantined


def test_whoever_only_asks_does_not_wait_behind_those_who_submit(
    harness: Callable[..., BufferHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffers.inbox.MAX_BYTES_PER_TURN", 1)  # one submission a turn
    run = harness("staleness.max_versions=3")
    run.publish(0)
    order: list[str] = []
    buffer = run.server.buffer
    submit, describe = buffer.intake.submit_groups, buffer.describe_waiting
    monkeypatch.setattr(
        buffer.intake,
        "submit_groups",
        lambda *args: (order.append("submit"), time.sleep(0.1), submit(*args))[2],
    )  # type: ignore[func-returns-value]

    def note_watch(**of_whom: Any) -> str:
        order.append("watch")
        return describe(**of_whom)

    monkeypatch.setattr(buffer, "describe_waiting", note_watch)
    other = BufferClient(run.server.address, timeout_s=5.0)
    other.call(m.LocateJournal(), m.JournalLocation)  # is connected
    for lease in run.ask():
        run.client.send_request(
            m.SubmitGroups(generator="g", leases=[lease.id], rows=[lease.num_samples], schema=SCHEMA_VERSION),
            encode_batch(to_batch(make_group(lease))),
        )
    other.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
    assert order.index("watch") < 4, order
    other.close()


def test_a_rank_that_asks_ahead_waits_for_the_one_that_reports(harness: Callable[..., BufferHarness]) -> None:
    run = harness()
    run.publish(0)
    for lease in run.ask():
        run.submit(lease)
    other = BufferClient(run.server.address, timeout_s=5.0)
    first = other.take_batch(0, wait_s=1.0)
    assert isinstance(first, TakenBatch) and first.groups == [0, 1]
    assert isinstance(other.take_batch(1, wait_s=0.1), m.NotReadyYet), "step 0 is not trained yet"
    assert run.train(0) == [0, 1]
    second = other.take_batch(1, wait_s=1.0)
    assert isinstance(second, TakenBatch) and second.groups == [2, 3]
    other.close()


def test_a_reader_elsewhere_is_sent_what_one_on_this_host_maps(
    harness: Callable[..., BufferHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = harness()
    run.publish(0)
    for lease in run.ask():
        run.submit(lease)
    mapped = run.client.take_batch(0, wait_s=1.0)
    monkeypatch.setattr("buffers.client.is_on_this_host", lambda folder, mark: False)
    far = BufferClient(run.server.address, timeout_s=5.0)
    sent = far.take_batch(0, wait_s=1.0)
    assert isinstance(mapped, TakenBatch) and isinstance(sent, TakenBatch)
    assert mapped.table.equals(sent.table) and mapped.table.num_rows == 4
    far.close()


def test_a_buffer_that_is_started_again_goes_on_and_clients_send_again_what_has_no_answer(
    harness: Callable[..., BufferHarness], tmp_path: Path
) -> None:
    address = f"buffer.address=ipc://{tmp_path}/socket"
    run = harness(address, "staleness.max_versions=1")
    run.publish(0)
    first, second, *_ = run.ask()
    assert run.submit(first) == "accepted"
    before = run.status()
    run.server.stop()
    run.thread.join()
    data = encode_batch(to_batch(make_group(second)))
    waiting = run.client.send_request(
        m.SubmitGroups(generator="g", leases=[second.id], rows=[2], schema=SCHEMA_VERSION), data
    )
    again = harness(address, "staleness.max_versions=1")
    answers = {}
    while waiting not in answers:
        answers |= {answer.number: answer.reply for answer in run.client.receive_answers(5.0)}
    assert answers[waiting] == m.LeaseReceipt(leases=[second.id], verdicts=["accepted"]), (
        "the lease is still its own"
    )
    assert again.train(0) == [0, 1]
    after = again.status()
    assert (after.version, after.groups.total) == (before.version, before.groups.total) == (0, 4)


def test_each_generator_that_waits_gets_an_even_share(harness: Callable[..., BufferHarness]) -> None:
    run = harness("learner.groups_per_step=8", "staleness.max_versions=0")
    numbers = [
        run.client.send_request(m.RequestLeases(generator=f"g{i}", count=8, wait_s=5.0)) for i in range(2)
    ]
    run.client.call(m.WatchRun(after=0, wait_s=0.2), m.RunNews, wait_s=1)
    run.client.send_request(m.PublishVersion(version=0, manifest_locator="w"))
    answers = {}
    while len(answers) < 3:
        answers |= {a.number: a.reply for a in run.client.receive_answers(5.0)}
    assert [len(answers[number].leases) for number in numbers] == [4, 4]


MALFORMED = {
    "no arrow at all": lambda lease: pa.py_buffer(b"\x80\x04K\x00."),
    "cut": lambda lease: encode_batch(to_batch(make_group(lease)))[:-100],
    "another group's": lambda lease: encode_batch(to_batch(make_group(lease, group=99))),
    "too few samples": lambda lease: encode_batch(to_batch(make_group(lease)[:1])),
    "a reward that is NaN": lambda lease: encode_batch(to_batch(make_group(lease, reward=float("nan")))),
    "logprobs that are infinite": lambda lease: encode_batch(
        to_batch(make_group(lease, logprobs=[0.0, -float("inf"), -1.0]))
    ),
    "logprobs of another length": lambda lease: encode_batch(
        to_batch(make_group(lease, logprobs=[0.0, -1.0]))
    ),
    "a first token that was sampled": lambda lease: encode_batch(
        to_batch(make_group(lease, sampled=[True, True, True]))
    ),
    "a version not yet published": lambda lease: encode_batch(to_batch(make_group(lease, version=3))),
    "no tokens": lambda lease: encode_batch(
        to_batch(make_group(lease, tokens=[], sampled=[], logprobs=[], versions=[]))
    ),
    "another schema": lambda lease: encode_batch(pa.RecordBatch.from_pydict({"group": [lease.group]})),
    "compressed": lambda lease: compress_batch(to_batch(make_group(lease))),
    "a schema instead of a batch": lambda lease: SCHEMA.serialize(),
}


@pytest.mark.parametrize("damage", MALFORMED)
def test_a_broken_group_is_refused_counted_and_made_again(
    harness: Callable[..., BufferHarness], damage: str
) -> None:
    run = harness("staleness.max_versions=0")
    run.publish(0)
    first, second = run.ask()
    assert run.submit(first, MALFORMED[damage](first)) == "failed"
    assert run.submit(second) == "accepted"
    (again,) = run.ask()
    assert again.group == first.group and again.id != first.id
    assert run.submit(again) == "accepted"
    assert run.train(0) == [0, 1]
    status = run.status()
    assert status.groups.rejected["failed"] == 1 and status.groups.trained == 2


def test_a_group_that_fails_for_good_is_quarantined_with_its_error_and_the_run_goes_on(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness("staleness.max_versions=0", "buffer.max_attempts=2")
    run.publish(0)
    lease, other = run.ask()
    run.submit(other)
    for _ in range(2):
        run.client.call(
            m.FailLease(generator="g", lease=lease.id, num_tokens=3, error="KeyError: 'x'"), m.LeaseReceipt
        )
        (lease,) = run.ask()
    assert lease.group == 2, "a fresh prompt takes the place"
    run.submit(lease)
    assert run.train(0) == [1, 2]
    status = run.status()
    assert status.quarantined == {0: "KeyError: 'x'"} and status.tokens.rejected["failed"] == 6


def test_dynamic_sampling_refills_groups_whose_rewards_are_all_equal(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness("staleness.max_versions=0", "algo=dapo", "learner.minibatches=1")
    run.publish(0)
    first, second = run.ask()
    mixed = [make_group(second)[0], make_group(second, reward=0.0)[1]]
    assert run.submit(first) == "zero_variance"
    assert run.submit(second, encode_batch(to_batch(mixed))) == "accepted"
    (refill,) = run.ask()
    assert (refill.group, refill.due) == (2, 0)
    assert (
        run.submit(refill, encode_batch(to_batch([make_group(refill)[0], make_group(refill, reward=0.0)[1]])))
        == "accepted"
    )
    assert run.train(0) == [1, 2]
    assert run.status().tokens.rejected["zero_variance"] == 4


def test_rubbish_is_answered_and_never_stops_the_server(harness: Callable[..., BufferHarness]) -> None:
    run = harness()
    run.client._socket.send(b"one frame")
    run.client._socket.send_multipart([b"n", b"\xff\xfe rubbish"])
    run.client._socket.send_multipart([b"\x07" + bytes(7), b"\x81\xa4type\xa4Nope"])
    with pytest.raises(RefusedByBuffer, match="must be the one handed out"):
        run.client.call(
            m.ReportTrainedStep(step=3, num_trained=0, idle_s=0, alive_s=0, metrics={}), m.Acknowledged
        )
    run.publish(0)
    with pytest.raises(RefusedByBuffer, match="version must be above 0, got 0"):
        run.client.call(m.PublishVersion(version=0, manifest_locator="other"), m.Acknowledged)
    assert run.status().refused_requests == {"malformed message": 3, "wrong step": 1, "wrong version": 1}


def test_a_stopped_run_tells_everyone_that_it_is_over(harness: Callable[..., BufferHarness]) -> None:
    run = harness()
    run.publish(0)
    run.client.call(m.StopRun(reason="SIGINT"), m.Acknowledged)
    assert run.client.call(m.RequestLeases(generator="g", count=1, wait_s=5.0), m.LeaseGrant).ended
    over, _ = run.client.exchange(m.RequestBatch(step=0, wait_s=5.0))
    assert over == m.RunStopped(reason="SIGINT")


def test_a_step_that_one_host_of_ranks_has_is_given_to_the_others_when_the_run_is_told_to_stop(
    harness: Callable[..., BufferHarness],
) -> None:
    """The step under way is trained by all ranks, or by none."""
    run = harness()
    run.publish(0)
    for lease in run.ask():
        run.submit(lease)
    first = run.client.take_batch(0, wait_s=1.0)
    assert isinstance(first, TakenBatch)
    run.client.call(m.StopRun(reason="SIGTERM"), m.Acknowledged)
    other = BufferClient(run.server.address, timeout_s=5.0)
    second = other.take_batch(0, wait_s=1.0)
    assert isinstance(second, TakenBatch) and second.groups == first.groups
    assert run.train(0) == first.groups
    for client in (run.client, other):
        assert client.take_batch(1, wait_s=1.0) == m.RunStopped(reason="SIGTERM"), "its groups are there"
    other.close()


def test_steps_that_a_rewind_has_undone_are_not_handed_out_when_the_run_is_told_to_stop(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness()
    run.publish(0)
    for lease in run.ask():
        run.submit(lease)
    run.train(0)
    assert isinstance(run.client.take_batch(1, wait_s=1.0), TakenBatch)
    run.client.call(m.RewindToStep(step=0), m.Acknowledged)
    run.client.call(m.StopRun(reason="SIGTERM"), m.Acknowledged)
    assert run.client.take_batch(0, wait_s=1.0) == m.RunStopped(reason="SIGTERM")


def test_a_wait_without_end_is_named_and_ends_the_run(harness: Callable[..., BufferHarness]) -> None:
    run = harness("buffer.watchdog_s=1", "staleness.max_versions=0")
    run.publish(0)
    run.ask(count=1)
    waiting, _ = run.client.exchange(m.RequestBatch(step=0, wait_s=0.1))
    assert waiting == m.NotReadyYet(
        waiting_for="the learner waits: step 0 has 0 of 2 groups; leased to g (1), the oldest is group 0"
    )
    run.client.send_request(m.RequestBatch(step=0, wait_s=30.0))
    run.thread.join(timeout=30)
    assert isinstance(run.error, Stuck) and "leased to g (1)" in str(run.error)


@pytest.fixture
def still(tmp_path: Path) -> Iterator[tuple[Buffer, list[float]]]:
    """A buffer whose learner has a batch to train, its clock, and a watchdog that ends the run after 20 s
    without movement."""
    clock = [0.0]
    buffer = Buffer(
        load_config([*SMALL_RUN, "buffer.watchdog_s=10", "buffer.stalled_s=100"]),
        tmp_path,
        clock=lambda: clock[0],
    )
    buffer.progress.publish_version(0, "w0")
    yield buffer, clock
    buffer.close()


def beat(activity: str, standstill_s: float = 0.0) -> m.RoleHeartbeat:
    return m.RoleHeartbeat(
        role="learner-0", activity=activity, activity_s=standstill_s, standstill_s=standstill_s
    )


@pytest.mark.parametrize(
    "activity",
    ["training step 0", "loading the model", "publishing version 0", "writing the last checkpoint"],
)
def test_work_of_any_length_is_no_hang_as_long_as_it_gets_on(
    still: tuple[Buffer, list[float]], activity: str
) -> None:
    buffer, clock = still
    for second in range(3600):
        clock[0] = float(second)
        buffer.roles.note_role("learner-0", beat(activity, standstill_s=second % 90), clock[0])
        buffer.check_time()
    assert buffer.make_status("").standstill_s > 3000, "no data have moved meanwhile, and the status says so"


@pytest.mark.parametrize(
    ("activity", "still_for_s", "expected_s"),
    [
        ("training step 0", None, 100 + 20),  # its heart beats, and it does not get on
        ("waiting for the batch of step 0", 0, 20),  # for ever and in good health
        ("sampling", 0, 20),  # without a token
    ],
)
def test_what_stands_still_though_its_heart_beats_is_named_and_ends_the_run(
    still: tuple[Buffer, list[float]], activity: str, still_for_s: float | None, expected_s: float
) -> None:
    buffer, clock = still
    with pytest.raises(Stuck) as stuck:
        for second in range(1000):
            clock[0] = float(second)
            buffer.roles.note_role(
                "learner-0", beat(activity, second if still_for_s is None else still_for_s), clock[0]
            )
            buffer.check_time()
    assert clock[0] == pytest.approx(expected_s, abs=2)
    if still_for_s is None:
        assert f"learner-0: training step 0 for {clock[0]:.0f} s" in str(stuck.value)


def test_work_of_a_role_that_is_not_heard_of_any_more_is_not_waited_for(
    still: tuple[Buffer, list[float]],
) -> None:
    buffer, clock = still
    buffer.roles.note_role("learner-0", beat("training step 0"), 0.0)
    with pytest.raises(Stuck, match=r"learner-0: not heard of for \d+ s \(then: training step 0\)"):
        for second in range(1000):
            clock[0] = float(second)
            buffer.check_time()
    assert clock[0] == pytest.approx(GONE_S + 20, abs=2)


def test_a_taken_port_is_refused_with_its_address(
    harness: Callable[..., BufferHarness], tmp_path: Path
) -> None:
    run = harness()
    with pytest.raises(ValueError, match=f"buffer.address must be free, got {run.server.address}"):
        BufferServer(load_config([*SMALL_RUN, f"buffer.address={run.server.address}"]), tmp_path / "other")


def test_evaluation_goes_before_later_steps_is_averaged_and_kept_off_the_ledger(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness("eval.prompts=3", "staleness.max_versions=1")
    run.publish(0)
    leases = run.ask(count=6)
    assert [lease.split for lease in leases] == ["train"] * 2 + ["eval"] * 3 + ["train"] * 2
    assert [lease.due for lease in leases if lease.split == "train"] == [0, 0, 1, 1], (
        "12 samples are room for 11"
    )
    for lease, reward in zip(leases[2:5], (1.0, 0.0, 0.5), strict=True):
        assert run.answer(lease, reward) == "accepted"
    (found,) = run.evaluations()
    assert (found.evaluation_set, found.version, found.avg, found.prompts) == ("held_out", 0, 0.5, 3)
    assert run.status().groups.total == 4


def test_a_generator_that_leaves_or_comes_back_frees_all_its_leases_at_once(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness("eval.prompts=1", "staleness.max_versions=0", "buffer.max_attempts=9")
    run.publish(0)
    for farewell, answer in (
        (m.LeaveRun(generator="g"), m.Acknowledged),
        (m.JoinRun(generator="g"), m.JoinedRun),
    ):
        for name in ("g", "h"):
            run.client.call(m.JoinRun(generator=name), m.JoinedRun)
        before = run.ask()
        run.client.call(farewell, answer)
        after = run.ask(generator="h")
        assert [(lease.split, lease.group) for lease in after] == [("train", 0), ("train", 1), ("eval", 0)]
        assert not {lease.id for lease in after} & {lease.id for lease in before}
        run.client.call(m.LeaveRun(generator="h"), m.Acknowledged)


def test_a_generator_that_has_left_gets_no_lease_before_it_joins_again(
    harness: Callable[..., BufferHarness],
) -> None:
    """Its farewell may overtake its requests: others say it in its place, over a connection of their own."""
    run = harness()
    run.publish(0)
    assert run.ask(1)
    run.client.call(m.LeaveRun(generator="g"), m.Acknowledged)
    assert run.ask() == []
    run.client.call(m.JoinRun(generator="g"), m.JoinedRun)
    assert run.ask()


def test_a_fleet_hears_of_its_own_generators_now_and_then_and_of_the_end_at_once(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness()
    for name in ("own", "gone", "anothers"):
        run.client.call(m.JoinRun(generator=name), m.JoinedRun)
        beat = m.GeneratorHeartbeat(
            generator=name, progress={}, report=m.GeneratorReport(version=3), activity="scoring"
        )
        run.client.call(beat, m.GeneratorStanding)
    run.client.call(m.LeaveRun(generator="gone"), m.Acknowledged)
    watch = m.WatchGenerators(generators=["own", "gone", "never"], wait_s=0.1)
    news = run.client.call(watch, m.GeneratorNews)
    assert news.versions == {"own": 3, "gone": 3} and news.activities == {"own": "scoring"}
    assert news.end is None and news.num_trained_steps == 0
    watcher = run.client.open_another()
    number = watcher.send_request(m.WatchGenerators(generators=["own"], wait_s=3600.0))
    assert not run.status().ended
    run.client.call(m.StopRun(reason="over"), m.Acknowledged)
    while not (answers := list(watcher.receive_answers(30.0))):
        pass
    assert [(one.number, one.reply.end) for one in answers] == [(number, "over")]  # type: ignore[union-attr]
    watcher.close()


def test_a_restart_at_a_checkpoint_hands_out_the_same_groups_and_the_same_ledger(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness("staleness.max_versions=1")
    run.publish(0)
    for lease in run.ask():
        run.submit(lease)
    handed = [run.train(0)]
    run.publish(1)
    for lease in run.ask()[:1]:
        run.submit(lease)
    handed.append(run.train(1))
    before = run.status()
    run.close()
    again = harness("staleness.max_versions=1", resume_step=1)
    again.publish(1)
    assert again.train(1) == handed[1]
    again.publish(2)
    after = again.status()
    assert after.tokens.trained == before.tokens.trained and after.groups.trained == before.groups.trained
    assert [lease.group for lease in again.ask()] == [6, 7], (
        "4 is in the journal, 5 is leased, as it was before"
    )
    again.client.call(m.LeaveRun(generator="g"), m.Acknowledged)
    assert [lease.group for lease in again.ask(generator="h")] == [5, 6, 7]


def test_a_resumed_run_whose_checkpoints_are_elsewhere_is_refused_and_does_not_begin_anew(
    harness: Callable[..., BufferHarness],
) -> None:
    run = harness("staleness.max_versions=1")
    run.publish(0)
    for lease in run.ask():
        run.submit(lease)
    run.train(0)
    run.client.call(m.ReportCheckpoint(step=1, oldest=1), m.Acknowledged)
    run.close()
    with pytest.raises(ValueError, match=r"^run.resume must .*checkpoints.* got none: step must be in 1..1 "):
        harness("staleness.max_versions=1", resume_step=0)
    again = harness("staleness.max_versions=1", resume_step=1)
    assert again.status().oldest_checkpoint == 1, "the refusal has changed nothing"


def test_generators_hear_of_a_later_life_also_when_the_clock_was_set_back(
    harness: Callable[..., BufferHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator that lives on takes the publication with the highest number for the newest."""
    told, now = [], time.time()
    for behind_s in (0, 86400, 3600, 86400):
        monkeypatch.setattr("time.time", lambda behind_s=behind_s: now - behind_s)
        monkeypatch.setattr("time.time_ns", lambda behind_s=behind_s: int(1e9 * (now - behind_s)))
        run = harness(resume_step=0)
        run.publish(0)
        told.append(
            run.client.call(
                m.RequestLeases(generator="g", count=1, wait_s=0.0), m.LeaseGrant
            ).announcement_number
        )
        run.close()
    assert sorted(set(told)) == told
