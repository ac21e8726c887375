import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sync import folders
from sync.announcement import announce_version
from sync.digest import tensor_digest
from sync.folders import FOLDER_PREFIX, sweep_folders
from sync.manifest import DigestMismatch, TensorEntry, whole_digest
from sync.publisher import Publisher
from sync.snapshot import Snapshot, read_manifest
from sync.snapshot_writer import SnapshotWriter
from sync.stream import TensorPart, whole_parts
from sync.subscriber import Subscriber


def make_weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed.weight": (10, 4),
        "model.layers.0.mlp.weight": (4, 6),
        "model.norm.weight": (4,),
        "scale": (),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    publisher = Publisher(tmp_path / "weights", "first")
    yield publisher
    publisher.close()


def are_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_subscriber_reads_the_bits_that_were_published(publisher: Publisher, dtype: torch.dtype) -> None:
    published = make_weights(0, dtype)
    announced = publisher.publish_version(3, whole_parts(published))
    manifest = read_manifest(announced.locator)
    assert manifest == announced
    assert (manifest.version, manifest.incarnation) == (3, "first")
    snapshot = Snapshot(manifest)
    snapshot.verify_bytes()
    assert are_equal(dict(snapshot.named_tensors()), published)
    assert publisher.seconds > 0


def test_the_snapshot_is_a_stock_safetensors_file(publisher: Publisher) -> None:
    published = make_weights(0)
    assert are_equal(load_file(publisher.publish_version(0, whole_parts(published)).path), published)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["float32", "bfloat16", "uint8", "int64"]),
            st.lists(st.integers(0, 5), max_size=3),
        )
    ),
    st.integers(8, 400),
)
def test_any_tensors_survive_any_room_for_the_header(
    tmp_path_factory: pytest.TempPathFactory, specs: list[tuple[str, list[int]]], room: int
) -> None:
    tensors = {
        f"tensor.{i}": torch.arange(torch.Size(shape).numel()).reshape(shape).to(getattr(torch, dtype))
        for i, (dtype, shape) in enumerate(specs)
    }
    path = tmp_path_factory.mktemp("any") / "file"
    writer = SnapshotWriter(header_room=room)
    for _ in range(2):  # the second time the room is known
        entries = writer.write_snapshot(path, whole_parts(tensors))
        assert are_equal(load_file(path), tensors)
        assert [entry.digest for entry in entries] == [tensor_digest(t) for t in tensors.values()]
        assert [path] == list(path.parent.iterdir())


def test_a_part_is_written_before_the_next_is_asked_for(publisher: Publisher) -> None:
    def one_at_a_time() -> Iterator[TensorPart]:
        buffer = torch.empty(1 << 20)  # reused: a writer that kept parts would find the last one everywhere
        for i in range(8):
            yield TensorPart(f"tensor.{i // 2}", (2, 1 << 20), buffer.fill_(i))

    snapshot = Snapshot(publisher.publish_version(0, one_at_a_time()))
    snapshot.verify_bytes()
    assert [tensor[:, -1].tolist() for _, tensor in snapshot.named_tensors()] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def test_the_whole_digest_covers_names_dtypes_shapes_and_order() -> None:
    entry = TensorEntry("a", "float32", (2, 3), "00")
    other = TensorEntry("b", "float32", (2, 3), "00")
    changed = [
        msgspec.structs.replace(entry, name="c"),
        msgspec.structs.replace(entry, dtype="bfloat16"),
        msgspec.structs.replace(entry, shape=(3, 2)),
        msgspec.structs.replace(entry, digest="01"),
    ]
    digests = [whole_digest([entry, other]), whole_digest([other, entry]), whole_digest([entry])]
    digests += [whole_digest([c, other]) for c in changed]
    assert len(set(digests)) == len(digests)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 7))
def test_a_single_flipped_bit_anywhere_in_a_tensor_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    publisher = Publisher(tmp_path_factory.mktemp("flip") / "weights", "x")
    try:
        manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
        raw = bytearray(Path(manifest.path).read_bytes())
        num_raw = sum(tensor.nbytes for tensor in make_weights(0).values())
        raw[len(raw) - 1 - at % num_raw] ^= 1 << bit
        Path(manifest.path).write_bytes(raw)
        with pytest.raises(DigestMismatch, match="1 of 4 tensors in the file"):
            Snapshot(manifest).verify_bytes()
    finally:
        publisher.close()


@pytest.mark.parametrize("num_bytes", [0, 7, 100, -1])
def test_a_truncated_file_is_noticed_when_it_is_opened(publisher: Publisher, num_bytes: int) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    os.truncate(manifest.path, num_bytes % manifest.num_bytes)
    with pytest.raises(DigestMismatch, match="bytes"):
        Snapshot(manifest)


def test_a_file_of_the_right_size_that_is_no_snapshot_is_noticed(publisher: Publisher) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    Path(manifest.path).write_bytes(b"\xff" * manifest.num_bytes)
    with pytest.raises(DigestMismatch, match="not a snapshot"):
        Snapshot(manifest)


def test_another_versions_file_is_noticed(publisher: Publisher) -> None:
    old = publisher.publish_version(0, whole_parts(make_weights(0)))
    new = publisher.publish_version(1, whole_parts(make_weights(1)))
    Path(new.path).write_bytes(Path(old.path).read_bytes())
    with pytest.raises(DigestMismatch, match="4 of 4 tensors in the file .*: model.embed.weight, "):
        Snapshot(new).verify_bytes()


def test_a_manifest_that_contradicts_itself_is_refused(publisher: Publisher) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    locator = Path(manifest.locator)
    whole = locator.read_bytes()
    locator.write_bytes(whole.replace(b'"scale"', b'"scalf"'))
    with pytest.raises(DigestMismatch, match="list of tensors"):
        read_manifest(locator)
    locator.write_bytes(whole[:-10])
    with pytest.raises(DigestMismatch, match="not a manifest"):
        read_manifest(locator)


def test_a_missing_snapshot_is_reported_and_never_created(publisher: Publisher) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    Path(manifest.path).unlink()
    with pytest.raises(FileNotFoundError):
        Snapshot(manifest)
    assert not Path(manifest.path).exists()


def test_the_newest_versions_are_kept_and_a_mapped_one_outlives_its_file(publisher: Publisher) -> None:
    first = publisher.publish_version(0, whole_parts(make_weights(0)))
    mapped = Snapshot(first)
    for version in (1, 2, 5):
        publisher.publish_version(version, whole_parts(make_weights(version)))
    files = {file.name for file in publisher.folder.iterdir()}
    spare = {"v1-first.spare", "v1-first.was"}  # memory for the version to come
    assert files - spare == {
        "owner",
        "v2-first.json",
        "v2-first.safetensors",
        "v5-first.json",
        "v5-first.safetensors",
    }
    with pytest.raises(FileNotFoundError):
        read_manifest(first.locator)
    mapped.verify_bytes()
    assert are_equal(dict(mapped.named_tensors()), make_weights(0))


PUBLISH_FAST = """
import sys
import torch
from sync.publisher import Publisher
from sync.stream import whole_parts
publisher = Publisher(sys.argv[1], "x")
for version in range(10**6):
    publisher.publish_version(version, whole_parts({"a": torch.full((50_000,), float(version))}))
"""


def test_a_reader_never_sees_half_a_version(tmp_path: Path) -> None:
    """A process publishes as fast as it can; every manifest that is found names a whole file of its own
    version."""
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PUBLISH_FAST,
            str(tmp_path / "weights"),
        ]
    )
    try:
        seen = set()
        deadline = time.monotonic() + 60
        while len(seen) < 50 and time.monotonic() < deadline:
            for locator in (tmp_path / "weights").glob("v*.json"):
                try:
                    snapshot = Snapshot(read_manifest(locator))
                except FileNotFoundError:
                    continue
                snapshot.verify_bytes()
                assert locator.name == f"v{snapshot.manifest.version}-x.json"
                assert dict(snapshot.named_tensors())["a"][-1].item() == snapshot.manifest.version
                seen.add(snapshot.manifest.version)
        assert len(seen) >= 50
    finally:
        writer.kill()
        writer.wait()


def test_a_folder_seen_from_elsewhere_is_read_from_there(publisher: Publisher, tmp_path: Path) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    elsewhere = tmp_path / "mounted elsewhere"
    elsewhere.symlink_to(publisher.folder)
    seen = read_manifest(elsewhere / Path(manifest.locator).name)
    assert Path(seen.path).parent == elsewhere
    Snapshot(seen).verify_bytes()


def test_close_removes_the_folder(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "weights", "x")
    publisher.publish_version(0, whole_parts(make_weights(0)))
    publisher.close()
    assert not publisher.folder.exists()


def test_a_folder_is_given_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that ends with its driver gives up its folders while its own thread may be about to do so."""
    publisher = Publisher(tmp_path / "w", "life")
    monkeypatch.setattr(folders, "in_shared_memory", lambda folder: folder == publisher.folder)
    folders.leave_all_folders()
    assert not publisher.folder.exists()
    another = os.open(tmp_path / "another file", os.O_CREAT)
    assert another == publisher._lock, "the kernel gives the number out again"
    publisher.close()
    os.close(another)


def test_a_folder_in_use_is_refused(publisher: Publisher) -> None:
    with pytest.raises(ValueError, match="must not be in use by another run"):
        Publisher(publisher.folder, "second")


PUBLISH_AND_DIE = """
import os
import sys
import torch
from sync.publisher import Publisher
from sync.stream import whole_parts
Publisher(sys.argv[1], "x").publish_version(7, whole_parts({"a": torch.zeros(3)}))
os.kill(os.getpid(), 9)
"""


def publish_and_die(folder: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            PUBLISH_AND_DIE,
            str(folder),
        ],
        check=False,
    )
    assert (folder / "v7-x.safetensors").exists()


def test_a_new_life_begins_with_an_empty_folder_and_may_count_from_a_lower_version(tmp_path: Path) -> None:
    publish_and_die(tmp_path / "weights")
    publisher = Publisher(tmp_path / "weights", "second", keep=1)
    assert [file.name for file in publisher.folder.iterdir()] == ["owner"]
    assert (
        read_manifest(publisher.publish_version(5, whole_parts(make_weights(0))).locator).incarnation
        == "second"
    )
    publisher.close()


def test_folders_of_the_dead_are_swept_and_nothing_else_is(tmp_path: Path) -> None:
    dead, alive, stranger = (tmp_path / f"{FOLDER_PREFIX}{name}" for name in ("dead", "alive", "stranger"))
    publish_and_die(dead)
    stranger.mkdir()  # no owner: not made by a publisher
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "owner").touch()
    living = Publisher(alive, "x")  # sweeps
    assert not dead.exists()
    publish_and_die(dead)
    assert sweep_folders(tmp_path) == [dead]
    assert {folder.name for folder in tmp_path.iterdir()} == {alive.name, stranger.name, "other"}
    living.close()


def test_parts_of_a_layer_that_engines_merge_lie_side_by_side_from_the_first_version_on(
    publisher: Publisher,
) -> None:
    names = [
        f"model.layers.0.self_attn.{part}.{kind}"
        for part in ("q_proj", "k_proj", "v_proj")
        for kind in ("weight", "bias")
    ]
    names += [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
    ]
    for version in range(2):
        tensors = {name: torch.randn(rows, 3) for rows, name in enumerate(names, 2)}
        snapshot = Snapshot(publisher.publish_version(version, whole_parts(tensors)))
        snapshot.verify_bytes()
        assert are_equal(load_file(snapshot.manifest.path), tensors) and are_equal(
            dict(snapshot.named_tensors()), tensors
        )
        for merged in (names[0:5:2], names[1:6:2], [names[8], names[6]]):
            expected = torch.cat([tensors[name] for name in merged])
            found = snapshot.view_merged(merged)
            assert found is not None and torch.equal(found, expected)
        assert snapshot.view_merged([names[8], names[7]]) is None, "gate and down are not neighbours"


def test_a_host_verifies_a_version_once_and_again_when_nobody_has_vouched_for_it(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    verified = []
    monkeypatch.setattr(
        Snapshot, "verify_bytes", lambda snapshot, progress: verified.append(snapshot.manifest.version)
    )
    threads = [
        threading.Thread(target=Subscriber().prepare_version, args=[announce_version(manifest)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verified == [0]
    monkeypatch.setattr("sync.snapshot.boot_id", lambda: "another host")
    Subscriber().prepare_version(announce_version(manifest))
    assert verified == [0, 0]
    for version in (1, 2):
        publisher.publish_version(version, whole_parts(make_weights(version)))
    assert {path.suffix for path in publisher.folder.glob("v0-*")} <= {".spare", ".was"}, (
        "seals go with their version"
    )


MAP_FILE = """
import mmap
import sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=1)
print(flush=True)
sys.stdin.read()
print(mapped[-64:].hex())
"""


def test_memory_is_used_again_only_when_nobody_has_it(publisher: Publisher) -> None:
    inodes, held = [], []
    for version in range(12):
        manifest = publisher.publish_version(version, whole_parts(make_weights(version)))
        inodes.append(os.stat(manifest.path).st_ino)
        if version in (2, 5):
            held.append((version, Snapshot(manifest)))
        if version == 8:  # another process
            other = subprocess.Popen(
                [sys.executable, "-c", MAP_FILE, manifest.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert other.stdout is not None and other.stdout.readline() == "\n"
            end = Path(manifest.path).read_bytes()[-64:].hex()
    assert len(set(inodes)) < 10, "files are used again"
    for version, snapshot in held:
        snapshot.verify_bytes()
        assert are_equal(dict(snapshot.named_tensors()), make_weights(version))
    out, _ = other.communicate("")
    assert out.strip() == end, "what another process has mapped stays what it was"


def test_a_damaged_snapshot_gets_no_seal(publisher: Publisher) -> None:
    manifest = publisher.publish_version(0, whole_parts(make_weights(0)))
    raw = bytearray(Path(manifest.path).read_bytes())
    raw[-1] ^= 1
    Path(manifest.path).write_bytes(raw)
    for _ in range(2):
        with pytest.raises(DigestMismatch, match="1 of 4 tensors"):
            Subscriber().prepare_version(announce_version(manifest))
