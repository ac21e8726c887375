"""An engine of two ranks, which are worker processes: it samples what an engine of one samples, and each rank
attests its part of every version.

One engine of each kind for all tests, and one model: a mixture whose first layer is dense. The vocabulary of
96 fills one rank's part of 64 rows and half of the other's.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import failing_rank
import psutil
import pytest
import rank_faults
import torch
from safetensors.torch import load_file
from test_mixtures import MIXTURES, SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from generators.engine import Completion, EngineDied, Sample
from slipstream.role_failures import explain_engine_shortage
from sync.manifest import DigestMismatch, EngineMismatch, Manifest
from sync.publisher import Publisher
from sync.rank_answers import read_answers
from sync.rank_errors import ErrorNote, RankErrors
from sync.snapshot import Snapshot, read_manifest
from sync.stream import whole_parts
from sync.transports.fetcher import Fetcher
from sync.transports.server import SnapshotServer

TOLERANCE = 1e-5
"""Largest difference between log-probabilities of one and of two ranks. They sum in another order; wrong
weights differ by more than 0.1."""
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def publish(publisher: Publisher, folder: Path, seed: int, version: int) -> Manifest:
    """Publishes a model of random weights that are large enough that any mistake shows."""
    torch.manual_seed(seed)
    sizes = SIZES | MIXTURES["qwen3_moe"] | {"mlp_only_layers": [0]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return publisher.publish_version(version, whole_parts(load_file(folder / "model.safetensors")))


class Pair:
    """Engines of one rank and of two, and two versions for them."""

    def __init__(self, folder: Path) -> None:
        from generators.vllm_engine import VllmEngine

        self.publisher, self.spoiled = Publisher(folder / "weights", "x"), Publisher(folder / "spoiled", "x")
        self.versions = [publish(self.publisher, folder / "model", seed, seed) for seed in (0, 1)]
        self.one, self.two = (
            VllmEngine(
                str(folder / "model"), dtype="float32", max_model_len=160, max_sequences=32, kv_cache_mb=16,
                tensor_parallel=ranks, record_experts=True,
            )
            for ranks in (1, 2)
        )  # fmt: skip
        assert self.two._workers is not None
        self.workers = self.two._workers
        self._published = 1

    def publish_again(self) -> Manifest:
        """Publishes the newest version's tensors as another version, in a folder of its own: the first one
        keeps two."""
        self._published += 1
        tensors = dict(Snapshot(self.versions[1]).named_tensors())
        return self.spoiled.publish_version(self._published, whole_parts(tensors))

    def do_on_ranks(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        answers: list[Any] = self.two._core.collective_rpc(function, args=arguments, kwargs=named)
        return answers


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    set_num_threads, disabled = torch.set_num_threads, torch._dynamo.config.disable
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.one.shutdown()
    pair.two.shutdown()
    pair.publisher.close()
    pair.spoiled.close()
    torch.set_num_threads, torch._dynamo.config.disable = set_num_threads, disabled


def play(engine: Any, pair: Pair, *, update_after: int) -> dict[str, Completion]:
    """Plays eight samples, half of them greedy, that begin under version 0 and end under version 1."""
    engine.load_version(Snapshot(pair.versions[0]))
    for number in range(8):
        prompt = list(range(5 + number, 17 + number))
        is_greedy = number % 2 == 0
        engine.add_sample(Sample(id=str(number), prompt=prompt, max_tokens=24, seed=number, greedy=is_greedy))
    for _ in range(update_after):
        assert engine.step() == []
    engine.load_version(Snapshot(pair.versions[1]))
    done: dict[str, Completion] = {}
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
    return done


@pytest.mark.timeout(300)  # the first imports vLLM in three processes
def test_two_ranks_sample_what_one_samples_across_an_update_and_route_alike(pair: Pair) -> None:
    alone, together = (play(engine, pair, update_after=10) for engine in (pair.one, pair.two))
    for number, one in alone.items():
        two = together[number]
        assert (two.tokens, two.finish_reason) == (one.tokens, one.finish_reason)
        assert two.versions == one.versions == [0] * 10 + [1] * 14
        assert two.logprobs == pytest.approx(one.logprobs, abs=TOLERANCE)
        assert one.experts is not None and two.experts is not None
        assert (two.experts == one.experts).all()


def test_a_sample_of_two_ranks_is_the_same_alone_and_in_a_crowd_to_the_last_bit(pair: Pair) -> None:
    crowd = play(pair.two, pair, update_after=0)
    for number in ("0", "3"):
        prompt = list(range(5 + int(number), 17 + int(number)))
        sample = Sample(
            id=number, prompt=prompt, max_tokens=24, seed=int(number), greedy=int(number) % 2 == 0
        )
        pair.two.add_sample(sample)
        found: list[Completion] = []
        while not found:
            found = pair.two.step()
        assert (found[0].tokens, found[0].logprobs) == (crowd[number].tokens, crowd[number].logprobs)


def test_each_rank_holds_a_part_of_every_divided_tensor_and_says_its_digest(pair: Pair) -> None:
    manifest = pair.versions[0]
    pair.two.load_version(Snapshot(manifest))
    pair.two.check_held(manifest)
    with pytest.raises(EngineMismatch, match="rank 0 and 1: the parts of 35 of 35 tensors"):
        pair.two.check_held(pair.versions[1])
    held = pair.two.held_digests(manifest)
    whole = {entry.name: entry.digest for entry in manifest.tensors}
    assert len(held) == 2 * len(whole)
    for name, digest in whole.items():
        is_divided = "norm" not in name and not name.endswith("mlp.gate.weight")
        parts = {held[f"{rank}: {name}"] for rank in (0, 1)}
        assert len(parts | {digest}) == (3 if is_divided else 1), name


def test_parts_lie_where_vllms_own_loaders_put_them(pair: Pair) -> None:
    """Experts apart, which vLLM's CPU kernel reads in an order of its own that its loaders do not heed."""
    manifest = pair.versions[0]
    elsewhere = read_answers(pair.do_on_ranks(rank_faults.load_by_vllm, manifest.locator, manifest.digest))
    assert all(".experts." in name for names in elsewhere for name in names)
    pair.two.load_version(Snapshot(manifest))


@pytest.mark.parametrize(
    ("parameter", "tensor"),
    [
        ("model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.gate_proj.weight"),
        (O_PROJ, O_PROJ),
        ("lm_head.weight", "lm_head.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_a_changed_number_on_rank_1_is_named_with_its_rank_and_tensor(
    pair: Pair, parameter: str, tensor: str
) -> None:
    manifest = pair.versions[0]
    pair.two.load_version(Snapshot(manifest))
    pair.do_on_ranks(rank_faults.change_element, parameter)
    with pytest.raises(EngineMismatch) as caught:
        pair.two.check_held(manifest)
    assert str(caught.value).startswith("rank 1: the parts of 1 of 35 tensors in the engine are not")
    assert str(caught.value).endswith(f": {tensor}")
    pair.two.load_version(Snapshot(manifest))


def test_a_rank_that_does_not_take_its_part_stops_the_engine_until_an_update_succeeds(pair: Pair) -> None:
    pair.two.load_version(Snapshot(pair.versions[0]))
    pair.do_on_ranks(rank_faults.lose_rows, (64, 48))
    with pytest.raises(
        EngineMismatch, match=r"^rank 1: the parts of 1 of 35 tensors .*layers.0.mlp.down_proj"
    ):
        pair.two.load_version(Snapshot(pair.versions[1]))
    assert pair.two.version is None
    pair.do_on_ranks(rank_faults.heal)
    pair.two.load_version(Snapshot(pair.versions[1]))
    pair.two.check_held(pair.versions[1])


def test_a_version_that_one_rank_cannot_have_is_taken_up_by_none(pair: Pair) -> None:
    held = pair.versions[0]
    pair.two.load_version(Snapshot(held))
    pair.do_on_ranks(rank_faults.lose_sight, until_healed=True)
    with pytest.raises(FileNotFoundError, match="^rank 1: .* is gone"):
        pair.two.load_version(Snapshot(pair.versions[1]))
    pair.do_on_ranks(rank_faults.lose_sight, until_healed=False)
    assert pair.two.version == held.version
    pair.two.check_held(held)


def test_damage_and_loss_are_found_before_any_rank_is_touched(pair: Pair) -> None:
    held = pair.versions[0]
    pair.two.load_version(Snapshot(held))
    damaged = pair.publish_again()
    with open(damaged.path, "r+b") as file:
        file.seek(damaged.num_bytes - 1000)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DigestMismatch, match="1 of 35 tensors in the file"):
        pair.two.load_version(Snapshot(damaged))
    gone = Snapshot(pair.publish_again())
    gone.attest()
    Path(gone.manifest.path).unlink()
    with pytest.raises(FileNotFoundError, match=f"rank 0 and 1: .*{gone.manifest.path}"):
        pair.two.load_version(gone)
    small = pair.spoiled.publish_version(100, whole_parts({O_PROJ: torch.zeros(3, 3)}))
    with pytest.raises(DigestMismatch, match="rank 0 and 1: .*o_proj.weight was published as .3, 3., the"):
        pair.two.load_version(Snapshot(small))
    assert pair.two.version == held.version
    pair.two.check_held(held)


def test_a_version_from_another_host_is_fetched_once_for_all_ranks_and_each_copies_its_parts_alone(
    pair: Pair, tmp_path: Path
) -> None:
    manifest = pair.versions[1]
    server = SnapshotServer(Path(manifest.path).parent, "tcp://127.0.0.1:0")
    fetcher = Fetcher(tmp_path / "host")
    try:
        found = fetcher.fetch_version(server.address, Path(manifest.locator).name, digest=manifest.digest)
        fetched = Snapshot(read_manifest(found, manifest.digest))
        pair.do_on_ranks(rank_faults.count_bytes)
        pair.two.load_version(fetched)
        pair.two.check_held(manifest)
        copied = pair.do_on_ranks(rank_faults.read_count)
        assert fetcher.bytes_received == manifest.num_bytes
    finally:
        fetcher.close()
        server.close()
    sizes = {entry.name: Snapshot(manifest).view_tensor(entry.name).nbytes for entry in manifest.tensors}
    kept = {name: size for name, size in sizes.items() if ".experts." not in name}
    whole = {name: size for name, size in kept.items() if "norm" in name or name.endswith("mlp.gate.weight")}
    # Of 96 rows of the vocabulary rank 0 has 64.
    rows = sum(size for name, size in kept.items() if name in ("model.embed_tokens.weight", "lm_head.weight"))
    halves = (sum(kept.values()) - sum(whole.values()) - rows) // 2 + sum(whole.values())
    assert copied == [halves + rows * 2 // 3, halves + rows // 3]


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_four_ranks_share_heads_of_keys_and_values_as_vllms_own_loader_does(
    pair: Pair, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads are held by two ranks each, one by all four. `pair` has made this process one of vLLM's."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import linear

    from sync.vllm_plugin import _find_slices

    names = {"q": 8, "k": num_kv_heads, "v": num_kv_heads}
    published = {name: torch.randn(heads * 16, 32) for name, heads in names.items()}
    monkeypatch.setattr(linear, "get_tensor_model_parallel_world_size", lambda: 4)
    for rank in range(4):
        monkeypatch.setattr(linear, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        with set_current_vllm_config(VllmConfig()):
            layer = linear.QKVParallelLinear(32, 16, 8, num_kv_heads, bias=False, params_dtype=torch.float32)
        layer.weight.data.fill_(torch.nan)
        for name, tensor in published.items():
            layer.weight.weight_loader(layer.weight, tensor, name)
        cut = [
            piece
            for tensor, held in zip(published.values(), _find_slices(layer, "weight"), strict=True)
            for piece in held.cut_tensor(tensor)
        ]
        assert torch.equal(torch.cat(cut), layer.weight.data)


def test_workers_share_nothing_by_a_name_and_signals_do_not_end_them(pair: Pair) -> None:
    pids = [worker.proc.pid for worker in pair.workers.workers]
    mapped = [
        line.split(maxsplit=5)[5]
        for pid in pids
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    ]
    assert mapped and all(name.endswith("(deleted)") for name in mapped)
    assert not pair.workers._names.folder.exists()
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    pair.two.load_version(Snapshot(pair.versions[0]))
    pair.two.check_held(pair.versions[0])


def test_a_worker_that_dies_ends_the_engine_in_one_sentence_and_its_siblings_with_it(pair: Pair) -> None:
    """The last test: the engine is of no use afterwards."""
    pair.two.load_version(Snapshot(pair.versions[0]))
    processes = [psutil.Process(worker.proc.pid) for worker in pair.workers.workers]
    pair.two.add_sample(Sample(id="0", prompt=[5, 6, 7], max_tokens=100, seed=0))
    pair.two.step()
    processes[1].kill()
    says = f"the worker process of rank 1 of the engine .pid {processes[1].pid}. has died: killed by SIGKILL"
    with pytest.raises(EngineDied, match=says):
        while pair.two.num_unfinished:
            pair.two.step()
    with pytest.raises(EngineDied, match=says):
        pair.two.load_version(Snapshot(pair.versions[1]))
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    with pytest.raises(EngineDied, match=says):
        pair.two._core.sleep(level=2, mode="keep")


def make_idle_ranks(folder: Path, second: tuple[Any, tuple[Any, ...]] | None = None) -> tuple[Any, list[Any]]:
    """Returns an executor whose two workers are processes that only sleep, or the second one calls something
    with the executor's folder and these arguments."""
    from generators.vllm_workers import WorkerProcesses
    from generators.worker_names import WorkerNames

    executor = WorkerProcesses.__new__(WorkerProcesses)
    executor._died, executor._names = threading.Event(), WorkerNames(folder)
    executor._errors = RankErrors(executor._names.folder)
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=time.sleep, args=(600,), daemon=True) for _ in range(2)]
    if second is not None:
        arguments = executor._names.folder, *second[1]
        processes[1] = start(target=second[0], args=arguments, daemon=True)
    executor.workers = [
        SimpleNamespace(rank=rank, proc=process, death_writer=None, worker_response_mq=None)
        for rank, process in enumerate(processes)
    ]  # type: ignore[assignment]
    for process in processes:
        process.start()
    return executor, processes


@pytest.fixture
def idle_ranks(tmp_path: Path) -> Iterator[tuple[Any, list[Any]]]:
    executor, processes = make_idle_ranks(tmp_path)
    yield executor, processes
    for process in processes:
        process.kill()
        process.join()


def test_a_rank_that_hangs_ends_the_engine_as_one_that_dies_and_is_killed(
    idle_ranks: tuple[Any, list[Any]],
) -> None:
    executor, (first, second) = idle_ranks
    os.kill(second.pid, signal.SIGSTOP)
    says = f"worker processes of the engine .pids {first.pid} and {second.pid}. hang: RPC call to sample"
    with pytest.raises(EngineDied, match=says), executor.naming_dead():
        raise TimeoutError("RPC call to sample_tokens timed out.")
    assert [first.exitcode, second.exitcode] == [-signal.SIGKILL] * 2
    with pytest.raises(EngineDied, match=says):
        executor.collective_rpc("answer")


def test_a_rank_that_dies_is_named_before_the_memory_of_the_others_is_free(
    idle_ranks: tuple[Any, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, (_, second) = idle_ranks
    goes_on, is_ending = threading.Event(), threading.Event()

    def end_slowly(workers: list[Any]) -> None:
        is_ending.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(executor, "_ensure_worker_termination", end_slowly, raising=False)
    executor.start_worker_monitor()
    second.kill()
    assert is_ending.wait(60)
    try:
        with pytest.raises(EngineDied, match="rank 1 of the engine .* has died: killed by SIGKILL"):
            executor.collective_rpc("answer")
    finally:
        goes_on.set()


def test_a_rank_that_is_killed_while_the_engine_starts_is_named(
    idle_ranks: tuple[Any, list[Any]],
) -> None:
    executor, (first, second) = idle_ranks
    first.terminate()
    executor._ensure_worker_termination([first, second])
    assert f"rank 0 of the engine (pid {first.pid}) has died: killed by SIGTERM" in executor.death
    assert second.exitcode == -signal.SIGKILL


def test_an_error_of_one_rank_ends_it_and_is_the_engines_error_with_its_text(tmp_path: Path) -> None:
    """vLLM keeps the error of a rank that starts to itself, and never hears of one on rank 1 in a step."""
    message = "CUDA out of memory. Tried to allocate 2 GiB"
    executor, (first, second) = make_idle_ranks(tmp_path, (failing_rank.fail_in_loop, (1, message)))
    executor.start_worker_monitor()
    says = rf"^rank 1 of the engine .pid {second.pid}. has failed: RuntimeError: {message}"
    with pytest.raises(RuntimeError, match=says) as caught, executor.naming_dead():
        assert executor._died.wait(60)
        raise RuntimeError("cancelled")
    assert not isinstance(caught.value, EngineDied) and "in fail_in_loop" in str(caught.value)
    assert [first.exitcode, second.exitcode] == [-signal.SIGKILL, 1]
    advice = pytest.raises(ValueError, match=r"max_model_len .* got: rank 1 of .* out of memory. Tried to ")
    with advice, explain_engine_shortage():
        raise caught.value


def note_error(note: ErrorNote, error: Exception) -> None:
    """Notes an error as vLLM's loop in a rank logs it."""
    try:
        raise error
    except Exception:
        note.emit(logging.makeLogRecord({"exc_info": sys.exc_info()}))


def test_a_ranks_value_error_is_told_in_a_sentence_and_keeps_its_traceback_for_the_log(
    tmp_path: Path,
) -> None:
    errors = RankErrors(tmp_path)
    note_error(ErrorNote(tmp_path, 0), ValueError("not enough values to unpack"))
    assert (first := errors.read_first()) is not None
    error = first.make_error()
    assert isinstance(error, ValueError) and str(error).endswith("has failed: not enough values to unpack")
    assert "in note_error" in "".join(traceback.format_exception(error))


def test_an_error_that_cannot_be_noted_whole_hides_no_other_and_does_not_keep_rank_0_from_answering(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    errors, note = RankErrors(tmp_path), ErrorNote(tmp_path, 0)
    file = os.dup(note._file)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, note._file)
    note_error(note, RuntimeError("no room for this one"))
    assert errors.read_first() is None and "no room for this one" in capfd.readouterr().err
    os.dup2(file, note._file)
    os.write(note._file, b'{"rank":1,"pid":')  # so much of a note had room
    note_error(note, FileNotFoundError("model-\udcff.json"))
    assert (first := errors.read_first()) is not None
    assert str(first.make_error()).splitlines()[0].endswith("FileNotFoundError: model-?.json")
    for one in (file, full, note._file):
        os.close(one)


def test_the_rank_that_was_killed_is_named_although_others_have_ended_before_the_engine_looks(
    tmp_path: Path,
) -> None:
    """An engine whose host stood still for a moment finds them all dead at once."""
    executor, (first, second) = make_idle_ranks(tmp_path, (failing_rank.fail_in_loop, (1, "closed by peer")))
    second.join(60)
    first.kill()
    first.join(60)
    assert [first.exitcode, second.exitcode] == [-signal.SIGKILL, 1]
    executor.workers.reverse()
    executor.start_worker_monitor()
    with pytest.raises(EngineDied, match="rank 0 of the engine .* has died: killed by SIGKILL"):
        executor.collective_rpc("answer")


def test_a_rank_that_others_killed_is_the_cause_of_the_errors_that_its_siblings_meet(
    idle_ranks: tuple[Any, list[Any]],
) -> None:
    executor, (_, second) = idle_ranks
    note_error(ErrorNote(executor._names.folder, 0), ConnectionError("closed by peer"))
    executor.start_worker_monitor()
    second.kill()
    with pytest.raises(EngineDied, match="rank 1 of the engine .* has died: killed by SIGKILL"):
        executor.collective_rpc("answer")
