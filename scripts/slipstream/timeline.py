"""The timeline of a run: `timeline.json` of all roles, and a picture of its newest steps, `timeline.png`.

    scripts/timeline.sh outputs/NAME                 draws it anew, also while the run goes on
    scripts/timeline.sh outputs/NAME --steps 10      more steps in the picture

ui.perfetto.dev opens `timeline.json`. It is made of the roles' own files (`buffers/timeline.py`), so of all
lives of the run. Clocks of hosts differ, and a span has the time of its own host.
"""

import argparse
import contextlib
import re
import sys
from pathlib import Path

import msgspec

from buffers.files import replace_file
from buffers.timeline import FOLDER, TimedSpan, make_labels, read_spans
from configs.disk import DiskFull

MAX_BYTES = 32 << 20
"""Bytes of the roles' files that are read at most: the newest ones, as much of each role."""
NUM_STEPS = 4
"""Steps in the picture."""
OLDER = ".before"

RoleSpans = dict[str, list[TimedSpan]]
"""Spans by role, in the order of their beginnings."""


def read_timeline(run: Path, max_bytes: int = MAX_BYTES) -> RoleSpans:
    """Returns the newest spans of each role that has a file here: learners first, then by name and number.

    A role may have several files: older ones, and those that were brought from other hosts.
    """
    sizes = {}
    for path in sorted((run / FOLDER).rglob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # a role has begun a new file meanwhile
            sizes[path] = path.stat().st_size
    found: dict[str, dict[tuple[int, str, str], TimedSpan]] = {}
    # Small ones first: what they leave of their share is for the others.
    for number, path in enumerate(sorted(sizes, key=sizes.__getitem__)):
        share = min(sizes[path], max_bytes // (len(sizes) - number))
        max_bytes -= share
        role = found.setdefault(path.stem.removesuffix(OLDER), {})
        for span in read_spans(path, share):
            role[span.ts, span.cat, span.name] = span
    return {
        role: sorted(found[role].values(), key=lambda span: span.ts)
        for role in sorted(found, key=_order_role)
    }


def _order_role(role: str) -> list[tuple[bool, str, int]]:
    """Orders names with their numbers as numbers; the learner's ranks come first."""
    parts = re.findall(r"(\D*)(\d*)", role)
    return [(not role.startswith("learner"), text, int(number or 0)) for text, number in parts]


def write_timeline(run: Path, roles: RoleSpans) -> Path:
    """Writes `timeline.json`. Raises DiskFull."""
    events: list[bytes] = []
    for number, (role, spans) in enumerate(roles.items(), 1):
        events += map(msgspec.json.encode, make_labels(role, number))
        for span in spans:
            span.pid = number
            events.append(msgspec.json.encode(span))
    path = run / "timeline.json"
    replace_file(path, b"[\n" + b",\n".join(events) + b"\n]\n")
    return path


def draw_run(run: Path, num_steps: int = NUM_STEPS) -> list[Path]:
    """Writes `timeline.json` and, where a step was trained, `timeline.png`; returns what it has written; none
    where no role has a timeline. Raises OSError, DiskFull."""
    from slipstream.timeline_picture import draw_timeline

    roles = read_timeline(run)
    if not any(roles.values()):
        return []
    # First, because it needs no library that may fail.
    written = write_timeline(run, roles)
    picture = draw_timeline(run, roles, num_steps)
    return [written, *([] if picture is None else [picture])]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/timeline.sh", description="Draws the timeline of a run, also while it goes on."
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="newest steps in the picture")
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"--steps must be at least 1, got {given.steps}")
    try:
        written = draw_run(given.run, given.steps)
    except (OSError, DiskFull) as error:
        parser.error(f"the timeline could not be written: {error}")
    if not written:
        parser.error(f"the run must be a folder in which roles have a {FOLDER}/, got {given.run}")
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
