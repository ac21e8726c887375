"""The part that runs inside each worker process of an engine of several GPUs: takes up this rank's part of
each version, and attests it.

    engine ── check_version ──▶ every rank: opens the file, reads its seal, finds its parts    nothing touched
           ◀── answers ────────
           ── take_version ───▶ every rank: copies its parts, digests them in the file and where they arrive
           ◀── answers ────────

Importing this module prepares the process, which nothing but a worker may want. vLLM imports it there before
it builds the model. Written against vLLM 0.32.
"""

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import vllm._custom_ops as ops
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import WorkerProc

from sync.manifest import EngineMismatch
from sync.rank_answers import RankAnswer, answer_call
from sync.rank_errors import NAMES_VARIABLE, ErrorNote
from sync.snapshot import Snapshot, read_manifest
from sync.vllm_plugin import WeightSync, keep_weights_unpacked


def prepare_worker() -> None:
    """Makes this process a worker of ours, before its model is built.

    Signals are for the generator, which ends its workers itself: a terminal or a scheduler sends them to all
    processes, and a worker that ended would take along the groups that the generator has begun.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None, "a worker has been started by its engine"
    threading.Thread(target=_end_with, args=(parent.pid,), daemon=True, name="engine-watch").start()
    rank = int(multiprocessing.current_process().name.rpartition("-")[2])
    # The logger of vLLM's loop, which keeps all errors to itself.
    logging.getLogger(WorkerProc.__module__).addHandler(ErrorNote(Path(os.environ[NAMES_VARIABLE]), rank))
    if current_platform.is_cpu():
        # vLLM compiles one line of its sampler otherwise.
        torch._dynamo.config.disable = True
        keep_weights_unpacked()


def _end_with(pid: int) -> None:
    """Ends this process as soon as the engine's has ended, whatever it computes meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    os._exit(1)


class RankSync(WeightSync):
    """vLLM's `worker_extension_cls` for a rank of an engine of several GPUs.

    The engine calls `answer` alone, on all ranks at once.
    """

    def answer(self, method: str, *arguments: Any) -> RankAnswer:
        """Calls a method of the worker, and returns its result or its error."""
        return answer_call(lambda: getattr(self, method)(*arguments))

    def describe_rank(self) -> tuple[int, int, str]:
        """Returns rank, process id and device."""
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "") if torch.cuda.is_available() else "cpu"
        return get_tensor_model_parallel_rank(), os.getpid(), device

    def prepare_model(self) -> None:
        """Checks, beside what `WeightSync` checks, that this process has taken over the engine's settings.

        Raises RuntimeError.
        """
        super().prepare_model()
        expected: dict[str, tuple[Any, Any]] = {}
        if self.is_on_cpu:
            expected = {
                "threads": (torch.get_num_threads(), 1),
                "torch._dynamo.config.disable": (torch._dynamo.config.disable, True),
                "vLLM's oneDNN": (ops._supports_onednn, False),
                "VLLM_CPU_ATTN_SPLIT_KV": (os.environ.get("VLLM_CPU_ATTN_SPLIT_KV"), "0"),
            }
        elif self.model_runner.dtype == torch.float32:
            expected["TRITON_F32_DEFAULT"] = (os.environ.get("TRITON_F32_DEFAULT"), "ieee")
        wrong = {name: found for name, (found, wanted) in expected.items() if found != wanted}
        if wrong:
            raise RuntimeError(f"a worker process must have the engine's settings, got {wrong}")

    def forget_names(self) -> None:
        """Removes the name of the memory through which this rank would broadcast to the others."""
        queue = get_tp_group().mq_broadcaster
        if queue is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False

    def take_experts(self, request: str) -> list[Any]:
        """Returns the experts of a request's tokens on rank 0, nothing on others: all have routed alike."""
        experts = super().take_experts(request)
        return experts if get_tensor_model_parallel_rank() == 0 else []

    def check_version(self, locator: str, digest: str) -> None:
        """Opens the version whose manifest lies at `locator`, for `take_version`. It has this digest, and its
        file has been verified on this host, or is now.

        Raises, the parameters untouched, FileNotFoundError when it is gone and DigestMismatch when it is not
        what was published or does not fit the model.
        """
        self._drop_version()
        snapshot = Snapshot(read_manifest(locator, digest))
        self._find_layout(snapshot.manifest)
        snapshot.attest(map_pages=False)
        self._checked = snapshot

    def take_version(self) -> None:
        """Takes up this rank's parts of the version that was checked last. Raises EngineMismatch, the
        parameters in an unknown state, when they do not end up as they are in the file."""
        snapshot: Snapshot = self._checked
        layout = self._find_layout(snapshot.manifest)
        with torch.no_grad():
            if self.is_on_cpu:
                published, held = layout.copy_parts(snapshot)
            else:
                self._load_by_vllm(snapshot)
                published, held = layout.part_digests(snapshot), layout.held_digests()
        self._published = snapshot.manifest.digest, published
        self._drop_version()
        _expect_parts(published, held)

    def _drop_version(self) -> None:
        """Unmaps the file of the version that was checked last. No parameter lies in it."""
        if (checked := self.__dict__.pop("_checked", None)) is not None:
            checked.release_memory()

    def check_held(self, locator: str, digest: str) -> None:
        """Raises EngineMismatch unless the parameters hold now what the version's file holds: by the digests
        that were taken when this rank took it up, or else by the file."""
        taken, published = getattr(self, "_published", ("", {}))
        if taken != digest:
            snapshot = Snapshot(read_manifest(locator, digest))
            snapshot.attest(map_pages=False)
            published = self._find_layout(snapshot.manifest).part_digests(snapshot)
        _expect_parts(published, self._found_layout.held_digests())

    def part_digests(self) -> dict[str, str]:
        """Computes the digests of this rank's parts, as the parameters hold them now, by the names of the
        tensors of the version that was taken up last."""
        return self._found_layout.held_digests()


def _expect_parts(published: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Raises EngineMismatch unless what a rank holds, by the names of the tensors, is what the file holds."""
    differ = [name for name, digest in published.items() if held.get(name) != digest]
    if differ:
        names = ", ".join(differ[:3]) + (", ..." if len(differ) > 3 else "")
        raise EngineMismatch(
            f"the parts of {len(differ)} of {len(published)} tensors in the engine are not those of the "
            f"published file: {names}"
        )


prepare_worker()
