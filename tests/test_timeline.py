"""The timeline of a run: the roles' files, what is made of them, and what may not happen to a role."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffers import timeline as t
from buffers.timeline import TimedSpan, Timeline, Track, make_span, read_spans
from configs.disk import DiskFull
from slipstream import timeline
from slipstream.cluster_nodes import ClusterNode, NodeRoom
from slipstream.node_agents import NodeAgent, NodeAgents
from slipstream.role_failures import RoleFailed
from slipstream.timeline_picture import MAX_OTHERS, choose_rows, find_window

ROLE_THAT_IS_KILLED = """
import os, signal, sys, time
from pathlib import Path
from buffers.timeline import Timeline, Track
timeline = Timeline(Path(sys.argv[1]), "learner-0")
for step in range(3):
    timeline.begin_activity(f"training step {step}")
    with timeline.span(Track.publication, f"writing and digesting version {step}"):
        time.sleep(0.002)
os.kill(os.getpid(), signal.SIGKILL)
"""


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def read_as_perfetto(path: Path) -> list[dict[str, object]]:
    """Reads a role's file, whose array has no end: every other byte must be right."""
    text = path.read_text()
    assert text.endswith(",\n")
    return json.loads(f"{text[:-2]}]")


def test_a_file_is_whole_after_a_kill_and_a_torn_line_and_the_next_life_goes_on_with_it(
    tmp_path: Path,
) -> None:
    killed = subprocess.run([sys.executable, "-c", ROLE_THAT_IS_KILLED, str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    path = tmp_path / "timeline" / "learner-0.json"
    names = [event["name"] for event in read_as_perfetto(path) if event["ph"] == "X"]
    assert [name for name in names if "writing" in str(name)] == [
        f"writing and digesting version {version}" for version in range(3)
    ]
    assert "training step 0" in names, "what has ended is in the file"
    with open(path, "ab") as file:
        file.write(b'{"name":"training st')
    again = Timeline(tmp_path, "learner-0")
    with again.span(Track.checkpoint, "writing the checkpoint of step 7"):
        pass
    again.close()
    spans = [event for event in read_as_perfetto(path) if event["ph"] == "X"]
    assert [one["name"] for one in spans] == [*names, "writing the checkpoint of step 7"]
    assert spans[-1]["args"] == {"step": 7} and spans[-1]["cat"] == "checkpoint"
    assert {one["tid"] for one in spans} == {1, 2, 3}, "each track has a number of its own"


def test_a_role_keeps_the_newest_spans_within_bounds(tmp_path: Path) -> None:
    bounded = Timeline(tmp_path, "generator-0", max_file_bytes=10_000)
    for version in range(1000):
        with bounded.span(Track.weights, f"loading version {version}"):
            pass
    paths = list((tmp_path / "timeline").iterdir())
    assert {path.name for path in paths} == {"generator-0.json", "generator-0.before.json"}
    kept = [span.args["version"] for span in timeline.read_timeline(tmp_path)["generator-0"]]
    assert kept == list(range(min(kept), 1000)) and len(kept) > 50, "nothing is missing in between"
    for path in paths:
        assert path.stat().st_size < 11_000
        read_as_perfetto(path)
    assert len(timeline.read_timeline(tmp_path, 4000)["generator-0"]) < 40, "so is what a picture reads"


def test_an_activity_goes_on_after_a_moment_of_something_else(tmp_path: Path, clock: ManualClock) -> None:
    role = Timeline(tmp_path, "generator-0", clock, clock)
    for activity, seconds in [
        ("sampling", 1.0), ("scoring", t.SHORT_S / 2), ("sampling", 2.0), ("scoring", 0.5), ("sampling", 1.0),
    ]:  # fmt: skip
        role.begin_activity(activity)
        clock.now += seconds
    role.close()
    role.begin_activity("after the end")
    spans = read_spans(tmp_path / "timeline" / "generator-0.json")
    assert [(span.name, span.dur) for span in spans] == [
        ("sampling", 3_000_500), ("scoring", 500_000), ("sampling", 1_000_000),
    ]  # fmt: skip
    assert [span.ts for span in spans] == [1_000_000_000, 1_003_000_500, 1_003_500_500]


def test_a_full_disk_ends_the_timeline_and_not_the_role(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (small_disk / "ballast").write_bytes(bytes(1_400_000))
    role = Timeline(small_disk, "learner-0")
    for step in range(2000):
        role.begin_activity(f"training step {step}")
        with role.span(Track.publication, f"writing and digesting version {step}"):
            pass
    assert [record.message for record in caplog.records if "the timeline ends here" in record.message]
    (small_disk / "ballast").unlink()
    again = Timeline(small_disk, "learner-0")
    with again.span(Track.publication, "writing and digesting version 5000"):
        pass
    assert read_as_perfetto(small_disk / "timeline" / "learner-0.json")[-1]["args"] == {"version": 5000}


def test_a_timeline_that_cannot_be_opened_is_none(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("a file in the place of the folder")
    role = Timeline(tmp_path, "learner-0")
    role.begin_activity("training step 0")
    with pytest.raises(KeyError), role.span(Track.publication, "writing"):
        raise KeyError("an error passes through")
    role.close()


def make_steps(first: int, last: int, begin: float) -> list[TimedSpan]:
    """Steps that take two seconds each, after a second of waiting."""
    spans = [make_span(Track.activity, "loading the model", begin - 1, 1)]
    for at, step in enumerate(range(first, last + 1)):
        waits = begin + 3 * at
        spans.append(make_span(Track.activity, f"waiting for the batch of step {step}", waits, 1))
        spans.append(make_span(Track.activity, f"training step {step}", waits + 1, 2))
    return spans


def test_the_picture_shows_the_newest_steps_of_the_present_life() -> None:
    lives = make_steps(0, 9, 1000) + make_steps(8, 9, 90_000)
    window = find_window(lives, 4)
    assert window is not None and list(window.steps) == [8, 9], "no picture has a night in its middle"
    assert window.begin == 90_000_000_000 and 90_006_000_000 < window.end < 90_010_000_000
    window = find_window(make_steps(0, 9, 1000), 4)
    assert window is not None and list(window.steps) == [6, 7, 8, 9]
    waited = [
        make_span(Track.activity, "waiting for the batch of step 0", 0, 1001),
        *make_steps(0, 0, 1000)[2:],
    ]
    window = find_window(waited, 4)
    assert window is not None and window.begin == 1_000_000_000, "a long wait leaves the step its room"
    assert find_window(make_steps(0, -1, 1000), 4) is None


def test_a_run_of_many_roles_is_drawn_and_roles_on_other_hosts_count_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "run"
    roles = {f"generator-{number}": make_steps(0, 5, 1000.0)[:1] for number in range(20)}
    for role, spans in (roles | {"learner-0": make_steps(0, 5, 1000.0), "learner-1": []}).items():
        writer = Timeline(own, role)
        for span in spans + [make_span(Track.weights, "loading version 3", 1012, 0.1)] * (role in roles):
            writer._write_span(span)
        writer.close()
    # A host that shares the file system has the same file, and one that does not has another.
    brought = NodeAgent(sweeps=False).read_timelines(own)
    (own / "timeline" / "host-2").mkdir()
    (own / "timeline" / "host-2" / "generator-3.json").write_bytes(brought["generator-3.json"])
    (own / "timeline" / "host-2" / "generator-20.json").write_bytes(brought["generator-4.json"])
    assert timeline.main([str(own)]) == 0
    assert capsys.readouterr().out.split() == [str(own / name) for name in ("timeline.json", "timeline.png")]
    assert (own / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    events = json.loads((own / "timeline.json").read_text())
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert names == ["learner-0", "learner-1", *(f"generator-{number}" for number in range(21))]
    loads = [one["pid"] for one in events if one["name"] == "loading version 3"]
    assert sorted(loads) == list(range(3, 24)), "one of each generator"
    read = timeline.read_timeline(own)
    window = find_window(read["learner-0"], 4)
    assert window is not None
    rows, num_left_out = choose_rows(read, window)
    assert rows[0] == ("learner-0", Track.activity) and num_left_out == 21 - MAX_OTHERS
    with pytest.raises(SystemExit):
        timeline.main([str(tmp_path)])
    assert "the run must be a folder in which roles have a timeline/" in capsys.readouterr().err


class NodesWithDisks(NodeAgents):
    """Nodes that have the run's folder at a place of their own; a node without one does not answer."""

    def __init__(self, folders: dict[str, Path | None]) -> None:
        self._folders = folders
        self.nodes = {
            name: ClusterNode(name, "10.0.0.1", f"host-{name}", NodeRoom(name, 4)) for name in folders
        }

    def ask_others(self, method: Any, run: Path, *arguments: Any) -> Iterator[tuple[str, Any]]:
        for name, folder in self._folders.items():
            lost = RoleFailed(f"{name} does not answer")
            yield name, lost if folder is None else method(NodeAgent(sweeps=False), folder, *arguments)


def test_the_driver_brings_timelines_from_nodes_that_do_not_share_its_folder(tmp_path: Path) -> None:
    own, other = tmp_path / "run", tmp_path / "other"
    for folder, role in ((own, "learner-0"), (own, "generator-0"), (other, "generator-1")):
        writer = Timeline(folder, role)
        with writer.span(Track.weights, "loading version 3"):
            pass
        writer.close()
    (line,) = NodesWithDisks({"a": own, "b": other, "c": None}).bring_timelines(own)
    assert line.startswith("the timeline lacks the roles on host-c")
    assert {str(path.relative_to(own / "timeline")) for path in (own / "timeline").rglob("*")} == {
        "learner-0.json", "generator-0.json", "host-b-10.0.0.1", "host-b-10.0.0.1/generator-1.json"
    }  # fmt: skip
    shutil.rmtree(own / "timeline")
    (own / "timeline").write_text("a file in the place of the folder")
    lines = NodesWithDisks({"a": own, "b": other}).bring_timelines(own)
    assert len(lines) == 1, "and the run ends as it would"


def test_roles_that_come_and_go_leave_a_long_role_its_room(tmp_path: Path) -> None:
    long = Timeline(tmp_path, "learner-0")
    for step in range(200):
        long._write_span(make_span(Track.activity, f"training step {step}", 1000 + step, 1))
    for number in range(200):
        Timeline(tmp_path, f"generator-{number}").close()  # it has done nothing
    sizes = [path.stat().st_size for path in (tmp_path / "timeline").iterdir()]
    read = timeline.read_timeline(tmp_path, sum(sizes))
    assert len(read["learner-0"]) == 200, "there is room for all"
    read = timeline.read_timeline(tmp_path, sum(sizes) - 5000)
    assert 150 < len(read["learner-0"]) < 200
    assert read["learner-0"][-1].name == "training step 199"


def test_a_picture_appears_whole_or_the_one_before_stays_and_names_are_no_formulas(small_disk: Path) -> None:
    run = small_disk / r"a $\frac$ b"
    for role in ("learner-0", r"gen $\x$"):
        writer = Timeline(run, role)
        for span in make_steps(0, 5, 1000.0):
            writer._write_span(span)
        writer.close()
    assert len(timeline.draw_run(run)) == 2
    before = (run / "timeline.png").read_bytes()
    more = Timeline(run, "learner-0")
    more._write_span(make_span(Track.activity, "training step 6", 1019, 2))
    more.close()
    ballast = small_disk / "ballast"
    with pytest.raises(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    with open(ballast, "r+b") as file:
        file.truncate(ballast.stat().st_size - len(before) // 2)
    with pytest.raises((OSError, DiskFull)):
        timeline.draw_run(run)
    assert (run / "timeline.png").read_bytes() == before
    assert "training step 6" in (run / "timeline.json").read_text()


def test_spans_that_no_role_has_written_are_passed_over(tmp_path: Path) -> None:
    writer = Timeline(tmp_path, "learner-0")
    for span in make_steps(0, 5, 1000.0):
        writer._write_span(span)
    writer.close()
    odd = [
        f'{{"name":"training step 9","cat":"activity","ts":1,"dur":{10**400}}}',
        f'{{"name":"training step 9","cat":"activity","ts":{10**30},"dur":1}}',
        '{"name":"training step 9","cat":"activity","ts":1005000000,"dur":-5}',
        f'{{"name":"a","cat":"weights","ts":1005000000,"dur":9000000,"args":{{"version":{"9" * 5000}}}}}',
        '{"name":"training step 9","cat":"activity","ts":1005000000,"dur":5}',
        '{"name":"announcing","cat":"publication","ts":1005000000,"dur":5}',
    ]
    with open(tmp_path / "timeline" / "learner-0.json", "a") as file:
        file.write("".join(f"{line},\n" for line in odd))
    assert len(timeline.draw_run(tmp_path)) == 2
    assert len(timeline.read_timeline(tmp_path)["learner-0"]) == len(make_steps(0, 5, 1000.0)) + 2
