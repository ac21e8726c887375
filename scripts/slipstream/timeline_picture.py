"""The picture of a run's newest steps: what each role does when, and when each version arrives."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from buffers.files import replace_file
from buffers.timeline import TimedSpan, Track

MAX_RANKS, MAX_OTHERS = 2, 6
"""Ranks of the learner that are drawn, and other roles."""
TAIL = 0.75
"""The picture goes on for so many steps after the last one: its version arrives there."""
MIN_SHARE = 0.0025
"""Share of the picture's width that a span has at least, to be seen."""
CHARACTER_SHARE = 0.0045
"""Share of the width that a character takes. A span bears its number where there is room."""
ANNOUNCED = -0.75
"""Where the numbers of announced versions stand, above the first row."""
HEIGHTS = {Track.activity: 0.84, Track.publication: 0.6, Track.checkpoint: 0.6, Track.weights: 0.6}


class SpanKind(NamedTuple):
    """A kind of spans, which have one color. The pattern finds their names."""

    label: str
    color: str
    pattern: str
    text_color: str = "#333333"


KINDS = [
    SpanKind("waiting", "#e3e3e3", r"waiting|asks for the GPU|writing the (newest|last)"),
    SpanKind("training", "#4e79a7", "training", "white"),
    SpanKind("copying: training waits", "#f28e2b", "copying"),
    SpanKind("writing and digesting a version", "#b39ad6", "writing and digesting"),
    SpanKind("announcing it", "#1a1a1a", "announcing", "white"),
    SpanKind("writing a checkpoint", "#9c755f", "writing the checkpoint"),
    SpanKind("sampling", "#8cc37f", "sampling"),
    SpanKind("scoring", "#c9e3a9", "scoring"),
    SpanKind("fetching and verifying a version", "#edc948", "fetching"),
    SpanKind("loading it", "#d62728", "loading version", "white"),
    SpanKind("asleep, or a GPU changes hands", "#79706e", "asleep|the GPU", "white"),
]
OTHER = SpanKind("reporting, other", "#a0cbe8", "")


class Window(NamedTuple):
    """The time that the picture shows, in microseconds since 1970, and its steps."""

    begin: int
    end: int
    steps: Sequence[int]


def find_kind(name: str) -> SpanKind:
    return next((kind for kind in KINDS if re.search(kind.pattern, name)), OTHER)


def find_window(spans: Sequence[TimedSpan], num_steps: int) -> Window | None:
    """Returns the time of the newest steps that a rank of the learner, whose spans these are, has trained in
    its present life; None where there is none. Half of its length at most is the wait before them."""
    own = [span for span in spans if span.cat is Track.activity]
    born = max((number for number, span in enumerate(own) if span.name.startswith("loading")), default=0)
    life = own[born:]
    is_step = re.compile(r"training step \d+").fullmatch
    trained = [span for span in life if is_step(span.name) and "step" in span.args][-num_steps:]
    if not trained:
        return None
    first, last = trained[0], trained[-1]
    ended = last.ts + last.dur
    waits = [one.ts for one in life if one.name == f"waiting for the batch of step {first.args['step']}"]
    begin = max(min([first.ts, *waits]), first.ts - (ended - first.ts) // 2)
    tail = round(TAIL * (ended - begin) / len(trained))
    return Window(begin, ended + tail, [span.args["step"] for span in trained])


def draw_timeline(run: Path, roles: dict[str, list[TimedSpan]], num_steps: int) -> Path | None:
    """Draws the newest steps of the first rank, and what the other roles did meanwhile. Returns the picture;
    None where no step was trained. The picture before stays until this one is whole. Raises OSError,
    DiskFull when it cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    window = next(
        (found for spans in roles.values() if (found := find_window(spans, num_steps)) is not None), None
    )
    if window is None:
        return None
    rows, num_left_out = choose_rows(roles, window)
    figure = Figure(figsize=(14, 1.9 + 0.42 * len(rows)))
    axis = figure.subplots()
    seen: set[SpanKind] = set()
    for place, (role, track) in enumerate(rows):
        seen |= _draw_row(axis, _list_seen(roles[role], track, window), place, window)
    _mark_announcements(axis, roles, window)
    _name_rows(axis, rows)
    axis.set_xlim(0, (window.end - window.begin) / 1e6)
    axis.set_ylim(len(rows) - 0.5, -1.1)
    axis.set_xlabel("seconds" + (f"; {num_left_out} more roles are in timeline.json" if num_left_out else ""))
    title = f"{run.resolve().name}: steps {window.steps[0]} to {window.steps[-1]}"
    axis.set_title(title, loc="left", pad=12, parse_math=False)
    patches = [Patch(color=kind.color, label=kind.label) for kind in [*KINDS, OTHER] if kind in seen]
    figure.legend(handles=patches, loc="lower center", ncol=6, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))
    path, drawn = run / "timeline.png", io.BytesIO()
    figure.savefig(drawn, dpi=110)
    replace_file(path, drawn.getbuffer(), sync=False)
    return path


def choose_rows(roles: dict[str, list[TimedSpan]], window: Window) -> tuple[list[tuple[str, Track]], int]:
    """Returns the rows of the picture, and how many roles of that time have none."""
    rows, num_ranks, num_others, num_left_out = [], 0, 0, 0
    for role, spans in roles.items():
        tracks = [track for track in Track if _list_seen(spans, track, window)]
        is_rank = role.startswith("learner")
        if not tracks:
            continue
        if (num_ranks >= MAX_RANKS) if is_rank else (num_others >= MAX_OTHERS):
            num_left_out += 1
            continue
        num_ranks, num_others = num_ranks + is_rank, num_others + (not is_rank)
        rows += [(role, track) for track in tracks]
    return rows, num_left_out


def _list_seen(spans: Sequence[TimedSpan], track: Track, window: Window) -> list[TimedSpan]:
    return [
        span
        for span in spans
        if span.cat is track and span.ts < window.end and span.ts + span.dur > window.begin
    ]


def _draw_row(axis: Any, spans: Sequence[TimedSpan], place: int, window: Window) -> set[SpanKind]:
    """Draws the spans of a row, and the numbers of those that are wide enough; returns their kinds."""
    whole = (window.end - window.begin) / 1e6
    bars: dict[SpanKind, list[tuple[float, float]]] = {}
    free_from = float("-inf")
    for span in spans:
        kind = find_kind(span.name)
        begin = max(0.0, (span.ts - window.begin) / 1e6)
        end = min(whole, (span.ts + span.dur - window.begin) / 1e6)
        width = max(MIN_SHARE * whole, end - begin)
        bars.setdefault(kind, []).append((begin, width))
        number = f"v{span.args['version']}" if "version" in span.args else f"step {span.args.get('step', '')}"
        middle = {"x": begin + width / 2, "s": number, "ha": "center"}
        if span.args and width > CHARACTER_SHARE * whole * (len(number) + 1):
            axis.text(y=place, va="center", fontsize=8, color=kind.text_color, **middle)
        elif span.name.startswith("loading version") and span.cat is Track.weights and begin > free_from:
            axis.text(y=place - 0.32, va="bottom", fontsize=7.5, color=kind.color, **middle)
            free_from = begin + CHARACTER_SHARE * whole * (len(number) + 1)
    # In this order, because what lies within another span comes later.
    for kind in [kind for kind in (OTHER, *KINDS) if kind in bars]:
        height = HEIGHTS[spans[0].cat]
        colors = {"facecolor": kind.color, "edgecolor": "white", "linewidth": 0.3}
        axis.broken_barh(bars[kind], (place - height / 2, height), **colors)
    return set(bars)


def _mark_announcements(axis: Any, roles: dict[str, list[TimedSpan]], window: Window) -> None:
    """Draws a line through all rows where a version is announced, and its number where there is room."""
    whole, free_from = (window.end - window.begin) / 1e6, float("-inf")
    for spans in roles.values():
        for span in _list_seen(spans, Track.publication, window):
            if not span.name.startswith("announcing") or "version" not in span.args:
                continue
            at = (span.ts + span.dur - window.begin) / 1e6
            axis.axvline(at, color="#555555", linewidth=0.8, linestyle=":", zorder=0.5)
            if at > free_from:
                number = f" v{span.args['version']}"
                axis.text(at, ANNOUNCED, number, ha="left", va="center", fontsize=8)
                free_from = at + CHARACTER_SHARE * whole * len(number)


def _name_rows(axis: Any, rows: Sequence[tuple[str, Track]]) -> None:
    names = [role if track is Track.activity else track for role, track in rows]
    axis.set_yticks([ANNOUNCED, *range(len(rows))], ["announced", *names], parse_math=False)
    for label, (_, track) in zip(axis.get_yticklabels()[1:], rows, strict=True):
        label.set_fontweight("bold" if track is Track.activity else "normal")
    for place, (_, track) in enumerate(rows):
        if track is Track.activity and place:
            axis.axhline(place - 0.5, color="#cccccc", linewidth=0.8)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
