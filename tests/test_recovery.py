"""A buffer that is opened again goes on where it was: after retention, rotation, damage, other settings
and a full disk."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from buffer_harness import BufferHarness, make_group
from buffer_lives import LIFE_SETTINGS, copy_killed, flip_logprob, live_steps, lose_lines, submit_group

from buffers import events as e
from buffers import journal as journal_module
from buffers import messages as m
from buffers.book_state import export_book
from buffers.buffer import Buffer
from buffers.client import RefusedByBuffer, TakenBatch
from buffers.event_log import DamagedLog, read_events
from buffers.files import replace_file
from buffers.repair import repair_journal
from buffers.state import read_newest_state
from buffers.trajectory import SCHEMA_VERSION, encode_batch, to_batch
from configs.disk import DiskFull
from configs.load import load_config
from configs.schema import Config
from configs.staleness import OnLate


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(LIFE_SETTINGS)


@pytest.mark.parametrize("dies", [False, True], ids=["closed", "killed"])
def test_retention_and_any_number_of_restarts_lose_no_group(
    tmp_path: Path, config: Config, dies: bool
) -> None:
    folder, step = tmp_path / "journal", 0
    dropping = load_config([*LIFE_SETTINGS, "buffer.retention=checkpoints"])
    for life in range(4):
        buffer = Buffer(dropping, folder, resume_step=step if life else None)
        assert buffer.progress.next_step == step and (life == 0 or len(buffer.book.pool.groups) == 3)
        live_steps(buffer, step, step + 8, tokens=40_000)
        step += 8
        before = export_book(buffer.book)
        if dies:
            folder = copy_killed(buffer, tmp_path / f"killed-{life}")
        buffer.close()
        again = Buffer(dropping, folder)
        after = export_book(again.book)
        assert (after.groups, after.next_step, after.ledger) == (
            before.groups,
            before.next_step,
            before.ledger,
        )
        again.close()
    assert {path.stem for path in folder.glob("*.arrow")} != set() and not (folder / "000000.arrow").exists()
    assert not (folder / "log/000000.jsonl").exists(), "of the log too, only what recovery may need is kept"


def test_a_state_and_the_tail_lead_to_what_the_whole_log_leads_to(tmp_path: Path, config: Config) -> None:
    buffer = Buffer(config, tmp_path / "journal")
    live_steps(buffer, 0, 7, keep=2)
    for lease in [buffer.lease_next("h"), buffer.lease_next("h")]:
        assert lease is None or buffer.fail_lease(lease.id, 4, "ValueError: no")
    buffer.commit()
    folder = copy_killed(buffer, tmp_path / "killed")
    buffer.close()
    shutil.copytree(folder, tmp_path / "log_alone")
    shutil.rmtree(tmp_path / "log_alone/state")
    assert read_newest_state(folder)[0] > 1
    one, other = Buffer(config, folder), Buffer(config, tmp_path / "log_alone")
    assert export_book(one.book) == export_book(other.book)
    one.close()
    other.close()


def test_the_log_rotates_by_itself_and_recovery_reads_only_the_tail(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "ROTATE_LINES", 50)
    buffer = Buffer(config, tmp_path / "journal")
    live_steps(buffer, 0, 40, checkpoint_every=10)
    folder = copy_killed(buffer, tmp_path / "killed")
    buffer.close()
    number, state = read_newest_state(folder)
    assert number > 5 and state is not None and len(state.book.groups) < 20
    tail = sum(
        path.read_bytes().count(b"\n")
        for path in (folder / "log").glob("*.jsonl")
        if int(path.stem) >= number
    )
    assert tail < 150 < sum(1 for _ in read_events(folder)), "the history is there, and is not read"
    again = Buffer(config, folder)
    assert again.progress.next_step == 40 and again.book.ledger.closes()
    live_steps(again, 40, 42)
    again.close()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ("learner.groups_per_step=4", "learner.groups_per_step must stay 3 .*, got 4"),
        ("learner.samples_per_prompt=3", "learner.samples_per_prompt must stay 2 .*, got 3"),
        ("run.seed=5", "run.seed must stay 0 .*, got 5"),
        ("task.size=50", "task.size must stay None .*, got 50"),
        ("buffer.max_uses=3", "buffer.max_uses must stay 1 .*, got 3"),
        ("staleness.on_late=mask", "staleness.on_late must stay wait .*, got mask"),
        ("staleness.max_versions=0", "staleness.max_versions must be at least 1 .*, got 0"),
    ],
)
def test_settings_that_the_journal_rests_on_are_refused_by_name_and_nothing_is_touched(
    tmp_path: Path, config: Config, change: str, rule: str
) -> None:
    buffer = Buffer(config, tmp_path / "journal")
    live_steps(buffer, 0, 3)
    buffer.close()
    before = {path: path.read_bytes() for path in (tmp_path / "journal").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=rule):
        Buffer(load_config([*LIFE_SETTINGS, change]), tmp_path / "journal")
    assert before == {path: path.read_bytes() for path in (tmp_path / "journal").rglob("*") if path.is_file()}
    Buffer(config, tmp_path / "journal").close()


@pytest.mark.parametrize("attempts", [1, 2, 9])
def test_attempts_count_as_they_did_when_they_were_made_whatever_the_limit_is_now(
    tmp_path: Path, config: Config, attempts: int
) -> None:
    buffer = Buffer(load_config([*LIFE_SETTINGS, "buffer.max_attempts=3"]), tmp_path / "journal")
    buffer.progress.publish_version(0, "w")
    first = buffer.lease_next("g")
    assert first is not None
    for _ in range(2):
        assert first is not None and buffer.fail_lease(first.id, 5, "ValueError: no") == "failed"
        first = buffer.lease_next("g")
    buffer.commit()
    folder = copy_killed(buffer, tmp_path / "killed")
    buffer.close()
    shutil.rmtree(folder / "state")  # the whole log is applied again
    again = Buffer(load_config([*LIFE_SETTINGS, f"buffer.max_attempts={attempts}"]), folder)
    assert first is not None and again.book.list_groups()[first.group].num_failures == 2
    assert again.fail_lease(first.id, 5, "ValueError: no") == "failed"
    assert (first.group in again.book.list_groups()) == (attempts > 3), "from now on the new limit holds"
    live_steps(again, 0, 0)
    assert again.book.ledger.closes()
    again.close()


def test_more_steps_and_a_higher_bound_are_taken_up(tmp_path: Path, config: Config) -> None:
    buffer = Buffer(load_config([*LIFE_SETTINGS, "run.steps=3"]), tmp_path / "journal")
    live_steps(buffer, 0, 3)
    buffer.close()
    again = Buffer(load_config([*LIFE_SETTINGS, "staleness.max_versions=3"]), tmp_path / "journal")
    live_steps(again, 3, 9)
    assert again.book.ledger.closes()
    again.close()


# ---- damage


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Callable[..., BufferHarness]]:
    running: list[BufferHarness] = []

    def start(*overrides: str, resume_step: int | None = None) -> BufferHarness:
        running.append(
            BufferHarness(load_config([*LIFE_SETTINGS, *overrides]), tmp_path / "journal", resume_step)
        )
        return running[-1]

    yield start
    for one in running:
        one.close()


@pytest.mark.parametrize("remote", [False, True], ids=["mapped", "fetched"])
@pytest.mark.parametrize("on_late", [OnLate.wait, OnLate.mask])
def test_a_group_whose_bytes_have_changed_is_never_delivered_and_a_fresh_one_takes_its_place(
    harness: Callable[..., BufferHarness],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    remote: bool,
    on_late: OnLate,
) -> None:
    if remote:
        monkeypatch.setattr("buffers.client.is_on_this_host", lambda folder, mark: False)
    run = harness(f"staleness.on_late={on_late}")
    run.publish(0)
    leases = run.ask(3)
    assert [run.submit(lease) for lease in leases] == ["accepted"] * 3
    flip_logprob(tmp_path / "journal", 1)
    told = run.client.take_batch(0, wait_s=1.0)
    assert (
        isinstance(told, m.NotReadyYet) and "1 fresh groups in the place of damaged ones" in told.waiting_for
    )
    assert isinstance(run.client.take_batch(0, wait_s=0.1), m.NotReadyYet), "the step waits for the fresh one"
    (fresh,) = run.ask(1)
    assert (fresh.group, fresh.due) == (
        3 if fresh.group == 3 else fresh.group,
        0 if on_late is OnLate.wait else fresh.due,
    )
    assert run.submit(fresh) == "accepted"
    taken = run.client.take_batch(0, wait_s=1.0)
    assert isinstance(taken, TakenBatch) and taken.groups == [0, 2, fresh.group]
    assert set(taken.table.column("logprobs").combine_chunks().flatten().to_pylist()) == {0.0, -0.5, -1.0}
    done = m.ReportTrainedStep(step=0, num_trained=12, idle_s=0, alive_s=1, metrics={})
    run.client.call(done, m.Acknowledged)
    status = run.status()
    assert status.groups.rejected["damaged"] == 1 and status.tokens.rejected["damaged"] == 4
    assert status.groups.trained == 3 and status.trained_twice == 0


def test_a_claim_of_damage_that_is_not_true_changes_nothing(harness: Callable[..., BufferHarness]) -> None:
    run = harness()
    run.publish(0)
    assert [run.submit(lease) for lease in run.ask(3)] == ["accepted"] * 3
    assert run.client.call(m.ReportDamagedGroups(groups=[0, 1, 2, 99, 2**50]), m.ReplacedGroups).count == 0
    assert run.train(0) == [0, 1, 2]


def test_damage_to_a_step_that_was_undone_is_mended_by_fresh_groups(
    harness: Callable[..., BufferHarness], tmp_path: Path
) -> None:
    run = harness()
    for step in range(2):
        run.publish(step)
        assert {run.submit(lease) for lease in run.ask(100)} == {"accepted"}
        run.train(step)
    run.publish(2)
    run.client.call(m.RewindToStep(step=1), m.Acknowledged)
    flip_logprob(tmp_path / "journal", 4)
    run.client.call(m.PublishVersion(version=1, manifest_locator="again"), m.Acknowledged)
    assert isinstance(run.client.take_batch(1, wait_s=0.2), m.NotReadyYet)
    fresh = [lease for lease in run.ask(100) if lease.due == 1]
    assert len(fresh) == 1
    # Whoever still holds version 2, of the life before, may not make a group for step 1.
    late = encode_batch(to_batch(make_group(fresh[0], version=2)))
    assert run.submit(fresh[0], late) == "failed"
    (fresh_again,) = [lease for lease in run.ask(100) if lease.due == 1]
    assert run.submit(fresh_again, encode_batch(to_batch(make_group(fresh_again, version=1)))) == "accepted"
    assert run.train(1) == [3, 5, fresh_again.group]


def test_a_large_batch_comes_in_parts_and_others_are_answered_between_them(
    harness: Callable[..., BufferHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffers.client.is_on_this_host", lambda folder, mark: False)
    monkeypatch.setattr(m, "MAX_PART_BYTES", 1000)
    run = harness()
    run.publish(0)
    for lease in run.ask(3):
        long = {
            "tokens": [7] * 5001,
            "sampled": [False] + [True] * 5000,
            "logprobs": [0.0] + [-0.25] * 5000,
            "versions": [-1] + [0] * 5000,
        }
        rows = to_batch(make_group(lease, **long))
        assert run.submit(lease, encode_batch(rows)) == "accepted"
    asked: list[int] = []
    read_part = run.server.buffer.progress.read_part

    def note_part(request: m.ReadBatchPart) -> bytes:
        asked.append(request.size)
        return read_part(request)

    monkeypatch.setattr(run.server.buffer.progress, "read_part", note_part)
    taken = run.client.take_batch(0, wait_s=1.0)
    assert isinstance(taken, TakenBatch) and taken.table.num_rows == 6
    assert len(asked) > 300 and max(asked) <= 1000
    assert taken.table.column("tokens").combine_chunks().flatten().to_pylist() == [7] * 30_006


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("on_late", ["wait", "mask"])
def test_a_log_with_a_rotten_line_refuses_to_open_is_repaired_and_the_run_goes_on(
    tmp_path: Path, seed: int, on_late: str
) -> None:
    rng = random.Random(seed)
    config = load_config([*LIFE_SETTINGS, f"staleness.on_late={on_late}"])
    buffer = Buffer(config, tmp_path / "journal")
    live_steps(buffer, 0, rng.randrange(1, 5), checkpoint_every=100)
    step = buffer.progress.next_step
    acknowledged = set(buffer.book.list_groups())
    folder = copy_killed(buffer, tmp_path / "killed")
    buffer.close()
    path = folder / "log/000000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for victim in {rng.randrange(1, len(lines) - 1) for _ in range(rng.randint(1, 3))}:
        line = bytearray(lines[victim])
        line[rng.randrange(len(line) - 1)] ^= 1 << rng.randrange(8)
        lines[victim] = bytes(line)
    path.write_bytes(b"".join(lines))
    with pytest.raises(DamagedLog, match="repair.sh"):
        Buffer(config, folder)
    report = repair_journal(folder)
    assert report.damage and report.step <= step
    assert (folder / "log/000000.jsonl.damaged").read_bytes() == b"".join(lines), (
        "what was damaged stays beside"
    )
    shutil.copytree(folder, tmp_path / "log_alone")
    shutil.rmtree(tmp_path / "log_alone/state")
    again, other = Buffer(config, folder), Buffer(config, tmp_path / "log_alone")
    assert export_book(again.book) == export_book(other.book), "the mended log tells what the repair has done"
    other.close()
    assert again.book.ledger.closes() and again.progress.next_step == report.step
    kept = set(again.book.list_groups()) | {
        g
        for step_trained in again.book.history.trained.values()
        for g in [use.number for use in step_trained.uses]
    }
    lost = acknowledged - kept
    assert lost <= report.lost_groups, "what is lost is listed"
    again.progress.rewind_to(0)
    live_steps(again, 0, step + 4, checkpoint_every=100)
    assert again.book.ledger.closes() and again.progress.next_step == step + 4, (
        "no step waits for a group that is lost"
    )
    again.close()
    assert repair_journal(folder).damage == [], "once is enough"


@pytest.mark.parametrize("written", [0, 1])
def test_a_repair_that_is_killed_leaves_a_journal_that_opens_or_is_repaired_again(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    monkeypatch.setattr(journal_module, "ROTATE_LINES", 30)
    buffer = Buffer(config, tmp_path / "journal")
    live_steps(buffer, 0, 6, checkpoint_every=100)
    folder = copy_killed(buffer, tmp_path / "killed")
    buffer.close()
    shutil.rmtree(folder / "state")
    for path in sorted((folder / "log").iterdir())[:2]:
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*lines[:4], b"#" + lines[4][1:], *lines[5:]]))
    replaced: list[Path] = []

    def replace_some(path: Path, data: bytes) -> None:
        if len(replaced) == written:
            raise KeyboardInterrupt
        replaced.append(path)
        replace_file(path, data)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("buffers.repair.replace_file", replace_some)
        repair_journal(folder)
    again = Buffer(config, folder)
    assert again.book.ledger.closes()
    again.progress.rewind_to(0)
    live_steps(again, 0, 9, checkpoint_every=100)
    again.close()


def test_a_torn_segment_costs_the_groups_in_it_and_no_other(tmp_path: Path, config: Config) -> None:
    """Power was lost: the log is there, a part of what it names is not."""
    buffer = Buffer(config, tmp_path / "journal")
    buffer.progress.publish_version(0, "w")
    leases = [lease for _ in range(6) if (lease := buffer.lease_next("g")) is not None]
    assert [submit_group(buffer, lease, 0) for lease in leases] == ["accepted"] * 6
    buffer.commit()
    folder = copy_killed(buffer, tmp_path / "killed")
    buffer.close()
    accepted = [x for x in read_events(folder) if isinstance(x, e.Accepted)]
    data = bytearray((folder / "000000.arrow").read_bytes())
    data[accepted[2].offset : accepted[2].offset + 400] = bytes(400)
    (folder / "000000.arrow").write_bytes(data[: accepted[5].offset + 100])
    again = Buffer(config, folder)
    assert sorted(again.book.pool.groups) == [0, 1, 3, 4] and again.book.ledger.closes()
    assert again.book.ledger.groups["damaged"] == 2
    assert sorted(lease.due for _ in range(6) if (lease := again.lease_next("g")) is not None) == [0, 1]
    again.close()


# ---- a full disk


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_full_disk_is_named_and_the_run_goes_on_after_room_is_made(
    small_disk: Path, durability: str
) -> None:
    config = load_config([*LIFE_SETTINGS, f"buffer.durability={durability}"])
    buffer = Buffer(config, small_disk / "journal")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1 << 19))
    acknowledged: list[int] = []
    step = 0
    with pytest.raises(
        DiskFull,
        match=rf"the disk of {small_disk}.* must have room for [\d,]+ bytes more, got [\d,]+ bytes free",
    ):
        for step in range(1000):
            buffer.progress.publish_version(step, f"w{step}")
            while (lease := buffer.lease_next("g")) is not None:
                submit_group(buffer, lease, step, num_tokens=2000)
                buffer.commit()
                acknowledged.append(lease.group)
            train_step(buffer, step)
    buffer.close()
    ballast.unlink()
    again = Buffer(config, small_disk / "journal")
    known = {x.group for x in read_events(small_disk / "journal") if isinstance(x, e.Accepted)}
    assert len(acknowledged) > 10 and set(acknowledged) <= known
    assert again.book.ledger.closes() and again.progress.next_step >= step
    live_steps(again, again.progress.next_step, again.progress.next_step + 2)
    again.close()


def train_step(buffer: Buffer, step: int) -> None:
    handout = buffer.progress.hand_out(step)
    assert handout is not None
    trained = sum(buffer.book.pool.get_content(group).tokens for group in handout.groups)
    buffer.progress.finish_step(
        m.ReportTrainedStep(step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={})
    )
    buffer.commit()


def test_a_step_beyond_those_trained_is_no_checkpoint(harness: Callable[..., BufferHarness]) -> None:
    run = harness()
    run.publish(0)
    for step, oldest in ((1, 0), (2**62, 2**62), (0, 1), (5, 2**40)):
        with pytest.raises(RefusedByBuffer):
            run.client.call(m.ReportCheckpoint(step=step, oldest=oldest), m.Acknowledged)
    assert run.status().num_trained_steps == 0, "the buffer answers still"


@pytest.mark.parametrize("place", ["create_segment", "open_log", "lock"])
def test_a_file_system_without_room_for_another_file_is_named(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    opened, written = os.open, os.pwrite

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_if_room(path: Path, flags: int, *args: int) -> int:
        suffix = {"create_segment": ".arrow", "open_log": ".jsonl"}.get(place, "none")
        return full() if flags & os.O_CREAT and str(path).endswith(suffix) else opened(path, flags, *args)

    monkeypatch.setattr(os, "open", open_if_room)
    monkeypatch.setattr(os, "pwrite", full if place == "lock" else written)
    with pytest.raises(DiskFull, match="must have room"):
        live_steps(Buffer(config, tmp_path / "journal"), 0, 1)


@pytest.mark.parametrize("sampler", ["freshest", "prioritized"])
def test_another_sampler_leaves_no_group_beyond_the_bound_to_be_trained(tmp_path: Path, sampler: str) -> None:
    wide = [*LIFE_SETTINGS, "staleness.max_versions=3"]
    buffer = Buffer(load_config([*wide, f"buffer.sampler={sampler}"]), tmp_path / "journal")
    live_steps(buffer, 0, 3)
    buffer.close()
    again = Buffer(load_config(wide), tmp_path / "journal")
    for step in range(3, 12):
        again.progress.publish_version(step, f"w{step}")
        handout = None
        while handout is None:
            while (lease := again.lease_next("g")) is not None:
                submit_group(again, lease, step)
            handout = again.progress.hand_out(step)
        assert all(again.book.pool.get_content(group).oldest >= step - 3 for group in handout.groups)
        trained = sum(again.book.pool.get_content(group).tokens for group in handout.groups)
        again.progress.finish_step(
            m.ReportTrainedStep(step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={})
        )
    assert again.book.ledger.closes() and not again.book.ledger.tokens["late"]
    again.close()


# ---- repair


def killed(tmp_path: Path, config: Config, steps: int = 3) -> Path:
    buffer = Buffer(config, tmp_path / "journal")
    live_steps(buffer, 0, steps, checkpoint_every=100)
    folder = copy_killed(buffer, tmp_path / "killed")
    buffer.close()
    return folder


def test_a_repair_closes_the_segment_that_was_being_written(tmp_path: Path, config: Config) -> None:
    folder = killed(tmp_path, config)
    lose_lines(folder, lambda event: isinstance(event, e.Leased) and event.group == 2)
    repair_journal(folder)
    Buffer(config, folder).close()
    assert pa.ipc.open_file(str(folder / "000000.arrow")).num_record_batches == 12


def test_a_repair_names_a_first_file_that_is_missing(tmp_path: Path, config: Config) -> None:
    buffer = Buffer(config, tmp_path / "journal")
    live_steps(buffer, 0, 3)
    buffer.close()
    folder = tmp_path / "journal"
    for path in (folder / "state").glob("*"):
        path.unlink()
    (folder / "log/000000.jsonl").unlink()
    with pytest.raises(DamagedLog, match="the file is missing"):
        Buffer(config, folder)
    report = repair_journal(folder)
    assert "000000.jsonl is missing" in report.damage[0]
    again = Buffer(config, folder)
    again.progress.rewind_to(again.book.history.oldest_checkpoint)
    live_steps(again, again.progress.next_step, again.progress.next_step + 4)
    again.close()


def test_whatever_a_repair_changes_stays_beside_also_the_second_time(tmp_path: Path, config: Config) -> None:
    folder = killed(tmp_path, config)
    shutil.rmtree(folder / "state")
    versions = []
    for group in (1, 2):

        def is_lease(event: e.AnyEvent, group: int = group) -> bool:
            return isinstance(event, e.Leased) and event.group == group

        lose_lines(folder, is_lease)
        versions.append((folder / "log/000000.jsonl").read_bytes())
        assert repair_journal(folder).damage
        shutil.rmtree(folder / "state")
    kept = {path.read_bytes() for path in (folder / "log").glob("*.damaged*")}
    assert set(versions) <= kept


def test_no_step_waits_after_a_repair_for_groups_whose_due_steps_are_lost(tmp_path: Path) -> None:
    config = load_config([*LIFE_SETTINGS, "algo.dynamic_sampling=true", "buffer.durability=fsync"])
    buffer = Buffer(config, tmp_path / "journal")
    buffer.progress.publish_version(0, "w")
    leases = [lease for _ in range(6) if (lease := buffer.lease_next("g")) is not None]
    for lease in leases[2:3] + leases[4:] + leases[3:4] + leases[:2]:
        spread = [
            replace(row, reward=float(i * (lease.group != 2))) for i, row in enumerate(make_group(lease))
        ]
        data = memoryview(encode_batch(to_batch(spread))).cast("B")
        assert (
            buffer.intake.submit_groups("g", [lease.id], [lease.num_samples], SCHEMA_VERSION, data)[0]
            == ["accepted", "zero_variance"][lease.group == 2]
        )
    fresh = buffer.lease_next("g")
    assert fresh is not None and fresh.due == 0
    data = memoryview(
        encode_batch(to_batch([replace(row, reward=float(i)) for i, row in enumerate(make_group(fresh))]))
    ).cast("B")
    buffer.intake.submit_groups("g", [fresh.id], [fresh.num_samples], SCHEMA_VERSION, data)
    for step in range(2):
        if step:
            buffer.progress.publish_version(step, f"w{step}")
        train_step(buffer, step)
    folder = copy_killed(buffer, tmp_path / "killed")
    buffer.close()
    lose_lines(folder, lambda event: isinstance(event, e.Leased) and event.group in (2, 3, 4, 5))
    repair_journal(folder)
    again = Buffer(load_config([*LIFE_SETTINGS, "buffer.durability=fsync"]), folder)
    again.progress.rewind_to(again.progress.next_step)
    live_steps(again, again.progress.next_step, 6, checkpoint_every=100)
    again.close()


def test_a_duplicate_whose_cause_is_lost_does_not_hold_its_group_for_ever(tmp_path: Path) -> None:
    config = load_config([*LIFE_SETTINGS, "staleness.on_late=cancel", "staleness.straggler_timeout_s=1.0"])
    now = 0.0
    buffer = Buffer(config, tmp_path / "journal", clock=lambda: now)
    buffer.progress.publish_version(0, "w")
    leases = [lease for _ in range(6) if (lease := buffer.lease_next("g")) is not None]
    for lease in leases[1:]:
        submit_group(buffer, lease, 0)
    assert buffer.progress.hand_out(0) is None
    now = 2.0
    buffer.check_time()
    assert submit_group(buffer, leases[0], 0) == "duplicate"
    buffer.commit()
    folder = copy_killed(buffer, tmp_path / "killed")
    buffer.close()
    lose_lines(folder, lambda event: isinstance(event, e.Rejected))
    repair_journal(folder)
    again = Buffer(config, folder, clock=lambda: now)
    again.progress.rewind_to(0)
    live_steps(again, 0, 2, checkpoint_every=100)
    again.close()


def test_a_repaired_log_has_a_hand_out_before_every_step_that_it_says_was_trained(
    tmp_path: Path, config: Config
) -> None:
    buffer = Buffer(config, tmp_path / "journal")
    live_steps(buffer, 0, 3, checkpoint_every=100)
    folder = copy_killed(buffer, tmp_path / "killed")
    buffer.close()
    path = folder / "log/000000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    victim = next(n for n, line in enumerate(lines) if b'"type":"Handed","step":1' in line)
    path.write_bytes(b"".join([*lines[:victim], b"#" + lines[victim][1:], *lines[victim + 1 :]]))
    assert repair_journal(folder).step == 3
    told = [event for event in read_events(folder) if isinstance(event, e.Handed | e.Trained)]
    assert [(type(event), event.step) for event in told[:6]] == [
        (k, n) for n in range(3) for k in (e.Handed, e.Trained)
    ]


def test_lives_that_end_early_do_not_pile_up_states(tmp_path: Path, config: Config) -> None:
    folder = tmp_path / "life-0"
    Buffer(config, folder).close()
    for life in range(1, 25):
        buffer = Buffer(config, folder)
        folder = copy_killed(buffer, tmp_path / f"life-{life}")
        buffer.journal.close()
        assert len(list((folder / "state").iterdir())) <= 9
    Buffer(config, folder).close()
