"""The journal: what is written is read back, by us and by stock readers, and a torn tail is cut wherever it is torn."""

import random
import shutil
from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pyarrow.dataset
import pytest

from buffers.events import Accepted, AnyEvent, Rejected
from buffers.event_log import read_events
from buffers.journal import Journal, read_groups
from buffers.segments import DamagedGroup
from buffers.trajectory import SCHEMA, Trajectory, encode, to_batch
from configs.schema import Durability


def group(number: int, num_tokens: int = 3) -> pa.RecordBatch:
    rows = [
        Trajectory(
            group=number, sample=i, due=0, prompt_id=number, task="t", tokens=list(range(num_tokens)),
            sampled=[j > 0 for j in range(num_tokens)], logprobs=[-0.5 * (j > 0) for j in range(num_tokens)],
            versions=[0 if j > 0 else -1 for j in range(num_tokens)], reward=float(i), rewards={"correct": float(i)},
            finish_reason="stop", generator="g", started_at=1.0, finished_at=2.0,
        )
        for i in range(2)
    ]  # fmt: skip
    return to_batch(rows)


def write(journal: Journal, number: int, num_tokens: int = 3) -> None:
    message = memoryview(encode(group(number, num_tokens))).cast("B")
    segment, offset, xxh3 = journal.append(message)
    journal.note(
        Accepted(number, number, 0, number, segment, offset, len(message), xxh3, 0, 2, 2 * num_tokens - 2, 0, 0, 0.5, 0.5, 0.0)
    )  # fmt: skip


def numbers(folder: Path) -> list[int]:
    found = list(read_groups(folder))
    assert all(batch.equals(group(batch["group"][0].as_py(), len(batch["tokens"][0]))) for batch in found)
    return [batch["group"][0].as_py() for batch in found]


@pytest.mark.parametrize("durability", Durability)
def test_a_journal_is_read_back_whole_across_segments_and_lives(tmp_path: Path, durability: Durability) -> None:
    for life in range(3):
        assert mend(tmp_path) == []
        journal = Journal(tmp_path, durability, segment_bytes=10_000)
        for number in range(life * 10, life * 10 + 10):
            write(journal, number)
            if number % 3 == 0:
                journal.commit()
        journal.note(Rejected(life, "zero_variance"))
        journal.close()
    assert numbers(tmp_path) == list(range(30))
    assert [event for event in read_events(tmp_path) if isinstance(event, Rejected)] == [
        Rejected(life, "zero_variance") for life in range(3)
    ]
    assert len(list(tmp_path.glob("*.arrow"))) > 3


def test_a_closed_segment_opens_with_pyarrow_polars_and_duckdb(tmp_path: Path) -> None:
    journal = Journal(tmp_path, Durability.os, segment_bytes=1 << 20)
    for number in range(5):
        write(journal, number, num_tokens=3 + number)
    journal.close()
    (path,) = tmp_path.glob("*.arrow")
    file = pa.ipc.open_file(str(path))
    assert file.schema == SCHEMA and file.num_record_batches == 5
    assert all(file.get_batch(number).equals(group(number, 3 + number)) for number in range(5)), "in any order"
    data = pyarrow.dataset.dataset(str(tmp_path), format="arrow", exclude_invalid_files=True)
    assert data.count_rows() == 10
    frame = polars.read_ipc(path)
    assert frame["group"].to_list() == [n for n in range(5) for _ in range(2)]
    assert frame["tokens"].list.len().to_list() == [3 + n for n in range(5) for _ in range(2)]
    total = duckdb.sql("SELECT count(*), sum(len(tokens)), avg(reward) FROM data").fetchall()[0]
    assert total == (10, 2 * sum(3 + n for n in range(5)), 0.5)


def test_an_empty_and_a_missing_journal_need_no_mending(tmp_path: Path) -> None:
    assert mend(tmp_path / "nowhere") == [] and list(read_events(tmp_path / "nowhere")) == []
    Journal(tmp_path, Durability.os, 1 << 20).close()
    assert mend(tmp_path) == [] and numbers(tmp_path) == []


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    journal = Journal(tmp_path, Durability.os, 1 << 20)
    with pytest.raises(ValueError, match="must have one writer, got"):
        Journal(tmp_path, Durability.os, 1 << 20)
    journal.close()
    Journal(tmp_path, Durability.os, 1 << 20).close()


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal as a SIGKILL leaves it: two closed segments, one open, no footer."""
    folder, copy = tmp_path_factory.mktemp("journal"), tmp_path_factory.mktemp("torn")
    journal = Journal(folder, Durability.os, segment_bytes=12_000)
    for number in range(18):
        write(journal, number)
        journal.commit()
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    journal.close()
    return copy


@pytest.mark.parametrize("seed", range(60))
def test_a_tail_torn_anywhere_is_cut_and_everything_before_it_is_kept(torn: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shutil.copytree(torn, tmp_path, dirs_exist_ok=True)
    segments = sorted(tmp_path.glob("*.arrow"))
    assert len(segments) == 3
    victim = rng.choice([segments[-1], tmp_path / "log.jsonl"])
    whole = victim.read_bytes()
    place = rng.randrange(len(whole))
    match rng.choice(["cut", "garbage", "bit", "zeros"]):
        case "cut":
            victim.write_bytes(whole[:place])
        case "garbage":
            victim.write_bytes(whole[:place] + rng.randbytes(500))
        case "bit":
            victim.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])
        case "zeros":
            victim.write_bytes(whole[:place] + bytes(len(whole) - place))
    safe = safe_groups(torn, victim.name, place)
    mend(tmp_path)
    kept = numbers(tmp_path)
    assert kept == list(range(len(kept))), "in order, without a gap, and every one as it was written"
    assert len(kept) >= safe, "what lies before the damage is kept"
    for path in tmp_path.glob("*.arrow"):
        assert pa.ipc.open_file(str(path)).num_record_batches > 0, "every segment is closed now"
    assert mend(tmp_path) == [], "once is enough"
    journal = Journal(tmp_path, Durability.os, 1 << 20)
    write(journal, len(kept))
    journal.close()
    assert numbers(tmp_path) == list(range(len(kept) + 1)), "the journal goes on"


def safe_groups(folder: Path, victim: str, place: int) -> int:
    """How many groups end before the damage."""
    accepted = [event for event in read_events(folder) if isinstance(event, Accepted)]
    if victim == "log.jsonl":
        return (folder / victim).read_bytes()[:place].count(b"\n")
    last = accepted[-1].segment
    return sum(event.segment < last or event.offset + event.size <= place for event in accepted)


def test_a_bit_that_rots_in_a_closed_segment_is_found_when_the_group_is_read(torn: Path, tmp_path: Path) -> None:
    shutil.copytree(torn, tmp_path, dirs_exist_ok=True)
    event = next(event for event in read_events(tmp_path) if isinstance(event, Accepted))
    path = tmp_path / "000000.arrow"
    data = bytearray(path.read_bytes())
    data[event.offset + event.size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedGroup, match="of .*000000.arrow must have checksum"):
        list(read_groups(tmp_path))


def test_every_event_survives_the_log() -> None:
    from buffers import events as e

    events: list[AnyEvent] = [
        e.Leased(1, 2, 3, "g", 4.0), e.Failed(1, 2, "x", 3.0, False), e.Duplicate(1, 2), e.Rejected(1, "failed", "x", 2, 3, 4.0),
        e.Opened(1, 2), e.Handed(1, [2], [0.5]), e.Retired([1]), e.Trained(0, [1], [2], [3], {0: 2}, [0.5], 1.0), e.Published(1, "w", 2.0),
        e.Scored(1, 0.5, 3, 4.0), e.Rewound(1), e.Checkpointed(2, 1), e.Dropped([0]),
        e.Accepted(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0.5, 0.1, 14.0, {12: 5, 13: 6}),
    ]  # fmt: skip
    assert {type(event) for event in events} == set(AnyEvent.__args__)
    assert [e.decode(e.encode(event)) for event in events] == events
