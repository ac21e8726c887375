"""Faults inside the worker processes of an engine of several GPUs. vLLM calls these functions there, on every
rank; they do something on rank 1 alone, or say what all do."""

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank

import sync.engine_layout
from sync import rank_slices
from sync.digest import tensor_digest
from sync.rank_answers import RankAnswer, answer_call
from sync.snapshot import Snapshot, read_manifest


def change_element(worker: Any, parameter: str) -> None:
    if get_tensor_model_parallel_rank() == 1:
        dict(worker.model_runner.get_model().named_parameters())[parameter].data.view(-1)[3] += 1e-3


def lose_rows(worker: Any, shape: tuple[int, ...]) -> None:
    """From now on parts of this shape do not arrive whole."""

    def copy(pieces: list[torch.Tensor], place: torch.Tensor) -> tuple[str, str]:
        published, held = rank_slices.copy_pieces(pieces, place)
        if tuple(place.shape) != shape:
            return published, held
        place[0] = 0
        return published, tensor_digest(place)

    if get_tensor_model_parallel_rank() == 1:
        sync.engine_layout.copy_pieces = copy


def heal(worker: Any) -> None:
    sync.engine_layout.copy_pieces = rank_slices.copy_pieces


def lose_sight(worker: Any, *, until_healed: bool) -> None:
    """From now on the rank finds no manifest."""
    from sync import vllm_ranks

    def find_nothing(locator: str, digest: str) -> None:
        raise FileNotFoundError(f"{locator} is gone")

    if get_tensor_model_parallel_rank() == 1:
        vllm_ranks.read_manifest = find_nothing if until_healed else read_manifest  # type: ignore[assignment]


def load_by_vllm(worker: Any, locator: str, digest: str) -> RankAnswer:
    """Has vLLM's own loaders take up a version, into parameters of zeros. Returns the tensors whose parts lie
    elsewhere than `EngineLayout` looks for them."""

    def compare() -> list[str]:
        snapshot = Snapshot(read_manifest(locator, digest))
        model = worker.model_runner.get_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            model.load_weights(snapshot.named_tensors())
        layout = worker._find_layout(snapshot.manifest)
        published, held = layout.part_digests(snapshot), layout.held_digests()
        return [name for name in published if published[name] != held[name]]

    return answer_call(compare)


def count_bytes(worker: Any) -> None:
    """Counts from now on, on every rank, the bytes of the file that are copied as parts."""

    def copy(pieces: list[torch.Tensor], place: torch.Tensor) -> tuple[str, str]:
        worker.copied_bytes += sum(piece.nbytes for piece in pieces)
        return rank_slices.copy_pieces(pieces, place)

    worker.copied_bytes = 0
    sync.engine_layout.copy_pieces = copy


def read_count(worker: Any) -> int:
    """Returns the count, and ends it."""
    heal(worker)
    return int(worker.copied_bytes)
