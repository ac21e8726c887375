"""How a role fails, how its process reports it, and how the driver tells it.

ValueError         the user's configuration or code: one sentence, and the run ends
BufferGone         the run is gone, or out of reach: one sentence
device error       the GPU has failed: the process dies, and Ray starts a generator again
EngineDied         a process of the engine has died: the same
anything else      a traceback; a learner's rank is started again where that may help (`supervisor.py`)
"""

import contextlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray

from buffers.client import BufferGone, RefusedByBuffer
from buffers.watchdog import Stuck

DEVICE_ERRORS = ("CUDA error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "NCCL error", "Triton Error [CUDA]")
"""Texts of the RuntimeErrors with which libraries other than torch say that the GPU has failed."""


TOLD_IN_A_SENTENCE = (ValueError, Stuck, BufferGone, RefusedByBuffer)
"""Errors of roles whose message says all that a user needs to know."""


class RoleFailed(RuntimeError):
    """A role has ended that should not have."""


class RoleDied(RoleFailed):
    """Its process has died, and has not said why."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """An exception that a rank of the learner has raised."""

    error: str
    """Class and message, in one line."""
    report: str
    """All there is to know, as it continues the rank's name."""
    final: bool
    """True when another life would raise it again: the user or the code has caused it."""
    at: float
    """Unix time in seconds."""


def describe_failure(error: Exception) -> RankFailure:
    """Call it where the exception is caught, before connections close: other ranks notice the failure then,
    and fail too."""
    at = time.time()
    is_sentence = isinstance(error, ValueError)
    report = f": {error}" if is_sentence else f" has failed:\n{traceback.format_exc()}"
    line = f"{type(error).__name__}: {error}".partition("\n")[0]
    return RankFailure(line, report, final=not isinstance(error, RuntimeError | OSError), at=at)


def get_result(ref: Any, name: str, read_log_end: Callable[[str], str]) -> Any:
    """Returns the result of a role's method. Raises RoleFailed with the traceback, or RoleDied with the end
    of the role's log, which `read_log_end` returns for the role's name."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TOLD_IN_A_SENTENCE):
            raise RoleFailed(f"{name}: {error.cause}") from error
        raise RoleFailed(f"{name} has failed:\n{error}") from error
    except ray.exceptions.RayError as error:
        if has_not_begun(error):
            raise RoleDied(f"{name} cannot begin: {explain_lost_actor(error)}") from error
        raise RoleDied(describe_death(name, read_log_end)) from error


def has_not_begun(error: ray.exceptions.RayError) -> bool:
    """True where the actor's object could not be made: the error says why."""
    return isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed


def explain_lost_actor(error: ray.exceptions.RayError) -> str:
    """Returns why an actor does not answer, in a line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1 if has_not_begun(error) else 0].strip()


def describe_death(name: str, read_log_end: Callable[[str], str]) -> str:
    return f"{name} has died. The end of its log:\n{read_log_end(name)}"


def is_device_error(error: RuntimeError) -> bool:
    """True when the GPU has failed, not the code: this process can compute nothing on it any more.

    Too little memory is no such error: the next process would have no more.
    """
    import torch  # every process that has a device has imported it

    text = str(error)
    known = isinstance(error, torch.AcceleratorError | torch.distributed.DistBackendError)
    return (known or any(mark in text for mark in DEVICE_ERRORS)) and "out of memory" not in text


@contextlib.contextmanager
def die_of_device_error() -> Iterator[None]:
    """Ends the process when its GPU, or another process of its engine, has failed. Ray starts another in its
    place, as long as `max_restarts` lasts; an exception would not make Ray do that."""
    try:
        yield
    except RuntimeError as error:
        from generators.engine import EngineDied  # it imports torch

        if not isinstance(error, EngineDied) and not is_device_error(error):
            raise
        logging.shutdown()
        os._exit(1)


@contextlib.contextmanager
def explain_engine_shortage() -> Iterator[None]:
    """Raises ValueError, with the keys that help, when an engine's GPU has too little memory, whenever that
    is found."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        text = str(error).partition("\n")[0]
        raise ValueError(
            "an engine must fit into its GPU (a smaller generators.gpu_memory_fraction leaves more beside "
            "the cache, and "
            f"generators.max_sequences and max_model_len make less of it necessary), got: {text}"
        ) from error
