"""A life of a buffer for tests: steps are published, made and trained without sockets, and the process may
be killed."""

import shutil
from collections.abc import Callable
from pathlib import Path

from buffer_harness import make_group

from buffers import events as e
from buffers import messages as m
from buffers.buffer import Buffer
from buffers.event_log import read_events
from buffers.trajectory import SCHEMA_VERSION, encode_batch, to_batch

LIFE_SETTINGS = [
    "learner.groups_per_step=3",
    "learner.samples_per_prompt=2",
    "run.steps=1000",
    "eval.prompts=0",
    "staleness.max_versions=1",
    "buffer.segment_mb=1",
    "generators.max_model_len=50000",
]


def submit_group(buffer: Buffer, lease: m.Lease, version: int, num_tokens: int = 3) -> str:
    row = {
        "tokens": [5] * (num_tokens + 1),
        "sampled": [False] + [True] * num_tokens,
        "logprobs": [0.0] + [-0.5] * num_tokens,
        "versions": [-1] + [version] * num_tokens,
        "reward": 1.0,
    }
    data = memoryview(encode_batch(to_batch(make_group(lease, **row)))).cast("B")  # type: ignore[arg-type]
    return buffer.intake.submit_groups("g", [lease.id], [lease.num_samples], SCHEMA_VERSION, data)[0]


def live_steps(
    buffer: Buffer, first: int, last: int, *, checkpoint_every: int = 2, keep: int = 1, tokens: int = 3
) -> None:
    """Steps `first` to `last` - 1 are published, made and trained; the groups due after the last are made
    as well."""
    for step in range(first, last):
        buffer.progress.publish_version(step, f"w{step}")
        while (lease := buffer.lease_next("g")) is not None:
            assert submit_group(buffer, lease, step, tokens) == "accepted"
        handout = buffer.progress.hand_out(step)
        assert handout is not None
        trained = sum(buffer.book.pool.get_content(group).tokens for group in handout.groups)
        buffer.progress.finish_step(
            m.ReportTrainedStep(step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={})
        )
        if (step + 1) % checkpoint_every == 0:
            buffer.progress.keep_checkpoint(step + 1, max(0, step + 1 - (keep - 1) * checkpoint_every))
        buffer.commit()
        buffer.journal._state_written.result()


def copy_killed(buffer: Buffer, into: Path) -> Path:
    """Copies the journal as the buffer would leave it if it were killed now."""
    shutil.copytree(buffer.journal.folder, into)
    return into


def flip_logprob(folder: Path, group: int) -> None:
    """Changes a log-probability of a group on the disk."""
    event = next(x for x in read_events(folder) if isinstance(x, e.Accepted) and x.group == group)
    path = folder / f"{event.segment:06d}.arrow"
    data = bytearray(path.read_bytes())
    place = data.index(b"\x00\x00\x00\xbf", event.offset)  # -0.5 in float32
    data[place + 2] ^= 0x40
    path.write_bytes(data)


def lose_lines(folder: Path, wanted: Callable[[e.AnyEvent], bool], name: str = "000000.jsonl") -> None:
    """Makes the lines of the wanted events unreadable."""
    path = folder / "log" / name
    lines = path.read_bytes().splitlines(keepends=True)
    assert any(wanted(event) for line in lines if (event := e.decode_line(line)) is not None)
    events = map(e.decode_line, lines)
    kept = (
        b"#" + line[1:] if event is not None and wanted(event) else line
        for line, event in zip(lines, events, strict=True)
    )
    path.write_bytes(b"".join(kept))
