"""A GPU that fails is tried again; a GPU that is too small ends the run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import SIMULATED, StartedRun, assert_accounts_close
from training_steps import configure_step

from learners import startup
from slipstream import role_failures, role_logs, roles

CUDA_ERROR = "CUDA error: an illegal memory access was encountered"
FAULT = f"""
import heapq, pathlib, sys
pop, once = heapq.heappop, pathlib.Path(__file__).with_name("failed")
def fails(heap):
    if sys._getframe(1).f_code.co_filename.endswith("simulated_engine.py") and not once.exists():
        import torch
        once.touch()
        raise torch.AcceleratorError({CUDA_ERROR!r})
    return pop(heap)
heapq.heappop = fails
"""
"""A `sitecustomize.py` that raises a device error in the middle of sampling, once."""


@pytest.mark.parametrize(
    ("error", "final", "says"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
            True,
            "must fit into its GPU",
        ),
        (torch.AcceleratorError("CUDA error: out of memory"), True, "must fit into its GPU"),
        (torch.AcceleratorError(CUDA_ERROR), False, "has failed:\nTraceback"),
    ],
)
def test_a_learner_that_finds_no_room_on_its_gpu_is_not_started_again(
    error: RuntimeError, final: bool, says: str, fixed_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def heartbeat(*_: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(set_activity=None, timeline=None)

    def start(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(roles, "BufferClient", lambda *_, **__: SimpleNamespace(open_another=lambda: None))
    monkeypatch.setattr(roles, "send_heartbeats", heartbeat)
    monkeypatch.setattr(startup, "start_learner", start)
    rank = object.__new__(roles.LearnerRole)
    failure = rank.run(configure_step(fixed_model, "algo=grpo"), Path(), "nowhere", 0, "nowhere", None)
    assert failure is not None and failure.final == final and says in failure.report
    assert ("Planned: memory of a learner rank (1 in all)" in failure.report) == final


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError(CUDA_ERROR), True),
        (torch.distributed.DistBackendError("NCCL error in ..."), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True),
        (torch.OutOfMemoryError("CUDA out of memory."), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("the buffer has been silent for 30 s"), False),
    ],
)
def test_an_error_of_the_device_is_told_from_others(error: RuntimeError, expected: bool) -> None:
    assert role_failures.is_device_error(error) == expected


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"),
        torch.AcceleratorError("CUDA error: out of memory"),
    ],
)
def test_an_engine_that_runs_out_of_memory_says_so_in_one_sentence_and_is_not_started_again(
    error: RuntimeError,
) -> None:
    with (
        pytest.raises(ValueError, match="^an engine must fit into its GPU .*, got: CUDA .*memory[^\n]*$"),
        role_failures.die_of_device_error(),
        role_logs.log_what_ends_role(),
        role_failures.explain_engine_shortage(),
    ):
        raise error
    with pytest.raises(RuntimeError, match="another"), role_failures.explain_engine_shortage():
        raise RuntimeError("another")


@pytest.mark.timeout(300)
def test_a_generator_whose_device_fails_is_started_again(
    start: Callable[..., StartedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    run = start(*SIMULATED, "run.steps=10")
    status, said = run.finish()
    assert status == 0, said
    assert (tmp_path / "failed").exists() and CUDA_ERROR in (
        run.folder / "logs" / "generator-0.log"
    ).read_text()
    assert_accounts_close(run.summary())
    run.assert_nothing_left()
