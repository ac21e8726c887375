"""The bounds of requests that depend on the run. They are checked before anything is booked or logged.

The bounds that hold for every run stand at the fields themselves (`buffers.messages`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from buffers import messages as m
from buffers.buffer import Buffer
from buffers.group_checks import ExpertsShape
from buffers.refusal import Refusal
from configs.schema import Config

LEAST_TOKEN_BYTES = 12.125
"""Bytes of a token in a trajectory of one turn: its number, log-probability and version, and one bit."""


def max_group_tokens(config: Config) -> int:
    """Returns the most tokens that one lease can sample: each turn of an episode may be as long as a context
    or a reply can be, because the branches of an episode do not share one context."""
    longest_turn = max(config.sampling.max_tokens, config.generators.max_model_len)
    num_samples = [config.learner.samples_per_prompt, *(one.samples for one in config.eval.sets.values())]
    return max(num_samples) * config.episodes.max_turns * longest_turn


def max_group_rows(config: Config) -> int:
    """Returns the most rows that one group can have: a branch for each turn of each episode."""
    return config.learner.samples_per_prompt * config.episodes.max_turns


def check_group_size(config: Config, routing: ExpertsShape) -> None:
    """Raises ValueError where a group of the longest trajectories has no room in a message.

    Each of its attempts would fail, and the run would train short groups only.
    """
    longest, words = _find_longest_trajectory(config)
    num_tokens = config.learner.samples_per_prompt * longest
    most = int(m.MAX_PAYLOAD_BYTES / (LEAST_TOKEN_BYTES + 2 * routing.per_token))
    if num_tokens > most:
        raise ValueError(
            f"learner.samples_per_prompt × {words} must be at most {most:,} tokens (a group "
            f"travels in one message of at most {m.MAX_PAYLOAD_BYTES >> 20} MiB, and "
            f"learner.moe.router_replay adds {2 * routing.per_token} bytes to each token), got {num_tokens:,}"
        )


def _find_longest_trajectory(config: Config) -> tuple[int, str]:
    """Returns the most tokens that a trajectory of the run's task can hold, and the keys that say so. A task
    of rows leaves out longer prompts of files, and has one reply; any other may fill a context."""
    context, limit = config.generators.max_model_len, config.data.max_prompt_tokens
    if config.task.name != "dataset" or _has_task_source(config.data.train):
        return context, "generators.max_model_len"
    if limit is None:
        return context, "generators.max_model_len (less where data.max_prompt_tokens is set)"
    whole = limit + config.sampling.max_tokens
    if whole < context:
        return whole, "(data.max_prompt_tokens + sampling.max_tokens)"
    return context, "generators.max_model_len"


def _has_task_source(train: Any) -> bool:
    """True where rows of `data.train` come from a task, whose prompts nobody measures."""
    sources = [train] if isinstance(train, str | Mapping) else train
    return any(isinstance(source, Mapping) and source.get("task") is not None for source in sources)


def check_bounds(request: m.Request, buffer: Buffer, config: Config) -> None:
    """Raises Refusal for a request whose numbers cannot be true in this run."""
    match request:
        case m.FailLease(num_tokens=tokens, lease=lease, generator=name):
            _check_at_most(max_group_tokens(config), tokens, "num_tokens of a lease")
            _check_holder(name, [lease], buffer, "a failure")
        case m.SubmitGroups(leases=leases, rows=rows, generator=name):
            _check_at_most(max_group_rows(config), max(rows), "rows of a lease")
            _check_holder(name, leases, buffer, "a group")
        case m.SubmitEvaluation(lease=lease, generator=name, num_tokens=tokens):
            _check_at_most(max_group_tokens(config), tokens, "num_tokens of an answer")
            _check_holder(name, [lease], buffer, "a score")
        case m.GeneratorHeartbeat(progress=progress):
            most = max(progress.values(), default=0)
            _check_at_most(max_group_tokens(config), most, "progress of a lease")
        case m.PublishVersion(version=version):
            _check_at_most(config.run.steps, version, "version")
        case m.ReportTrainedStep(step=step) | m.RequestBatch(step=step) | m.RewindToStep(step=step):
            _check_at_most(config.run.steps, step, "step")
        case m.ReportCheckpoint(step=step, oldest=oldest):
            _check_at_most(buffer.progress.next_step, step, "step of a checkpoint")
            _check_at_most(step, oldest, "oldest checkpoint's step")


def _check_holder(name: str, leases: Sequence[int], buffer: Buffer, what: str) -> None:
    """Raises Refusal when one of the leases is another generator's. Unknown leases are nobody's."""
    for lease in leases:
        if (holder := buffer.find_holder(lease) or name) != name:
            raise Refusal("another's lease", f"lease {lease} is {holder}'s, got {what} from {name}")


def _check_at_most(most: int, number: int, name: str) -> None:
    if number > most:
        raise Refusal("out of bounds", f"{name} must be at most {most}, got {number}")
