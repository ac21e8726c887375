"""A journal of schema 2: a run reads it, goes on from it and repairs it; its damage is still refused.

The columns of schema 2 are written down here once more, and journals are written as that version wrote them.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from buffer_harness import BufferHarness, make_group
from buffer_lives import LIFE_SETTINGS, copy_killed, flip_logprob, live_steps, lose_lines

from buffers import events as e
from buffers import intake, journal, segments
from buffers import messages as m
from buffers.buffer import Buffer
from buffers.client import TakenBatch
from buffers.event_log import read_events
from buffers.group_checks import CheckedMessage, ExpectedGroup, check_groups
from buffers.older_schemas import SCHEMA_2, read_stored_batch
from buffers.repair import repair_journal
from buffers.segments import DamagedGroup, Reader, SegmentHead, read_head, segment_path
from buffers.trajectory import SCHEMA, MalformedGroup, encode_batch, to_batch
from configs.load import load_config
from configs.schema import Config
from learners.packing import batch_from_arrow
from slipstream.replay import Recording

TEXT, NUMBER, TIME = pa.string(), pa.int64(), pa.float64()
COLUMNS_2: dict[str, pa.DataType] = {
    "group": NUMBER,
    "sample": NUMBER,
    "due": NUMBER,
    "prompt_id": NUMBER,
    "task": TEXT,
    "tokens": pa.list_(pa.int32()),
    "sampled": pa.list_(pa.bool_()),
    "logprobs": pa.list_(pa.float32()),
    "versions": pa.list_(pa.int32()),
    "reward": pa.float32(),
    "rewards": pa.map_(TEXT, pa.float32()),
    "finish_reason": TEXT,
    "generator": TEXT,
    "started_at": TIME,
    "finished_at": TIME,
    "extra": TEXT,
    "experts": pa.list_(pa.int16()),
}
FROZEN = pa.schema(
    [pa.field(name, kind, nullable=False) for name, kind in COLUMNS_2.items()],
    metadata={"slipstream.schema": "2"},
)
HEAD_2 = b"ARROW1\0\0" + FROZEN.serialize().to_pybytes()


def encode_old(batch: pa.RecordBatch) -> pa.Buffer:
    return pa.RecordBatch.from_arrays([batch.column(name) for name in COLUMNS_2], schema=FROZEN).serialize()


@contextmanager
def writing_schema_2() -> Iterator[None]:
    """Lets buffers write record batches, heads and footers as they were in schema 2."""

    def check_old(*arguments: object, **rules: object) -> CheckedMessage:
        return replace(check_groups(*arguments, **rules), is_storable=False)  # type: ignore[arg-type]

    def create_old(folder: Path, number: int) -> segments.Segment:
        made = segments.create_segment(folder, number)
        made.size = len(HEAD_2)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intake, "check_groups", check_old)
        patch.setattr(intake, "encode_batch", encode_old)
        patch.setattr(journal, "create_segment", create_old)
        patch.setattr(segments, "HEAD", HEAD_2)
        patch.setattr(segments, "SCHEMA", FROZEN)
        yield


@pytest.fixture
def config() -> Config:
    return load_config([*LIFE_SETTINGS, "buffer.durability=fsync"])


def write_old_journal(folder: Path, config: Config, *, killed: bool = False, tokens: int = 3) -> Path:
    """Steps 0 to 2 are trained from a journal of schema 2, which also holds the groups of steps 3."""
    with writing_schema_2():
        buffer = Buffer(config, folder / "made")
        live_steps(buffer, 0, 3, checkpoint_every=100, tokens=tokens)
        if killed:
            old = copy_killed(buffer, folder / "journal")
        buffer.close()
    return old if killed else (folder / "made").rename(folder / "journal")


def open_with_arrow(path: Path) -> pa.ipc.RecordBatchFileReader:
    return pa.ipc.open_file(str(path))


def test_the_frozen_columns_are_those_that_the_product_reads() -> None:
    assert SCHEMA_2.equals(FROZEN, check_metadata=True)


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_a_run_goes_on_from_a_journal_of_schema_2(tmp_path: Path, config: Config, killed: bool) -> None:
    folder = write_old_journal(tmp_path, config, killed=killed)
    bytes_before = segment_path(folder, 0).read_bytes()
    assert bytes_before.startswith(HEAD_2) and read_head(segment_path(folder, 0)).schema_version == 2
    life = Buffer(config, folder)
    assert life.progress.next_step == 3 and len(life.book.pool.groups) > 0
    live_steps(life, 3, 8, checkpoint_every=100)
    numbers = sorted(segments.segment_numbers(folder))
    life.close()
    heads = [read_head(segment_path(folder, number)).schema_version for number in numbers]
    assert heads == [2] + [3] * (len(numbers) - 1) and len(numbers) > 1
    assert segment_path(folder, 0).read_bytes().startswith(bytes_before)
    for number, schema in zip(numbers, [FROZEN] + [SCHEMA] * len(numbers), strict=False):
        opened = open_with_arrow(segment_path(folder, number))
        assert opened.schema.equals(schema, check_metadata=True)
        assert sum(opened.get_batch(i).num_rows for i in range(opened.num_record_batches)) > 0
    again = Buffer(config, folder)
    assert again.progress.next_step == 8
    again.close()


def test_the_rows_of_schema_2_have_the_columns_of_an_episode_of_one_turn(
    tmp_path: Path, config: Config
) -> None:
    folder = write_old_journal(tmp_path, config)
    reader = Reader(folder)
    accepted = [event for event in read_events(folder) if isinstance(event, e.Accepted)]
    assert len(accepted) == 12
    for event in accepted:
        rows = reader.read(event)
        assert rows.schema.equals(SCHEMA, check_metadata=True)
        rows.validate(full=True)
        assert rows.column("turn").to_pylist() == [[], []], "one turn"
        assert rows.column("branch").to_pylist() == [0, 0]
        assert rows.column("token_rewards").to_pylist() == [[], []]
        assert rows.column("stop").to_pylist() == ["completed"] * 2
        assert rows.column("renderer").to_pylist() == ["", ""]
        assert rows.column("group").to_pylist() == [event.group] * 2
        check_as_submitted(rows, event)


def check_as_submitted(rows: pa.RecordBatch, event: e.Accepted) -> None:
    """Asserts that upgraded rows keep all rules of a group that comes today."""
    wanted = ExpectedGroup(event.group, event.due, event.prompt, event.rows)
    data = encode_batch(pa.concat_batches([rows]))
    (facts,) = check_groups(data, [wanted], num_samples=2, newest_version=event.newest).verdicts
    assert not isinstance(facts, MalformedGroup), facts


def test_a_length_that_was_reached_becomes_the_end_of_the_episode() -> None:
    lease = m.Lease(
        id=1, split="train", task="t", index=0, seed=0, group=0, due=0, min_version=0, num_samples=3
    )
    rows = [
        replace(row, finish_reason=reason)
        for row, reason in zip(make_group(lease), ("stop", "length", "abort"), strict=True)
    ]
    upgraded = read_stored_batch(encode_old(to_batch(rows)))
    assert upgraded.column("stop").to_pylist() == ["completed", "max_tokens", "completed"]
    assert upgraded.equals(to_batch(rows))


@pytest.mark.parametrize("remote", [False, True], ids=["mapped", "fetched"])
def test_a_step_is_trained_from_groups_of_both_schemas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config, remote: bool
) -> None:
    with writing_schema_2():
        old = BufferHarness(config, tmp_path / "journal")
        old.publish(0)
        first, *_ = old.ask(1)
        assert old.submit(first) == "accepted"
        old.close()
    if remote:
        monkeypatch.setattr("buffers.client.is_on_this_host", lambda folder, mark: False)
    run = BufferHarness(config, tmp_path / "journal", 0)
    try:
        run.publish(0)
        for lease in run.ask(2):
            assert run.submit(lease) == "accepted"
        taken = run.client.take_batch(0, wait_s=1.0)
        assert isinstance(taken, TakenBatch) and first.group in taken.groups
        assert batch_from_arrow(taken.table).turns.tolist() == [-1, 0, 0] * 6  # type: ignore[union-attr]
        segments_used = {
            event.segment for event in read_events(tmp_path / "journal") if isinstance(event, e.Accepted)
        }
        assert {read_head(segment_path(tmp_path / "journal", n)).schema_version for n in segments_used} == {
            2,
            3,
        }
    finally:
        run.close()


def test_a_replay_takes_the_batches_of_a_journal_of_schema_2(tmp_path: Path, config: Config) -> None:
    recording = Recording(write_old_journal(tmp_path, config))
    for step in range(3):
        taken = recording.take_batch(step)
        assert taken.table.schema.equals(SCHEMA) and taken.table.num_rows == 6
        assert set(taken.table.column("stop").to_pylist()) == {"completed"}


def flip_head(folder: Path) -> None:
    path = segment_path(folder, 0)
    path.write_bytes(b"\0" * len(HEAD_2) + path.read_bytes()[len(HEAD_2) :])


@pytest.mark.parametrize("damage", [lambda folder: None, flip_head], ids=["whole", "without its head"])
def test_a_repair_finds_groups_of_schema_2_in_their_segment(
    tmp_path: Path, config: Config, damage: Callable[[Path], None]
) -> None:
    folder = write_old_journal(tmp_path, config, killed=True)
    damage(folder)
    for path in (folder / "state").glob("*"):
        path.unlink()
    lose_lines(folder, lambda event: isinstance(event, e.Accepted) and event.group in (1, 2))
    report = repair_journal(folder)
    assert sum("are well formed" in line for line in report.saved) == 2, report
    life = Buffer(config, folder)
    assert life.progress.next_step == 3
    live_steps(life, 3, 5, checkpoint_every=100)
    life.close()
    assert_holds_the_groups(segment_path(folder, 0))


def cut_segment(folder: Path) -> None:
    path = segment_path(folder, 0)
    path.write_bytes(path.read_bytes()[: len(HEAD_2) + 1000])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit of a group": lambda folder: flip_logprob(folder, 9),
    "the end is lost": cut_segment,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_a_journal_of_schema_2_is_refused_and_fresh_groups_take_the_place(
    tmp_path: Path, config: Config, name: str
) -> None:
    folder = write_old_journal(tmp_path, config, killed=True)
    DAMAGE[name](folder)
    event = next(x for x in read_events(folder) if isinstance(x, e.Accepted) and x.group == 9)
    with pytest.raises(DamagedGroup, match="must have checksum"):
        Reader(folder).read(event)
    life = Buffer(config, folder)
    assert life.book.ledger.groups["damaged"] >= 1
    live_steps(life, 3, 5, checkpoint_every=100)
    life.close()


def test_a_lost_head_is_written_again_and_costs_no_group(tmp_path: Path, config: Config) -> None:
    folder = write_old_journal(tmp_path, config, killed=True)
    flip_head(folder)
    assert read_head(segment_path(folder, 0)) == SegmentHead(2, len(HEAD_2), is_lost=True)
    life = Buffer(config, folder)
    assert life.book.ledger.groups["damaged"] == 0
    live_steps(life, 3, 5, checkpoint_every=100)
    life.close()
    assert_holds_the_groups(segment_path(folder, 0))


def assert_holds_the_groups(path: Path) -> None:
    """Asserts that any Arrow reader finds the 12 old groups in the segment."""
    opened = open_with_arrow(path)
    assert path.read_bytes().startswith(HEAD_2) and opened.schema.equals(FROZEN, check_metadata=True)
    groups = opened.read_all().column("group").to_pylist()
    assert sorted(set(groups)) == list(range(12)) and len(groups) == 24


@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_are_no_message_of_either_schema_are_refused(seed: int) -> None:
    rng = random.Random(seed)
    message = bytes(encode_old(to_batch([])))
    with pytest.raises(MalformedGroup, match="schema version 2 or 3"):
        read_stored_batch(pa.py_buffer(b""), validate=True)
    less = pa.RecordBatch.from_arrays([pa.array([1])], names=["group"]).serialize()
    with pytest.raises(MalformedGroup, match="schema version 2 or 3: .*buffers, got 2"):
        read_stored_batch(less)
    for _ in range(300):
        bad = bytearray(message)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        with suppress(MalformedGroup):
            read_stored_batch(pa.py_buffer(bytes(bad)), validate=True)
