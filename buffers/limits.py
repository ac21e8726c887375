"""The bounds of requests that depend on the run. They are checked before anything is booked or logged.

The bounds that hold for every run stand at the fields themselves (`buffers.messages`).
"""

from collections.abc import Sequence

from buffers import messages as m
from buffers.buffer import Buffer
from buffers.refusal import Refusal
from configs.schema import Config


def longest_group(config: Config) -> int:
    """The most tokens that one lease can sample."""
    return config.learner.samples_per_prompt * max(
        config.sampling.max_tokens, config.generators.max_model_len
    )


def check_bounds(request: m.Request, buffer: Buffer, config: Config) -> None:
    """Raises Refusal for a request whose numbers cannot be true in this run."""
    match request:
        case m.FailLease(num_tokens=tokens, lease=lease, generator=name):
            _must(tokens, "num_tokens of a lease", longest_group(config))
            _must_hold(name, [lease], buffer, "a failure")
        case m.SubmitGroups(leases=leases, generator=name):
            _must_hold(name, leases, buffer, "a group")
        case m.SubmitEvaluation(lease=lease, generator=name):
            _must_hold(name, [lease], buffer, "a score")
        case m.GeneratorHeartbeat(progress=progress):
            _must(max(progress.values(), default=0), "progress of a lease", longest_group(config))
        case m.PublishVersion(version=version):
            _must(version, "version", config.run.steps)
        case m.ReportTrainedStep(step=step) | m.RequestBatch(step=step) | m.RewindToStep(step=step):
            _must(step, "step", config.run.steps)
        case m.ReportCheckpoint(step=step, oldest=oldest):
            _must(step, "step of a checkpoint", buffer.progress.next_step)
            _must(oldest, "oldest checkpoint's step", step)


def _must_hold(name: str, leases: Sequence[int], buffer: Buffer, what: str) -> None:
    """Nobody speaks for the lease of another. Leases that are not known (any more) are nobody's."""
    for lease in leases:
        if (holder := buffer.find_holder(lease) or name) != name:
            raise Refusal("another's lease", f"lease {lease} is {holder}'s, got {what} from {name}")


def _must(number: int, name: str, most: int) -> None:
    if number > most:
        raise Refusal("out of bounds", f"{name} must be at most {most}, got {number}")
