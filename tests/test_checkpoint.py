"""Checkpoints: whole or absent, of the moment they were begun, and the same bits on any number of ranks."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine_batches import draw_batch, negate_logprobs, save_small_qwen3
from hypothesis import given
from hypothesis import strategies as st
from ranks import gather_weights, on_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

import learners.world
import sync.stream
from configs.disk import DiskFull
from configs.load import load_config
from configs.parallel import FsdpConfig
from learners import checkpoint
from learners.fsdp import FsdpEngine
from learners.packing import Packed, pack_share
from learners.startup import check_same_run
from learners.state_files import CopiedRows, copy_own_rows, load_rows, write_rows
from learners.world import LONG_TIMEOUT, World

LENGTHS = [5, 9, 2, 30, 7, 1, 12, 4]


def manifest(step: int) -> checkpoint.CheckpointManifest:
    return checkpoint.CheckpointManifest(step, "life", 0)


def write(folder: Path) -> list[Path]:
    path = folder / "engine" / "weights"
    path.parent.mkdir()
    path.write_bytes(b"weights")
    return [path]


def written(folder: Path, *steps: int, keep: int = 2) -> None:
    writer = checkpoint.CheckpointWriter(folder, keep, World())
    for step in steps:
        writer.begin_checkpoint(manifest(step), write)
    assert writer.take_written(wait=True) is not None
    writer.close()


def steps(folder: Path) -> list[int]:
    return [found.manifest.step for found in checkpoint.find_checkpoints(folder)]


# ---- whole or absent


def test_a_wait_for_a_checkpoint_shows_that_it_gets_on_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "LOOK_S", 0.01)
    grow, end, shown = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)

    def write_slowly(folder: Path) -> list[Path]:
        paths = write(folder)
        while grow.acquire() and not end.is_set():
            with open(folder / "engine" / "weights", "ab") as file:
                file.write(b"more")
        return paths

    writer = checkpoint.CheckpointWriter(tmp_path, 2, World())
    writer.begin_checkpoint(manifest(1), write_slowly)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(writer.take_written, wait=True, on_progress=shown.release)
        while shown.acquire(timeout=0.5):
            pass  # what was written before
        for _ in range(3):
            grow.release()
            assert shown.acquire(timeout=30), "it has grown"
            assert not shown.acquire(timeout=0.2), "it has not grown"
        end.set()
        grow.release()
        assert waiting.result() is not None
    writer.close()


def test_a_half_written_checkpoint_is_never_chosen(tmp_path: Path) -> None:
    written(tmp_path, 10, 9, 20, 30)
    assert steps(tmp_path) == [20, 30]
    (tmp_path / "step_30" / "manifest.json").write_bytes(b'{"step":3')
    shutil.copytree(tmp_path / "step_20", tmp_path / "step_40")
    (tmp_path / "step_50").mkdir()
    (tmp_path / "step_50" / "manifest.json").write_bytes(msgspec.json.encode(manifest(50)))
    newest = checkpoint.find_latest(tmp_path)
    assert newest is not None and newest.manifest.step == 20


DYING = """
import os, signal, sys
from pathlib import Path
from configs.load import load_config
from configs.parallel import FsdpConfig
from learners import checkpoint
from learners.world import LONG_TIMEOUT, World
def write(folder):
    (folder / "engine").mkdir()
    (folder / "engine" / "weights").write_bytes(b"half of the w")
    os.kill(os.getpid(), signal.SIGKILL)
writer = checkpoint.CheckpointWriter(Path(sys.argv[1]), 2, World())
writer.begin_checkpoint(checkpoint.CheckpointManifest(7, "life", 0), write)
writer.take_written(wait=True)
"""


def test_what_a_killed_learner_was_writing_is_passed_over_and_written_anew(tmp_path: Path) -> None:
    written(tmp_path, 6)
    assert subprocess.run([sys.executable, "-c", DYING, str(tmp_path)]).returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2 and steps(tmp_path) == [6]
    written(tmp_path, 7)
    assert sorted(os.listdir(tmp_path)) == ["step_6", "step_7"]
    assert (tmp_path / "step_7" / "engine" / "weights").read_bytes() == b"weights"


REMOVING = """
import os, signal, sys
from pathlib import Path
from learners import checkpoint
from learners.world import World
def write(folder):
    (folder / "engine").mkdir()
    (folder / "engine" / "weights").write_bytes(b"weights")
    return [folder / "engine" / "weights"]
left = 1
def count(event, arguments):
    global left
    if event == "os.remove":
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
writer = checkpoint.CheckpointWriter(Path(sys.argv[1]), 2, World())
writer.begin_checkpoint(checkpoint.CheckpointManifest(7, "life", 0), write)
writer.take_written(wait=True)
"""


@pytest.mark.parametrize("dying", [DYING, REMOVING])
def test_what_a_killed_learner_leaves_of_a_checkpoint_takes_no_room_once_there_is_another(
    dying: str, tmp_path: Path
) -> None:
    """It may be as large as a checkpoint, and no learner comes to its step again."""
    written(tmp_path, 5, 6)
    assert subprocess.run([sys.executable, "-c", dying, str(tmp_path)]).returncode == -signal.SIGKILL
    for step in steps(tmp_path):
        checkpoint.verify_checkpoint(tmp_path / f"step_{step}")
    written(tmp_path, 8, 9)
    assert sorted(os.listdir(tmp_path)) == ["step_8", "step_9"]


@pytest.mark.parametrize("harm", ["changed", "cut", "gone"])
def test_a_file_that_is_not_what_was_written_is_named(harm: str, tmp_path: Path) -> None:
    written(tmp_path, 3)
    folder = tmp_path / "step_3"
    assert checkpoint.verify_checkpoint(folder).files.keys() == {"engine/weights"}
    path = folder / "engine" / "weights"
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(b"weighty" if harm == "changed" else b"weight")
    with pytest.raises(
        checkpoint.DamagedCheckpoint, match=f"{path} must be the file that was written .7 bytes, .* got"
    ):
        checkpoint.verify_checkpoint(folder)


def test_an_error_in_the_thread_reaches_the_loop(tmp_path: Path) -> None:
    def fail(folder: Path) -> list[Path]:
        raise OSError("no space left on device")

    writer = checkpoint.CheckpointWriter(tmp_path, 2, World())
    writer.begin_checkpoint(manifest(1), fail)
    with pytest.raises(OSError, match="no space left"):
        writer.begin_checkpoint(manifest(2), write)
    writer.begin_checkpoint(manifest(2), write)
    assert writer.take_written(wait=True) is not None and writer.take_written(wait=True) is None
    assert steps(tmp_path) == [2]


def test_a_folder_that_vanishes_while_its_size_is_looked_at_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def come_and_go(folder: Path) -> list[Path]:
        for _ in range(1000):
            shutil.rmtree(folder)
            folder.mkdir()
        return write(folder)

    monkeypatch.setattr(checkpoint, "LOOK_S", 0)
    writer = checkpoint.CheckpointWriter(tmp_path, 2, World())
    writer.begin_checkpoint(manifest(1), come_and_go)
    assert writer.take_written(wait=True) is not None


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    release = threading.Event()

    def slow(folder: Path) -> list[Path]:
        release.wait()
        return write(folder)

    writer = checkpoint.CheckpointWriter(tmp_path, 2, World())
    assert writer.begin_checkpoint(manifest(1), slow) is None
    assert writer.take_written() is None and steps(tmp_path) == []
    release.set()
    told = writer.begin_checkpoint(manifest(2), write)
    assert told is not None and told.step == 1 and steps(tmp_path) == [1] or steps(tmp_path) == [1, 2]


def test_a_checkpoint_of_another_engine_or_another_run_is_refused() -> None:
    config = load_config(["algo=grpo"])
    held = checkpoint.CheckpointManifest(3, "life", 0, ledger=checkpoint.LedgerTotals(90, 50, 1))
    check_same_run(held, config, checkpoint.LedgerTotals(120, 50, 1))  # what is in flight may differ
    check_same_run(held, config, None)
    with pytest.raises(ValueError, match="at step 3 50 tokens were trained and 1 masked, .* has 49 and 1"):
        check_same_run(held, config, checkpoint.LedgerTotals(90, 49, 1))
    with pytest.raises(
        ValueError, match="learner.engine must be megatron, which wrote the checkpoint, got fsdp"
    ):
        check_same_run(msgspec.structs.replace(held, engine="megatron"), config, None)


# ---- what is in it


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_qwen3(tmp_path_factory.mktemp("qwen3"))


def parts_of(world: World) -> list[Packed]:
    return pack_share(draw_batch(LENGTHS), range(len(LENGTHS)), 40, world.size, world.rank)


def state(engine: FsdpEngine) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in engine._collect_state().items()
    }


def trained_on(world: World, model: Path, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state when a checkpoint was begun, and the weights after another update; written while updates go
    on."""
    torch.manual_seed(world.rank)
    engine, parts = FsdpEngine(model), parts_of(world)
    engine.update(parts, negate_logprobs, 1e-2)
    before, write_it = state(engine), engine.copy_state()
    thread = threading.Thread(target=write_it, args=(folder,))
    thread.start()
    engine.update(parts, negate_logprobs, 1e-2)
    after = gather_weights(engine.stream_weights())
    for _ in range(4):
        engine.update(parts, negate_logprobs, 1e-2)
        list(engine.stream_weights())
    thread.join()
    return before, after


def taken_up(world: World, model: Path, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = FsdpEngine(model)
    engine.load_state(folder)
    loaded = state(engine)
    engine.update(parts_of(world), negate_logprobs, 1e-2)
    return loaded, gather_weights(engine.stream_weights())


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_checkpoint_of_two_ranks_is_of_its_moment_and_goes_on_with_any_number(
    number: int,
    qwen3: Path,
    tmp_path: Path,
) -> None:
    before, after = on_ranks(2, trained_on, tmp_path / "two", qwen3, tmp_path / "engine")[0]
    loaded, gone_on = on_ranks(number, taken_up, tmp_path / "then", qwen3, tmp_path / "engine")[0]
    assert loaded.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(loaded[name], tensor), name
    for name, tensor in after.items():
        if number == 2:
            assert torch.equal(gone_on[name], tensor), name
        torch.testing.assert_close(gone_on[name], tensor, atol=1e-4, rtol=0)


def replicas_state(world: World, model: Path, folder: Path) -> tuple[dict[str, Tensor], list[int]]:
    """The state of two replicas, which they write as we do and as older learners did; and the elements that
    each rank has written."""
    sync.stream.SHARED_BYTES = 16  # the model is small, and is divided all the same
    engine = FsdpEngine(model, layout=FsdpConfig(replicas=2))
    engine.update(parts_of(world), negate_logprobs, 1e-2)
    (own, _), older = engine.copy_state()(folder / "ours"), folder / "older"
    dcp.save(
        engine._collect_state(), storage_writer=HuggingFaceStorageWriter(str(older), save_distributed=True)
    )
    told = world.gather_messages(str(sum(rows.numel() for rows in load_file(own).values())).encode())
    return state(engine), [int(one) for one in told]


def loaded_states(world: World, model: Path, folder: Path) -> list[dict[str, Tensor]]:
    found = []
    for name in ("ours", "older"):
        engine = FsdpEngine(model)
        engine.load_state(folder / name)
        found.append(state(engine))
    return found


def test_replicas_divide_what_they_write_and_files_of_older_learners_load(
    qwen3: Path, tmp_path: Path
) -> None:
    before, sizes = on_ranks(2, replicas_state, tmp_path / "two", qwen3, tmp_path)[0]
    assert sum(sizes) == sum(tensor.numel() for tensor in before.values())
    assert min(sizes) > 0.3 * sum(sizes), "each about a half"
    for loaded in on_ranks(1, loaded_states, tmp_path / "one", qwen3, tmp_path)[0]:
        assert loaded.keys() == before.keys()
        assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.items())


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_that_lacks_a_ranks_rows_is_refused_by_name(tmp_path: Path) -> None:
    state = {"model.a": torch.arange(8.0), "model.b": torch.zeros(3)}
    assert dist.group.WORLD is not None
    for rank, (begin, end) in enumerate([(0, 3), (3, 6), (6, 8)]):
        write_rows(tmp_path, rank, {"model.a": CopiedRows(state["model.a"][begin:end].clone(), begin)})
    write_rows(tmp_path, 3, copy_own_rows({"model.b": state["model.b"]}, 0))
    loaded = {"model.a": torch.zeros(8), "model.b": torch.ones(3)}
    load_rows(tmp_path, loaded, dist.group.WORLD)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    (tmp_path / "rank_1.safetensors").unlink()
    with pytest.raises(dist.checkpoint.CheckpointException, match="must hold all of model.a, got .* 5 of 8"):
        load_rows(tmp_path, loaded, dist.group.WORLD)


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_of_another_model_is_refused_by_an_error_that_a_role_can_tell(
    qwen3: Path, tmp_path: Path
) -> None:
    engine = FsdpEngine(qwen3)
    write_rows(tmp_path, 0, copy_own_rows({"model.other": torch.zeros(3)}, 0))
    with pytest.raises(ValueError, match="must hold this model and its optimizer, got: Missing key"):
        engine.load_state(tmp_path)


def test_the_rows_of_a_checkpoint_are_written_from_where_they_are(tmp_path: Path) -> None:
    copied = copy_own_rows({f"model.{i}": torch.ones(1 << 12, 1 << 10) for i in range(2)}, 0)

    def memory(field: str) -> int:
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) << 10 if found else 0

    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    path = write_rows(tmp_path, 0, copied)
    assert memory("VmHWM") - before < path.stat().st_size / 4


def checkpointed_slowly(world: World, folder: Path) -> list[int]:
    """Two checkpoints one after the other, of which the second rank digests its part for longer than a
    collective of training may take."""
    learners.world.TIMEOUT = timedelta(seconds=2)
    digests = checkpoint.digest_files

    def slow(*arguments: Any) -> checkpoint.Digests:
        time.sleep(4 * world.rank)
        return digests(*arguments)

    checkpoint.digest_files = slow
    store = dist.FileStore(str(folder / "writers"), world.size)
    writers = World(world.rank, world.size, store, LONG_TIMEOUT)
    writer, found = checkpoint.CheckpointWriter(folder / "checkpoints", 2, writers), []
    for step in (1, 2):
        done = writer.begin_checkpoint(manifest(step), write if world.rank == 0 else lambda folder: [])
        found += [] if done is None else [done.step]
    last = writer.take_written(wait=True)
    return [*found, -1 if last is None else last.step]


def test_a_checkpoint_that_takes_longer_than_a_collective_may_is_waited_for(tmp_path: Path) -> None:
    assert on_ranks(2, checkpointed_slowly, tmp_path, tmp_path) == [[1, 2], [1, 2]]
    assert steps(tmp_path / "checkpoints") == [1, 2]


def loaded_slowly(world: World, model: Path, folder: Path) -> float:
    """Seconds that a checkpoint takes to load, where the second rank reads for longer than a collective of
    training may take."""
    engine, read = FsdpEngine(model), HuggingFaceStorageReader.read_data
    engine.copy_state()(folder)
    world.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)

    def slow(*arguments: Any) -> Any:
        time.sleep(5 * world.rank)
        return read(*arguments)

    began = time.monotonic()
    with patch.object(HuggingFaceStorageReader, "read_data", slow):
        engine.load_state(folder)
    return time.monotonic() - began


def test_a_checkpoint_that_is_read_for_longer_than_a_collective_may_take_is_waited_for(
    qwen3: Path, tmp_path: Path
) -> None:
    assert min(on_ranks(2, loaded_slowly, tmp_path / "ranks", qwen3, tmp_path / "engine")) >= 5


def failing_to_complete(world: World, folder: Path) -> str:
    def fail(*arguments: Any) -> None:
        raise OSError("the disk is gone")

    checkpoint.finish_checkpoint = fail
    writer = checkpoint.CheckpointWriter(folder / "checkpoints", 2, world)
    writer.begin_checkpoint(manifest(1), write if world.rank == 0 else lambda folder: [])
    try:
        writer.take_written(wait=True)
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_checkpoint_that_cannot_be_completed_is_told_on_every_rank(tmp_path: Path) -> None:
    first, second = on_ranks(2, failing_to_complete, tmp_path, tmp_path)
    assert first == "the disk is gone"
    assert second == (
        f"rank 0 on {os.uname().nodename} could not write its part of the checkpoint: "
        "OSError: the disk is gone"
    )
    assert not list((tmp_path / "checkpoints").iterdir()), "no remains are left"


def test_a_full_disk_is_named_and_leaves_the_checkpoint_before_and_no_remains(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("there is no right here to mount a file system")
    try:
        state = {"weights": torch.ones(1 << 18)}  # 1 MB

        def save(folder: Path) -> list[Path]:
            (folder / "engine").mkdir()
            write_rows(folder / "engine", 0, copy_own_rows(state, 0))
            save_file(state, folder / "engine" / "random")
            return list((folder / "engine").iterdir())

        def fill(folder: Path) -> list[Path]:
            (folder / "engine").mkdir()
            save_file(state | {"more": torch.ones(1 << 20)}, folder / "engine" / "random")
            return []

        def save_much(folder: Path) -> list[Path]:
            state["weights"] = torch.ones(1 << 20)
            return save(folder)

        writer = checkpoint.CheckpointWriter(disk / "checkpoints", 2, World())
        writer.begin_checkpoint(manifest(1), save)
        for step, part in ((2, fill), (3, save_much)):
            writer.take_written(wait=True)
            writer.begin_checkpoint(manifest(step), part)
            with pytest.raises(
                DiskFull, match=rf"^the disk of {disk}/checkpoints must have room for [\d,]+ bytes more, got"
            ):
                writer.take_written(wait=True)
            assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step_1"]
            checkpoint.verify_checkpoint(disk / "checkpoints" / "step_1")
        writer.begin_checkpoint(manifest(4), write)
        assert writer.take_written(wait=True) is not None, "after room was made it goes on"
        writer.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def part_of_a_checkpoint(world: World, folder: Path) -> str:
    writer = checkpoint.CheckpointWriter(folder, 1, world)

    def save(temporary: Path) -> list[Path]:
        if world.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return []

    writer.begin_checkpoint(manifest(2), save)
    try:
        writer.take_written(wait=True)
    except DiskFull as error:
        return str(error)
    return "nothing"


def test_a_rank_without_room_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        store = tmp_path / "store"
        joined = pool.map(lambda rank: World(rank, 2, torch.distributed.FileStore(str(store), 2)), range(2))
        worlds = list(joined)
        told = list(pool.map(lambda world: part_of_a_checkpoint(world, tmp_path / "checkpoints"), worlds))
    named = f"on {os.uname().nodename}, the disk of {tmp_path}/checkpoints must have room for"
    assert all(text.startswith(named) for text in told)
    assert not list((tmp_path / "checkpoints").iterdir())


# ---- each rank reads what it has written


def write_part(rank: int, folder: Path) -> list[Path]:
    (folder / "engine").mkdir(exist_ok=True)
    path = folder / "engine" / f"part_{rank}"
    path.write_bytes(bytes([rank]) * 1000)
    return [path]


def watched_reads(world: World, folder: Path, spoil: str) -> tuple[list[str], list[str], str]:
    """Returns the files that a rank reads for a checkpoint, and to verify it; then what it raises."""
    read: list[str] = []
    digests = checkpoint.digest_files

    def watch(folder: Path, paths: Iterable[Path], *more: Any) -> checkpoint.Digests:
        found = digests(folder, paths, *more)
        read.extend(found)
        return found

    checkpoint.digest_files = watch
    writer = checkpoint.CheckpointWriter(folder, 2, world)
    writer.begin_checkpoint(manifest(3), partial(write_part, world.rank))
    assert writer.take_written(wait=True) is not None
    own, read[:] = list(read), []
    if spoil and world.rank == 0:
        (folder / "step_3" / "engine" / spoil).write_bytes(b"spoiled")
    world.barrier()
    try:
        checkpoint.verify_checkpoint(folder / "step_3", world)
    except checkpoint.DamagedCheckpoint as error:
        return own, read, str(error)
    return own, read, ""


@pytest.mark.parametrize("spoil", ["", "part_1"])
def test_each_rank_digests_and_verifies_the_files_that_it_has_written(spoil: str, tmp_path: Path) -> None:
    found = on_ranks(3, watched_reads, tmp_path / "ranks", tmp_path / "checkpoints", spoil)
    for rank, (digested, verified, error) in enumerate(found):
        assert digested == verified == [f"engine/part_{rank}"]
        assert ("engine/part_1 must be the file that was written" in error) == bool(spoil)
        assert (f"(on {os.uname().nodename})" in error) == bool(spoil)
    (saved,) = checkpoint.find_checkpoints(tmp_path / "checkpoints")
    assert saved.manifest.ranks == 3
    assert {name: file.rank for name, file in saved.manifest.files.items()} == {
        f"engine/part_{rank}": rank for rank in range(3)
    }


@given(
    sizes=st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 7)), max_size=20),
    ranks=st.integers(0, 8),
    size=st.integers(1, 8),
)
def test_every_file_is_verified_by_one_rank_whatever_number_of_ranks_there_is(
    sizes: list[tuple[int, int]], ranks: int, size: int
) -> None:
    files = {f"{number}": checkpoint.FileDigest(size, "", rank) for number, (size, rank) in enumerate(sizes)}
    held = msgspec.structs.replace(manifest(1), files=files, ranks=ranks)
    chosen = [checkpoint.choose_files(held, rank, size) for rank in range(size)]
    assert sorted(name for names in chosen for name in names) == sorted(files)
    if ranks != size:
        loads = [sum(files[name].num_bytes for name in names) for names in chosen]
        largest = max((file.num_bytes for file in files.values()), default=0)
        assert max(loads) - min(loads) <= largest + len(files)


def test_a_checkpoint_of_an_older_learner_is_verified(tmp_path: Path) -> None:
    written(tmp_path, 3)
    path = tmp_path / "step_3" / "manifest.json"
    told = msgspec.json.decode(path.read_bytes())
    del told["ranks"], told["files"]["engine/weights"]["rank"]
    path.write_bytes(msgspec.json.encode(told))
    assert checkpoint.verify_checkpoint(tmp_path / "step_3").ranks == 0
    (tmp_path / "step_3" / "engine" / "weights").write_bytes(b"weighty")
    with pytest.raises(checkpoint.DamagedCheckpoint, match="weights must be the file that was written"):
        checkpoint.verify_checkpoint(tmp_path / "step_3")


def checkpointed_state(world: World, model: Path, folder: Path) -> list[str]:
    """The files that the ranks of an engine claim to have written, and those that are there."""
    write_it = FsdpEngine(model).copy_state()
    claimed = [str(path.relative_to(folder)) for path in write_it(folder)]
    return [
        one
        for told in world.gather_messages(msgspec.json.encode(claimed))
        for one in msgspec.json.decode(told)
    ]


def test_an_engine_names_all_files_that_it_has_written(qwen3: Path, tmp_path: Path) -> None:
    claimed = on_ranks(2, checkpointed_state, tmp_path / "ranks", qwen3, tmp_path / "engine")[0]
    there = [
        str(path.relative_to(tmp_path / "engine"))
        for path in (tmp_path / "engine").rglob("*")
        if path.is_file()
    ]
    assert sorted(claimed) == sorted(there) and len(there) == 4
