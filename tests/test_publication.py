"""All ranks publish their own rows, beside training: together they write the file that one rank would."""

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import msgspec
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from safetensors.torch import load_file
from torch import Tensor

from buffers import messages as m
from buffers.client import RefusedByBuffer, TakenBatch
from buffers.trajectory import Trajectory, to_batch
from configs.disk import DiskFull
from configs.load import load_config
from learners.learner import Learner
from learners.packing import Batch
from learners.publication import Publication
from learners.world import World
from sync import file_layout
from sync.announcement import parse_announcement
from sync.digest import CHUNK_BYTES, tensor_digest
from sync.file_layout import FileLayout, SpanDigests, note_forms
from sync.manifest import (
    DigestMismatch,
    FilePart,
    FileParts,
    Manifest,
    PartSource,
    parse_manifest,
    whole_digest,
)
from sync.publisher import Publisher
from sync.snapshot import Snapshot, read_manifest
from sync.snapshot_writer import SnapshotWriter
from sync.staged_rows import StagedRows
from sync.stream import TensorPart, choose_rows, stream_rows, whole_parts
from sync.transports.fetcher import MAX_SOURCES_AT_A_TIME, Fetcher
from sync.transports.server import SnapshotServer

Weights = dict[str, Tensor]


class Mailbox:
    """Lets threads, one for each rank, exchange messages."""

    def __init__(self, size: int) -> None:
        self._size, self._barrier = size, threading.Barrier(size)
        self._sent: list[Sequence[bytes]] = [()] * size

    def exchange_as(self, rank: int) -> Callable[[Sequence[bytes]], Sequence[bytes]]:
        def exchange(messages: Sequence[bytes]) -> Sequence[bytes]:
            self._sent[rank] = messages
            self._barrier.wait(10)
            return [sent[rank] for sent in self._sent]

        return exchange


def divide(
    tensors: Weights, cuts: dict[str, list[int]], rank: int, dtype: torch.dtype | None
) -> list[TensorPart]:
    """Returns a rank's parts: the rows of each tensor between two of its cuts."""
    parts = []
    for name, tensor in tensors.items():
        begin, end = cuts[name][rank : rank + 2]
        rows = tensor[begin:end] if tensor.dim() else tensor
        if tensor.dim() or rank == 0:
            kind = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
            parts += stream_rows(name, tuple(tensor.shape), begin, rows, kind, bucket_bytes=1 << 12)
    return parts


def write_together(parts: list[list[TensorPart]], path: Path) -> tuple[FileLayout, list[list[SpanDigests]]]:
    """Writes the file as so many ranks do; returns the layout, and by rank the digests of its spans."""
    layout, size = FileLayout([note_forms(one) for one in parts]), len(parts)
    path.write_bytes(layout.header)
    os.truncate(path, layout.num_bytes)
    mailbox = Mailbox(size)

    def write_part(rank: int) -> list[SpanDigests]:
        rows = StagedRows(layout, rank)
        rows.copy_parts(parts[rank])
        rests = rows.exchange_fragments(mailbox.exchange_as(rank), size)
        return rows.write_rows(path, rests)

    with ThreadPoolExecutor(size) as pool:
        return layout, list(pool.map(write_part, range(size)))


SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=2), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 5), st.sampled_from([None, torch.bfloat16]))
def test_however_rows_are_divided_file_and_digests_are_those_of_one_rank(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    shapes: list[list[int]],
    size: int,
    dtype: torch.dtype | None,
) -> None:
    # Rows of a third of a chunk, so that chunks and rows end in different places.
    tensors = {f"t.{i}": torch.randn(*shape, CHUNK_BYTES // 12 + 1) for i, shape in enumerate(shapes)}
    tensors |= {"scalar": torch.tensor(3.0), "numbers": torch.arange(7)}
    cuts = {}
    for name, tensor in tensors.items():
        num_rows = len(tensor) if tensor.dim() else 1
        between = st.lists(st.integers(0, num_rows), min_size=size - 1, max_size=size - 1)
        cuts[name] = [0, *sorted(data.draw(between)), num_rows]
    folder = tmp_path_factory.mktemp("together")
    layout, told = write_together([divide(tensors, cuts, rank, dtype) for rank in range(size)], folder / "a")
    whole = divide(tensors, {name: [0, cut[-1]] for name, cut in cuts.items()}, 0, dtype)
    writer = SnapshotWriter()
    entries = writer.write_snapshot(folder / "b", whole)
    found = layout.describe_tensors(told)
    assert {entry.name: entry for entry in found} == {entry.name: entry for entry in entries}
    stored = load_file(folder / "a")
    assert all(entry.digest == tensor_digest(stored[entry.name]) for entry in found)
    if [entry.name for entry in found] == [entry.name for entry in entries]:
        assert (folder / "a").read_bytes() == (folder / "b").read_bytes()


def make_model(version: int) -> Weights:
    """Three matrices, one with rows that end within chunks, and one small tensor."""
    generator = torch.Generator().manual_seed(version)
    shapes = {"a": (300, 500), "b": (64, 257), "c": (9, 30_000), "norm": (33,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def split_model(tensors: Weights, rank: int, size: int) -> list[TensorPart]:
    """Returns a rank's parts, as even as they can be."""
    return [
        part
        for name, tensor in tensors.items()
        for begin, end in [(len(tensor) * rank // size, len(tensor) * (rank + 1) // size)]
        for part in stream_rows(name, tuple(tensor.shape), begin, tensor[begin:end], torch.float32)
    ]


def equal(found: Weights, expected: Weights) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def publish(
    publication: Publication, version: int, tensors: Weights, rank: int = 0, size: int = 1
) -> Manifest:
    publication.begin_version(version, lambda: split_model(tensors, rank, size))
    manifest = publication.finish_version()
    assert manifest is not None
    return manifest


def publish_on_ranks(world: World, folder: Path) -> list[tuple[str, int]]:
    """Publishes two versions; the tensors change as soon as they are copied. Returns digests, and the bytes
    that this rank has staged."""
    publisher = Publisher(folder, "life") if world.rank == 0 else None
    publication, found = Publication(world, publisher, "here"), []
    for version in range(2):
        tensors = make_model(version)
        parts = split_model(tensors, world.rank, world.size)
        publication.begin_version(version, lambda parts=parts: parts)  # type: ignore[misc]
        for tensor in tensors.values():
            tensor.fill_(7)
        manifest = publication.finish_version()
        assert manifest is not None and publication.finish_version() is None
        if world.rank == 0:
            snapshot = Snapshot(manifest)
            snapshot.verify_bytes()
            assert equal(dict(snapshot.named_tensors()), make_model(version))
            assert equal(load_file(manifest.path), make_model(version)), "stock safetensors"
        found.append((manifest.digest, int(publication.metrics()["weights/staged_bytes"])))
    publication.close()
    return found


def test_the_ranks_of_a_host_write_one_file_which_is_what_they_held_when_it_was_copied(
    tmp_path: Path,
) -> None:
    expected = publish_on_ranks(World(), tmp_path / "one")
    for size in (2, 3):
        found = on_ranks(size, publish_on_ranks, tmp_path / f"ranks-{size}", tmp_path / f"many-{size}")
        for version, (digest, num_bytes) in enumerate(expected):
            assert {one[version][0] for one in found} == {digest}, "the digest does not tell how many wrote"
            staged = [one[version][1] for one in found]
            assert sum(staged) == num_bytes and max(staged) < 1.1 * num_bytes / size


def fail_on_ranks(world: World, folder: Path, how: str) -> tuple[str, str]:
    """Rank 1 cannot write its rows of version 1. Returns each rank's error, and the files that are left."""
    publisher = Publisher(folder, "life") if world.rank == 0 else None
    publication = Publication(world, publisher, "here")
    publish(publication, 0, make_model(0), world.rank, world.size)
    if world.rank == 1 and how == "full":
        publication._rows.write_rows = _raise_full  # type: ignore[union-attr,method-assign]
    if world.rank == 1 and how == "dead":
        publication._rows.write_rows = _die  # type: ignore[union-attr,method-assign]
    error = ""
    try:
        publish(publication, 1, make_model(1), world.rank, world.size)
    except (RuntimeError, DiskFull) as raised:
        error = f"{type(raised).__name__}: {raised}"
    left = sorted(path.name for path in folder.iterdir())
    if world.rank == 0:
        snapshot = Snapshot(read_manifest(folder / "v0-life.json"))
        snapshot.verify_bytes()
    return error, " ".join(left)


def _die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is dead")


def _raise_full(*_: object, **__: object) -> bytes:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_rank_without_room_ends_all_ranks_and_the_version_before_stays(tmp_path: Path) -> None:
    found = on_ranks(3, fail_on_ranks, tmp_path / "ranks", tmp_path / "weights", "full")
    assert all(error.startswith("DiskFull: ") and "must have room for" in error for error, _ in found)
    assert "rank 1 on " in found[0][0]
    assert found[0][1] == "owner v0-life.json v0-life.safetensors"


def test_a_rank_that_dies_while_it_writes_leaves_no_torn_version(tmp_path: Path) -> None:
    found = on_ranks(3, fail_on_ranks, tmp_path / "ranks", tmp_path / "weights", "dead", dying=[1])
    for error, left in found:
        assert error.startswith("RuntimeError") and "v1-life.json" not in left


def test_a_rank_that_yields_other_rows_is_named(tmp_path: Path) -> None:
    a = TensorPart("a", (4, 2), torch.zeros(6), 0)
    for parts, said in [
        ([[a]], "all 32 bytes of a, got 24"),
        ([[a], [TensorPart("a", (4, 2), torch.zeros(4), 4)]], "bytes 16 to 32 by rank 1 after byte 24"),
        ([[a], [TensorPart("a", (2, 2), torch.zeros(2))]], "the same tensors"),
    ]:
        with pytest.raises(RuntimeError, match=said):
            FileLayout([note_forms(one) for one in parts])
    publication = Publication(publisher=Publisher(tmp_path / "w", "life"))
    publish(publication, 0, {"a": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="its 12 bytes again, got 8"):
        publication.begin_version(1, lambda: [TensorPart("a", (3,), torch.zeros(2))])
    publication.close()


def test_holders_of_the_same_rows_publish_each_of_them_once() -> None:
    for num_rows in (0, 1, 5, 1000):
        for row_bytes in (4, 1 << 14):
            for count in (1, 2, 7):
                shares = [choose_rows(num_rows, row_bytes, index, count) for index in range(count)]
                covered = [row for begin, end in shares for row in range(begin, end)]
                assert covered == list(range(num_rows)), "few bytes are the first holder's alone"


def test_a_manifest_whose_parts_contradict_it_is_refused(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "w", "life")
    manifest = publisher.publish_version(0, whole_parts({"a": torch.zeros(3)}))
    size, empty = manifest.num_bytes, "0" * 32
    for ends, source, address in [
        ((size,), 0, "tcp://host:1"),
        ((9, size), 0, "tcp://[fd77::1]:1"),
        ((9, 9, size), 0, "tcp://host:1"),
        ((9, size - 1), 0, "tcp://host:1"),
        ((size, 9), 0, "tcp://host:1"),
        ((size,), 1, "tcp://host:1"),
        ((size,), 0, "ipc:///tmp/socket"),
    ]:
        parts = FileParts((PartSource("host", address),), tuple(FilePart(end, source, empty) for end in ends))
        data = msgspec.json.encode(msgspec.structs.replace(manifest, parts=parts))
        if ends in ((size,), (9, size)) and not source and address.startswith("tcp"):
            assert parse_manifest(data, "here", "v0-life").parts == parts
        else:
            with pytest.raises(DigestMismatch):
                parse_manifest(data, "here", "v0-life")
    publisher.close()


def test_a_manifest_that_subscribers_would_refuse_is_refused_when_the_ranks_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = [split_model(make_model(0), rank, 3) for rank in range(3)]
    layout, told = write_together(parts, tmp_path / "file")
    sources = [PartSource(f"host-{number}", "tcp://10.77.0.1:5555") for number in range(3)]
    layout.check_manifest(sources, range(3))
    entries, its_parts = layout.describe_tensors(told), layout.describe_parts(told, sources, range(3))
    publisher = Publisher(tmp_path / "w", "life")
    manifest = publisher.describe_version(0, layout, entries, its_parts)
    num_bytes = len(msgspec.json.encode(manifest))
    publisher.close()
    monkeypatch.setattr(file_layout, "MAX_MANIFEST_BYTES", num_bytes)
    with pytest.raises(
        ValueError,
        match=rf"manifest of a version must have at most {num_bytes:,} bytes, .* 4 tensors in \d+ parts",
    ) as told_error:
        layout.check_manifest(sources, range(3))
    (about,) = re.findall(r"got about ([\d,]+) bytes", str(told_error.value))
    counted = int(about.replace(",", "")) - file_layout.REST_BYTES
    assert num_bytes - 1000 < counted <= num_bytes, "all but paths and names"

    def publish_from(world: World) -> None:
        publish(Publication(world, Publisher(tmp_path / "one", "life"), "here"), 0, make_model(0))

    monkeypatch.setattr(file_layout, "MAX_ENTRIES", 3)
    with pytest.raises(ValueError, match="at most 3 tensors and parts"):
        publish_from(World())


def test_the_parts_of_more_hosts_than_are_asked_at_a_time_all_arrive(tmp_path: Path) -> None:
    size = MAX_SOURCES_AT_A_TIME + 2
    layout, told = write_together(
        [split_model(make_model(0), rank, size) for rank in range(size)], tmp_path / "a"
    )
    whole, servers = (tmp_path / "a").read_bytes(), []
    for rank in range(size):
        (folder := tmp_path / f"host-{rank}").mkdir()
        held = bytearray(len(whole))
        held[: layout.room] = layout.header if rank == 0 else held[: layout.room]
        for span in layout.own_spans(rank):
            begin, end = layout.room + span.begin, layout.room + span.end
            held[begin:end] = whole[begin:end]
        (folder / "v0-life.safetensors").write_bytes(held)
        servers.append(SnapshotServer(folder))
    sources = [PartSource(f"host-{rank}", server.address) for rank, server in enumerate(servers)]
    parts = layout.describe_parts(told, sources, range(size))
    entries = layout.describe_tensors(told)
    path = str(tmp_path / "host-0" / "v0-life.safetensors")
    manifest = Manifest(0, "life", path, layout.num_bytes, entries, whole_digest(entries), None, parts)
    (tmp_path / "host-0" / "v0-life.json").write_bytes(msgspec.json.encode(manifest))
    fetcher = Fetcher(tmp_path / "fetched")
    local = fetcher.fetch_version(servers[0].address, "v0-life.json", digest=manifest.digest)
    snapshot = Snapshot(read_manifest(local))
    snapshot.verify_bytes()
    assert equal(dict(snapshot.named_tensors()), make_model(0))
    assert all(server.bytes_sent > 0 for server in servers)
    fetcher.close()
    for server in servers:
        server.close()


# ---- the learner


class RecordingBuffer:
    """A buffer that takes note of what it is asked, and has batches: each when its version is announced,
    unless they are `ready`. It knows `versions`, announced and in order, and their weights."""

    def __init__(self, batch: TakenBatch, ready: bool) -> None:
        self.batch, self.ready, self.events = batch, ready, list[str]()
        self.versions, self.weights, self.refused = list[int](), list[Tensor](), -1

    def take_batch(self, step: int, wait_s: float) -> TakenBatch | m.NotReadyYet:
        return self.batch if self.ready or self.wait_for(step) else m.NotReadyYet(waiting_for="a version")

    def wait_for(self, version: int, wait_s: float = 10.0) -> bool:
        deadline = time.monotonic() + wait_s
        while version not in self.versions and time.monotonic() < deadline:
            time.sleep(0.001)
        return version in self.versions

    def call(self, request: m.Request, expect: type[Any]) -> Any:
        match request:
            case m.PublishVersion(version=version, manifest_locator=locator):
                if version == self.refused:
                    raise RefusedByBuffer("a version that nobody likes")
                path = read_manifest(parse_announcement(locator).path).path
                self.weights.append(load_file(path).get("w", torch.zeros(0)))
                self.versions.append(version)
                return m.PublishedVersion(needed_versions=[0])
            case m.ReportTrainedStep(step=step, metrics=metrics):
                assert metrics["weights/publish_s"] >= metrics["weights/publish_copy_s"] > 0
                self.events.append(f"step {step}")
        return m.Acknowledged()

    def exchange(self, request: m.Request, *, wait_s: float = 0.0) -> tuple[m.Reply, list[memoryview]]:
        return m.Acknowledged(), []

    def close(self) -> None: ...


class WaitingTrainer:
    """Trains nothing, in one piece. A step ends once the version before it is announced, unless `hurries`."""

    kl_coef = 0.0

    def __init__(self, buffer: RecordingBuffer, *, hurries: bool = False) -> None:
        self.weights, self._hurries, self._buffer = torch.zeros(1000), hurries, buffer
        self.report_progress: Callable[[], None] = lambda: None
        policy = SimpleNamespace(stream_weights=lambda: whole_parts({"w": self.weights}))
        self.models = SimpleNamespace(policy=policy, copy_state=lambda: _write_nothing)

    def train(self, batch: Batch, step: int) -> tuple[dict[str, float], int]:
        self.weights += 1
        assert self._hurries or self._buffer.wait_for(step)
        self.report_progress()
        return {}, 0


def _write_nothing(folder: Path) -> list[Path]:
    (folder / "engine").mkdir(parents=True)
    return []


def run_learner(
    folder: Path,
    rows: list[Trajectory],
    *,
    ready: bool,
    hurries: bool = False,
    is_broken: bool = False,
    refused: int = -1,
) -> RecordingBuffer:
    """Trains three steps; returns what the buffer knows."""
    table = pa.Table.from_batches([to_batch(rows)])
    buffer = RecordingBuffer(TakenBatch(0, [row.group for row in rows], [], table), ready)
    buffer.refused = refused
    config = load_config(["run.steps=3", "eval.prompts=0"])
    trainer: Any = WaitingTrainer(buffer, hurries=hurries)
    publication = Publication(publisher=Publisher(folder / "w", "life"), buffer=buffer)
    if is_broken:
        publication._write_rows = lambda *_: 1 // 0  # type: ignore[method-assign,assignment]
    Learner(config, folder, buffer, trainer, publication, incarnation="life").run()  # type: ignore[arg-type]
    return buffer


@pytest.mark.parametrize(("ready", "hurries"), [(True, False), (True, True), (False, True)])
def test_a_version_is_announced_beside_a_step_in_one_piece_and_while_the_learner_waits_for_a_batch(
    tmp_path: Path, trajectories: list[Trajectory], ready: bool, hurries: bool
) -> None:
    buffer = run_learner(tmp_path, trajectories, ready=ready, hurries=hurries)
    assert buffer.versions == [0, 1, 2, 3] and buffer.events == ["step 0", "step 1", "step 2"]
    assert [float(weights[0]) for weights in buffer.weights] == [0, 1, 2, 3], "as when they were copied"


class PatientBuffer(RecordingBuffer):
    """A buffer that has each batch when its version is announced, and the learner says that it waits."""

    def __init__(self, rows: list[Trajectory]) -> None:
        table = pa.Table.from_batches([to_batch(rows)])
        super().__init__(TakenBatch(0, [row.group for row in rows], [], table), ready=False)
        self.said, self.is_writing = list[str](), threading.Event()

    def say(self, activity: str) -> None:
        self.said.append(activity)
        if activity == "writing the newest version":
            self.is_writing.set()

    def take_batch(self, step: int, wait_s: float) -> TakenBatch | m.NotReadyYet:
        is_there = self.wait_for(step, 0.01) and self.said[-1].startswith("waiting")
        return self.batch if is_there else m.NotReadyYet(waiting_for="a version")


def test_a_learner_without_a_batch_is_at_work_while_its_version_is_written(
    tmp_path: Path, trajectories: list[Trajectory]
) -> None:
    buffer = PatientBuffer(trajectories)
    publication = Publication(publisher=Publisher(tmp_path / "w", "life"), buffer=buffer)
    write = publication._write_rows

    def write_slowly(path: Path, rests: dict[int, bytes]) -> bytes:
        digests = write(path, rests)
        assert buffer.is_writing.wait(10.0), "the watchdog would end the run"
        buffer.is_writing.clear()
        return digests

    publication._write_rows = write_slowly  # type: ignore[method-assign]
    config, trainer = load_config(["run.steps=2", "eval.prompts=0"]), cast(Any, WaitingTrainer(buffer))
    learner = Learner(config, tmp_path, cast(Any, buffer), trainer, publication, say=buffer.say)
    learner.run()
    assert buffer.versions == [0, 1, 2] and buffer.events == ["step 0", "step 1"]


def test_a_checkpoint_is_copied_once_the_one_before_is_written(
    tmp_path: Path, trajectories: list[Trajectory]
) -> None:
    events, is_copied_again = list[str](), threading.Event()
    table = pa.Table.from_batches([to_batch(trajectories)])
    buffer = RecordingBuffer(TakenBatch(0, [row.group for row in trajectories], [], table), ready=True)
    trainer: Any = WaitingTrainer(buffer, hurries=True)

    def copy_state() -> Callable[[Path], list[Path]]:
        events.append("copied")
        if len(events) > 1:
            is_copied_again.set()
        return write_slowly

    def write_slowly(folder: Path) -> list[Path]:
        is_copied_again.wait(0.5)
        is_copied_again.clear()
        events.append("written")
        return _write_nothing(folder)

    trainer.models.copy_state = copy_state
    config = load_config(["run.steps=3", "eval.prompts=0", "learner.checkpoint_every=1"])
    publication = Publication(publisher=Publisher(tmp_path / "w", "life"), buffer=buffer)
    Learner(config, tmp_path, cast(Any, buffer), trainer, publication, incarnation="life").run()
    assert events == ["copied", "written"] * 3, "two copies would take twice the memory"


def test_a_version_that_is_evaluated_later_stays(tmp_path: Path, trajectories: list[Trajectory]) -> None:
    run_learner(tmp_path, trajectories, ready=True)
    assert not (tmp_path / "w").exists()
    buffer = RecordingBuffer(TakenBatch(0, [], [], pa.table({})), ready=True)
    publication = Publication(publisher=Publisher(tmp_path / "again", "life", keep=1), buffer=buffer)
    for version in range(3):
        publish(publication, version, {"w": torch.zeros(3)})
    assert {path.name for path in (tmp_path / "again").glob("*.json")} == {"v0-life.json", "v2-life.json"}
    publication.close()


@pytest.mark.parametrize("version", [0, 2])
def test_an_announcement_that_is_refused_ends_the_learner(
    tmp_path: Path, trajectories: list[Trajectory], version: int
) -> None:
    with pytest.raises(RefusedByBuffer, match="nobody likes"):
        run_learner(tmp_path, trajectories, ready=True, hurries=True, refused=version)


def test_a_publication_that_fails_beside_training_ends_the_learner_with_its_traceback(
    tmp_path: Path, trajectories: list[Trajectory]
) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run_learner(tmp_path, trajectories, ready=True, hurries=True, is_broken=True)
    assert any(entry.name == "_publish_version" for entry in raised.traceback)
    assert not (tmp_path / "w").exists(), "and nothing is left"


def announce_on_ranks(world: World, folder: Path) -> list[str]:
    """Rank 0 announces version 0 late, and cannot announce version 1. Returns what each rank has seen."""
    buffer = RecordingBuffer(TakenBatch(0, [], [], pa.table({})), ready=True)
    buffer.refused, call, marked = 1, buffer.call, folder / "announced"

    def call_late(request: m.Request, expect: type[Any]) -> Any:
        time.sleep(0.3)
        marked.touch()
        return call(request, expect)

    buffer.call = call_late  # type: ignore[method-assign]
    folder.mkdir(exist_ok=True)
    publisher = Publisher(folder / "w", "life") if world.rank == 0 else None
    publication = Publication(world, publisher, "here", buffer if world.rank == 0 else None)
    publish(publication, 0, make_model(0), world.rank, world.size)
    found = ["announced" if marked.exists() else "not yet announced"]
    try:
        publish(publication, 1, make_model(1), world.rank, world.size)
    except RuntimeError as error:
        found.append(f"{type(error).__name__}: {error}")
    publication.close()
    return found


def test_all_ranks_wait_for_the_announcement_and_hear_that_it_has_failed(tmp_path: Path) -> None:
    found = on_ranks(2, announce_on_ranks, tmp_path / "ranks", tmp_path / "weights")
    assert [one[0] for one in found] == ["announced"] * 2
    assert found[0][1] == "RefusedByBuffer: a version that nobody likes"
    assert found[1][1].startswith("RuntimeError: rank 0 on ") and "nobody likes" in found[1][1]


class EvaluatedBuffer(RecordingBuffer):
    """A buffer whose last evaluation takes a moment. It notes whether a host serves its rows until then."""

    def __init__(self, served: Path) -> None:
        super().__init__(TakenBatch(0, [], [], pa.table({})), ready=True)
        self._served = served

    def exchange(self, request: m.Request, *, wait_s: float = 0.0) -> tuple[m.Reply, list[memoryview]]:
        assert isinstance(request, m.AwaitEvaluations)
        deadline = time.monotonic() + 1.0
        while (is_served := self._served.exists()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.events.append("evaluated" if is_served else "a host has taken its rows away")
        return m.Acknowledged(), []


def end_run_on_hosts(world: World, folder: Path) -> list[str]:
    """Ends a run whose steps are trained. Each rank is on a host of its own."""
    publishers = World(world.rank, world.size, dist.FileStore(str(folder / "publishers"), world.size))
    own = folder / f"host-{world.rank}"
    buffer = EvaluatedBuffer(folder / "host-1")
    announced_to, publisher = (
        None if world.rank else buffer,
        Publisher(own, "life", ends=[SnapshotServer(own)]),
    )
    publication, trainer = Publication(publishers, publisher, own.name, announced_to), WaitingTrainer(buffer)
    trainer.models.policy.stream_weights = lambda: split_model(make_model(1), world.rank, world.size)
    config, source = load_config(["run.steps=1", "eval.prompts=0"]), cast(Any, buffer)
    Learner(
        config, folder, source, cast(Any, trainer), publication, world, rank=world.rank, first_step=1
    ).run()
    return [f"version {version}" for version in buffer.versions] + buffer.events


def test_every_host_serves_its_rows_until_the_last_version_is_evaluated(tmp_path: Path) -> None:
    found = on_ranks(2, end_run_on_hosts, tmp_path / "ranks", tmp_path)
    assert found == [["version 1", "evaluated"], []]


def test_a_rank_whose_publication_has_failed_notices_it_while_it_waits_for_the_first_rank(
    tmp_path: Path,
) -> None:
    publication = Publication(publisher=Publisher(tmp_path / "w", "life"))
    publish(publication, 0, make_model(0))
    publication._rows.exchange_fragments = lambda *_: 1 // 0  # type: ignore[union-attr,method-assign]
    publication.begin_version(1, lambda: split_model(make_model(1), 0, 1))
    futures.wait([publication._under_way])  # type: ignore[list-item]
    with pytest.raises(ZeroDivisionError):
        publication.check_alive()
    publication.close()
