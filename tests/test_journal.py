"""The journal: what is written is read back, by us and by stock readers; torn tails are set aside, damage
is named."""

import random
import shutil
import threading
from functools import lru_cache
from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pyarrow.dataset
import pytest

from buffers import journal as journal_module
from buffers.book import Book
from buffers.book_state import export_book
from buffers.event_log import DamagedLog, read_events
from buffers.events import Accepted, AnyEvent, Began, Rejected, Synced
from buffers.journal import Journal, read_groups
from buffers.recovery import read_journal
from buffers.segments import DamagedGroup
from buffers.state import State
from buffers.terms import Terms, make_terms, record_terms
from buffers.trajectory import SCHEMA, Trajectory, encode_batch, to_batch
from configs.buffer import Durability
from configs.load import load_config


def group(number: int, num_tokens: int = 3) -> pa.RecordBatch:
    rows = [
        Trajectory(
            group=number,
            sample=i,
            due=0,
            prompt_id=number,
            task="t",
            tokens=list(range(num_tokens)),
            sampled=[j > 0 for j in range(num_tokens)],
            logprobs=[-0.5 * (j > 0) for j in range(num_tokens)],
            versions=[0 if j > 0 else -1 for j in range(num_tokens)],
            reward=float(i),
            rewards={"correct": float(i)},
            finish_reason="stop",
            generator="g",
            started_at=1.0,
            finished_at=2.0,
        )
        for i in range(2)
    ]
    return to_batch(rows)


def write(journal: Journal, number: int, num_tokens: int = 3) -> None:
    message = memoryview(encode_batch(group(number, num_tokens))).cast("B")
    segment, offset, xxh3 = journal.append_batch(message)
    journal.note_event(
        Accepted(
            number,
            number,
            0,
            number,
            segment,
            offset,
            len(message),
            xxh3,
            0,
            2,
            2 * num_tokens - 2,
            0,
            0,
            0.5,
            0.5,
            0.0,
        )
    )


def open_journal(
    folder: Path, durability: Durability = Durability.os, segment_bytes: int = 1 << 20
) -> tuple[Journal, list[str]]:
    """The journal, ready to be written; and what recovery has set aside."""
    journal = Journal(folder, durability, segment_bytes)
    try:
        return journal, journal.begin(journal.recover(), empty_state())
    except BaseException:
        journal.close()
        raise


@lru_cache
def default_terms() -> Terms:
    return make_terms(load_config([]))


def empty_state() -> State:
    terms = default_terms()
    book = export_book(Book(terms))
    return State(
        terms=record_terms(terms),
        book=book,
        manifest_locator="",
        unevaluated=[],
        next_segment=0,
        open_segment=None,
    )


def forget_states(folder: Path) -> None:
    """Leaves the log alone, as when every state is damaged."""
    for path in (folder / "state").glob("*"):
        path.unlink()


def numbers(folder: Path) -> list[int]:
    found = list(read_groups(folder))
    assert all(batch.equals(group(batch["group"][0].as_py(), len(batch["tokens"][0]))) for batch in found)
    return [batch["group"][0].as_py() for batch in found]


def events(folder: Path) -> list[AnyEvent]:
    """Returns the events of the log without its own marks."""
    return [event for event in read_events(folder) if not isinstance(event, Began | Synced)]


@pytest.mark.parametrize("durability", Durability)
def test_a_journal_is_read_back_whole_across_segments_rotations_and_lives(
    tmp_path: Path, durability: Durability
) -> None:
    for life in range(3):
        journal, told = open_journal(tmp_path, durability, segment_bytes=10_000)
        assert told == []
        for number in range(life * 10, life * 10 + 10):
            write(journal, number)
            if number % 3 == 0:
                journal.commit()
                journal.rotate(empty_state(), keep_logs=True)
        journal.note_event(Rejected(life, "zero_variance"))
        journal.close()
    assert numbers(tmp_path) == list(range(30))
    assert [event for event in events(tmp_path) if isinstance(event, Rejected)] == [
        Rejected(life, "zero_variance") for life in range(3)
    ]
    assert len(list(tmp_path.glob("*.arrow"))) > 3 and len(list((tmp_path / "log").iterdir())) > 9
    assert len(list((tmp_path / "state").glob("*.state"))) <= 3, "old states go"


def test_a_closed_segment_opens_with_pyarrow_polars_and_duckdb(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    for number in range(5):
        write(journal, number, num_tokens=3 + number)
    journal.close()
    check_with_stock_readers(tmp_path)


def check_with_stock_readers(folder: Path) -> None:
    """One segment of five groups, 0 to 4."""
    (path,) = folder.glob("*.arrow")
    file = pa.ipc.open_file(str(path))
    assert file.schema == SCHEMA and file.num_record_batches == 5
    assert all(file.get_batch(number).equals(group(number, 3 + number)) for number in range(5)), (
        "in any order"
    )
    data = pyarrow.dataset.dataset(str(folder), format="arrow", exclude_invalid_files=True)
    assert data.count_rows() == 10
    frame = polars.read_ipc(path)
    assert frame["group"].to_list() == [n for n in range(5) for _ in range(2)]
    assert frame["tokens"].list.len().to_list() == [3 + n for n in range(5) for _ in range(2)]
    total = duckdb.sql("SELECT count(*), sum(len(tokens)), avg(reward) FROM data").fetchall()[0]
    assert total == (10, 2 * sum(3 + n for n in range(5)), 0.5)


def test_a_segment_that_a_crash_left_open_is_closed_with_what_earlier_logs_say_of_it(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path / "living")
    for number in range(3):
        write(journal, number, num_tokens=3 + number)
    journal.commit()
    journal.rotate(empty_state(), keep_logs=False)
    for number in range(3, 5):
        write(journal, number, num_tokens=3 + number)
    journal.commit()
    while not list((tmp_path / "living/state").glob("000001.state")):
        pass
    shutil.copytree(tmp_path / "living", tmp_path / "dead")
    journal.close()
    with open(tmp_path / "dead/000000.arrow", "ab") as file:
        file.write(b"torn" * 1000)
    _, told = open_journal(tmp_path / "dead")
    assert len(told) == 1 and "the last 4000 bytes of 000000.arrow (kept as 000000.arrow.cut-" in told[0]
    check_with_stock_readers(tmp_path / "dead")


def test_opening_changes_nothing_before_it_begins(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path / "j")
    write(journal, 0)
    journal.commit()
    shutil.copytree(tmp_path / "j", tmp_path / "dead")
    journal.close()
    with open(tmp_path / "dead/000000.arrow", "ab") as file:
        file.write(b"torn")
    with open(tmp_path / "dead/log/000000.jsonl", "ab") as file:
        file.write(b"torn")
    before = contents(tmp_path / "dead")
    for _ in range(2):  # a recovery that was killed before it was done, and then another
        dying = Journal(tmp_path / "dead", Durability.os, 1 << 20)
        dying.recover()
        dying.close()
    assert contents(tmp_path / "dead") == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_opener_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    write(journal, 0)
    journal.commit()
    # As a commit under way leaves it: a line and a record batch half-written, by the process that has the
    # lock.
    with open(tmp_path / "log/000000.jsonl", "ab") as log, open(tmp_path / "000000.arrow", "ab") as segment:
        log.write(b'{"type":"Lea')
        segment.write(b"half a record batch")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="must have one writer, got .*, which another process writes"):
        open_journal(tmp_path)
    assert contents(tmp_path) == before, "a byte changed under the process that writes it"
    journal.close()


def test_an_empty_journal_needs_nothing(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "nowhere")) == []
    for _ in range(2):
        journal, told = open_journal(tmp_path)
        assert told == [] and numbers(tmp_path) == []
        journal.close()


def test_what_users_keep_beside_the_journals_files_is_theirs(tmp_path: Path) -> None:
    """A run that lives looks into its folders as well, where retention wants to know what is there."""
    journal, _ = open_journal(tmp_path)
    write(journal, 0)
    theirs = [
        tmp_path / name
        for name in ("best.arrow", "000000 (copy).arrow", "log/notes.jsonl", "state/old.state")
    ]
    for path in theirs:
        path.write_text("theirs")
    assert journal.closed_segments() == set()
    journal.close()
    journal, told = open_journal(tmp_path)
    journal.close()
    assert told == [] and numbers(tmp_path) == [0]
    assert [path.read_text() for path in theirs] == ["theirs"] * 4


def test_a_journal_of_an_older_version_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match="must be of this version of Slipstream, got an older one in"):
        open_journal(tmp_path)


@pytest.fixture(scope="module", params=["os", "fsync"])
def torn(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A journal as a SIGKILL leaves it: two closed segments and an open one, the log in two files."""
    folder, copy = tmp_path_factory.mktemp("journal"), tmp_path_factory.mktemp("torn")
    journal, _ = open_journal(folder, Durability(request.param), segment_bytes=15_000)
    for number in range(18):
        write(journal, number)
        journal.commit()
        if number == 8:
            journal.rotate(empty_state(), keep_logs=True)
            journal._state_written.result()
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    journal.close()
    assert len(list(copy.glob("*.arrow"))) == 3 and len(list(copy.glob("log/*"))) == 2
    return copy


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("with_states", [True, False])
def test_a_log_hurt_anywhere_is_cut_at_its_tail_or_refused_by_place_and_nothing_is_thrown_away(
    torn: Path, tmp_path: Path, seed: int, with_states: bool
) -> None:
    rng = random.Random(seed)
    shutil.copytree(torn, tmp_path, dirs_exist_ok=True)
    if not with_states:
        forget_states(tmp_path)
    victim = tmp_path / "log" / ("000001.jsonl" if with_states or rng.random() < 0.7 else "000000.jsonl")
    whole = victim.read_bytes()
    place = rng.choice([rng.randrange(len(whole)), len(whole) - rng.randrange(1, 40)])
    kind = rng.choice(["cut", "garbage", "bit", "zeros"])
    hurt = {
        "cut": whole[:place],
        "garbage": whole[:place] + rng.randbytes(500),
        "bit": whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :],
        "zeros": whole[:place] + bytes(len(whole) - place),
    }[kind]
    victim.write_bytes(hurt)
    line_start = whole.rfind(b"\n", 0, place) + 1
    more_follows = victim.name == "000000.jsonl" or (kind == "bit" and whole.count(b"\n", line_start) > 1)
    fsync = b'"durability":"fsync"' in whole
    if more_follows and not (fsync and line_start >= last_synced(torn)):
        before = contents(tmp_path)
        with pytest.raises(
            DamagedLog, match=rf"got damage at byte {line_start} of .*{victim.name}.*repair.sh"
        ):
            open_journal(tmp_path)[0].close()
        assert contents(tmp_path) == before, "a journal that is refused is not touched"
        return
    journal, told = open_journal(tmp_path)
    kept = {event.group for event in events(tmp_path) if isinstance(event, Accepted)}
    lines_before = whole[:place].count(b"\n") if kind != "cut" or hurt.endswith(b"\n") else hurt.count(b"\n")
    assert len(kept) >= (9 if victim.name.startswith("000001") else 0) + max(0, lines_before - 10), (
        "before the damage"
    )
    if told:
        aside = b"".join(path.read_bytes() for path in sorted(tmp_path.rglob("*.cut-*")))
        assert hurt[line_start:] in aside, "what was cut is kept beside"
    write(journal, 100)
    journal.close()
    journal, told = open_journal(tmp_path)
    assert told == [] and 100 in numbers(tmp_path), "once is enough, and the journal goes on"
    journal.close()


def last_synced(folder: Path) -> int:
    """Where the last file of the log is known to be on the disk, as it says itself."""
    return max(
        (event.end for event in read_events(folder) if isinstance(event, Synced) and event.log == 1),
        default=0,
    )


def test_a_hole_in_what_was_not_synced_is_a_torn_tail_however_much_follows_it(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path / "j", Durability.fsync)
    for number in range(6):
        write(journal, number)
        journal.commit()
    durable = (tmp_path / "j/log/000000.jsonl").stat().st_size
    answer = threading.Event()
    journal._disk.submit(answer.wait)
    for number in range(6, 9):  # taken in, and the disk has not answered: nobody was told
        write(journal, number)
        journal.start_commit()
    shutil.copytree(tmp_path / "j", tmp_path / "lost")
    answer.set()
    journal.close()
    path = tmp_path / "lost/log/000000.jsonl"
    data = bytearray(path.read_bytes())
    second = data.index(b"\n", durable) + 1  # behind the mark that all before is durable
    data[second : second + 100] = bytes(100)
    path.write_bytes(data)
    journal, told = open_journal(tmp_path / "lost", Durability.fsync)
    assert len(told) >= 1 and set(range(6)) <= set(numbers(tmp_path / "lost")) < set(range(9))
    journal.close()
    data[durable // 2 : durable // 2 + 100] = bytes(100)
    path.write_bytes(data)
    forget_states(tmp_path / "lost")
    (tmp_path / "lost/log/000001.jsonl").unlink()
    with pytest.raises(DamagedLog, match="got damage at byte"):
        open_journal(tmp_path / "lost", Durability.fsync)


def test_a_file_of_the_log_that_is_missing_is_named(torn: Path, tmp_path: Path) -> None:
    shutil.copytree(torn, tmp_path, dirs_exist_ok=True)
    forget_states(tmp_path)
    (tmp_path / "log/000000.jsonl").unlink()
    with pytest.raises(DamagedLog, match=r"000000.jsonl: the file is missing"):
        open_journal(tmp_path)


def test_a_damaged_state_is_passed_over_for_the_one_before(torn: Path, tmp_path: Path) -> None:
    shutil.copytree(torn, tmp_path, dirs_exist_ok=True)
    newest = max((tmp_path / "state").glob("*.state"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    found = read_journal(tmp_path)
    assert (
        found.state is not None and len([x for x in found.tail.lines if isinstance(x.event, Accepted)]) == 18
    )


def test_no_number_of_a_segment_is_used_again_whatever_is_dropped(tmp_path: Path) -> None:
    used: set[str] = set()
    for life in range(4):
        journal, _ = open_journal(tmp_path, segment_bytes=1000)
        for number in range(3):
            write(journal, 10 * life + number)
            journal.commit()
        made = {path.name for path in tmp_path.glob("*.arrow")} - used
        assert len(made) == 3, f"life {life} wrote over a segment"
        used |= made
        journal.drop_segments(sorted(journal.closed_segments()))
        journal.commit()
        journal.rotate(empty_state(), keep_logs=False)
        journal.close()
        assert not list(tmp_path.glob("*.arrow")), "all were dropped, the newest too"


def test_a_bit_that_rots_in_a_closed_segment_is_found_when_the_group_is_read(
    torn: Path, tmp_path: Path
) -> None:
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
    from buffers.evaluation_statistics import PromptSamples, summarize_samples
    from buffers.message_fields import GroupSlice

    events: list[AnyEvent] = [
        e.Leased(1, 2, 3, "g", 4.0),
        e.Failed(1, 2, "x", 3.0, False),
        e.Duplicate(1, 2),
        e.Rejected(1, "failed", "x", 2, 3, 4.0),
        e.Opened(1, 2),
        e.Handed(1, [2], [0.5]),
        e.Retired([1]),
        e.Trained(0, [1], [2], [3], {0: 2}, [0.5], 1.0),
        e.Reported(
            0, 1.5, {"a": 0.5, "b": "nan"}, [GroupSlice(segment=1, offset=2, size=3, xxh3=4, row=5, rows=6)]
        ),
        e.Published(1, "w", 2.0),
        e.Evaluated(1, 4.0),
        e.Evaluated(
            1, 4.0, summarize_samples("s", [PromptSamples(rewards=[0.5], num_tokens=2)], num_failed=1, k=[1])
        ),
        e.Rewound(1),
        e.Checkpointed(2, 1),
        e.Dropped([0]),
        e.Synced(3, 4),
        e.Repaired(3, [4], ["x"]),
        e.Began(2, 1, 1000, 7, {"seed": 0, "task_size": None, "lease_s": 1.5}, "os", "boot", 3.0),
        e.Accepted(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0.5, 0.1, 14.0, {12: 5, 13: 6}),
    ]
    assert {type(event) for event in events} == set(AnyEvent.__args__)
    assert [e.decode_line(e.encode_line(event)) for event in events] == events


def test_a_hole_behind_the_first_line_of_a_file_is_a_torn_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power is lost before the first commit to a new file of the log is on the disk: what was synced is
    there, a later page is there, and what lies between is not."""
    synced: dict[Path, int] = {}
    sync = journal_module.sync_file
    monkeypatch.setattr(
        journal_module,
        "sync_file",
        lambda file, path: (sync(file, path), synced.update({path: path.stat().st_size})),
    )
    journal, _ = open_journal(tmp_path / "j", Durability.fsync)
    path = tmp_path / "j/log/000000.jsonl"
    kept = synced.get(path, 0)
    for number in range(40):
        write(journal, number)
    journal.start_commit()
    shutil.copytree(tmp_path / "j", tmp_path / "lost")
    journal.close()
    data = (tmp_path / "lost/log/000000.jsonl").read_bytes()
    assert len(data) > 8192
    (tmp_path / "lost/log/000000.jsonl").write_bytes(data[:kept] + bytes(4096 - kept) + data[4096:])
    journal, told = open_journal(tmp_path / "lost", Durability.fsync)
    assert told and numbers(tmp_path / "lost") == []
    journal.close()


def test_under_fsync_a_missing_file_of_the_log_is_never_taken_for_a_torn_tail(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path, Durability.fsync)
    write(journal, 0)
    journal.commit()
    journal.rotate(empty_state(), keep_logs=True)
    journal._state_written.result()
    journal.close()
    newest = tmp_path / "state/000001.state"
    newest.write_bytes(newest.read_bytes()[:-1])  # so that the file of the log before it is needed
    (tmp_path / "log/000000.jsonl").unlink()
    before = contents(tmp_path)
    with pytest.raises(DamagedLog, match="000000.jsonl: the file is missing"):
        open_journal(tmp_path, Durability.fsync)
    assert contents(tmp_path) == before


def test_segments_that_a_life_before_did_not_live_to_sync_are_synced_before_a_state_vouches_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = open_journal(tmp_path / "j", Durability.fsync, segment_bytes=1000)
    write(journal, 0)
    journal.commit()
    shutil.copytree(tmp_path / "j", tmp_path / "killed")
    journal.close()
    synced: list[str] = []
    monkeypatch.setattr(journal_module, "sync_path", lambda path: synced.append(path.name))
    open_journal(tmp_path / "killed", Durability.fsync)[0].close()
    assert "000000.arrow" in synced
