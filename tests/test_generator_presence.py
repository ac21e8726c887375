"""The console names the generators that join, leave, fall silent, come back or start again, each once."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from buffer_harness import SMALL_RUN, BufferHarness

from buffers import messages as m
from buffers.role_registry import RoleRegistry
from buffers.run_status import GeneratorReport
from configs.load import load_config
from slipstream import live_view
from slipstream.generator_presence import GeneratorPresence
from slipstream.live_view import LiveView
from slipstream.run_record import RunRecord, list_status_metrics
from slipstream.throughput import TokenRates


class WatchedRegistry:
    """The buffer's registry of roles under a clock of its own, and what the console says of it."""

    def __init__(self, *expected: str) -> None:
        self.now, self.version = 0.0, 0
        self.registry, self.presence = RoleRegistry(), GeneratorPresence(expected)

    def beat(self, generator: str, version: int = 0, alive_s: float | None = None) -> None:
        report = GeneratorReport(version=version, alive_s=self.now if alive_s is None else alive_s)
        beat = m.GeneratorHeartbeat(generator=generator, progress={}, report=report, activity="sampling")
        self.registry.note_generator(beat, self.now)

    def make_status(self) -> Any:
        return SimpleNamespace(version=self.version, **self.registry.summarize(self.now))

    def hear(self) -> list[str]:
        return self.presence.describe_changes(self.make_status(), self.now)


def test_whoever_falls_silent_comes_back_leaves_or_joins_is_named_once() -> None:
    run = WatchedRegistry("generator-0")
    run.registry.note_role("learner-0", m.RoleHeartbeat(role="learner-0", activity="loading"), 0.0)
    for name in ("generator-0", "far-1"):
        run.registry.begin_life(name, 0.0)
    said = []
    for second in range(60):
        run.now = float(second)
        run.beat("generator-0")
        if not 10 <= second < 50:
            run.beat("far-1")
        if second == 20:
            run.registry.begin_life("far-2", run.now)
        if 20 <= second < 30:
            run.beat("far-2")
        if second == 30:
            run.registry.remove_generator("far-2", run.now)
        said += [(second, line) for line in run.hear()]
    assert said == [
        (0, "generators joined: far-1"),
        (15, "generators not heard of: far-1 (for 6 s; then: sampling)"),
        (20, "generators joined: far-2"),
        (30, "generators left: far-2"),
        (50, "generators heard of again: far-1 (after 41 s)"),
    ]


def test_a_generator_that_begins_another_life_is_named_also_when_it_was_hardly_away() -> None:
    run = WatchedRegistry("generator-0")
    for run.now in (1.0, 2.0):
        run.beat("generator-0")
        assert run.hear() == []
    run.registry.begin_life("generator-0", 2.5)
    run.now = 3.0
    assert run.hear() == ["generators started again: generator-0"]
    run.now = 4.0
    run.beat("generator-0", alive_s=0.5)
    assert run.hear() == []


def test_a_thousand_generators_take_a_line_together() -> None:
    run = WatchedRegistry()
    names = [f"far-{number:04}" for number in range(1000)]
    for name in names:
        run.registry.begin_life(name, 0.0)
    assert run.hear() == ["generators joined: far-0000, far-0001, far-0002, far-0003, 996 more"]
    run.now = 100.0
    (silent,) = run.hear()
    assert silent.endswith("996 more") and run.hear() == []
    for name in names:
        run.registry.remove_generator(name, run.now)
    assert run.hear() == ["generators left: far-0000, far-0001, far-0002, far-0003, 996 more"]
    assert run.hear() == [] and not run.presence._seen


def test_a_week_of_hosts_that_come_and_go_leaves_neither_names_nor_silence_behind() -> None:
    """One comes each minute; every second one leaves an hour later, the others vanish."""
    run = WatchedRegistry("generator-0")
    run.registry.note_role("learner-0", m.RoleHeartbeat(role="learner-0", activity="training"), 0.0)
    said: list[str] = []
    for minute in range(2000):
        run.now = 60.0 * minute
        run.registry.begin_life(f"spot-{minute}", run.now)
        for number in range(max(0, minute - 60), minute + 1):
            run.beat(f"spot-{number}", alive_s=1.0)
        if minute > 60 and minute % 2:
            run.registry.remove_generator(f"spot-{minute - 60}", run.now)
        run.registry.forget_generators(run.now)
        said += run.hear()
    status = run.make_status()
    assert len(status.generators) < 90 and len(status.roles) < 90 and "learner-0" in status.roles
    assert len(run.presence._seen) < 90
    assert status.generator_idle_share == 0.0 and run.registry._ended_totals.alive_s > 1800
    assert "generators given up: spot-1000" in said and "generators left: spot-1001" in said
    run.registry.note_role(
        "generator-0", m.RoleHeartbeat(role="generator-0", activity="sampling"), run.now - 3
    )
    assert run.registry.describe_long_waits(run.now).startswith("generator-0: not heard of for 3 s")
    before = status.weight_updates
    for _ in range(2):  # one that was given up goes on: it is counted once
        report = GeneratorReport(updates=7)
        beat = m.GeneratorHeartbeat(generator="spot-1998", progress={}, report=report, activity="sampling")
        run.registry.note_generator(beat, run.now)
        run.now += 700
        run.registry.forget_generators(run.now)
        assert run.make_status().weight_updates == before + 7


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[BufferHarness]:
    run = BufferHarness(load_config(SMALL_RUN), tmp_path / "journal")
    yield run
    run.close()


def fetch_news(run: BufferHarness, *silent: str, **changes: Any) -> m.RunNews:
    """Returns all news of a run, in which some roles are not heard of for 30 s."""
    news = run.client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
    replace = msgspec.structs.replace
    roles = {
        name: replace(role, last_heard_s=30.0) if name in silent else role
        for name, role in news.status.roles.items()
    }
    return replace(news, status=replace(news.status, roles=roles, **changes))


def beat(run: BufferHarness, generator: str, version: int) -> None:
    report = GeneratorReport(version=version)
    run.client.call(
        m.GeneratorHeartbeat(generator=generator, progress={}, report=report), m.GeneratorStanding
    )


def train_step(run: BufferHarness, step: int) -> None:
    for lease in run.ask():
        run.submit(lease)
    run.train(step, {"reward/mean": 0.5})
    run.publish(step + 1)


def test_the_lag_counts_neither_the_silent_nor_those_who_have_left_and_keeps_what_they_had(
    harness: BufferHarness, tmp_path: Path
) -> None:
    record = RunRecord(load_config(SMALL_RUN), tmp_path, None)
    harness.publish(0)
    names = ("here", "silent", "gone")
    for name in names:
        beat(harness, name, version=0)
    train_step(harness, 0)
    record.record_news(fetch_news(harness))
    harness.client.call(m.LeaveRun(generator="gone"), m.Acknowledged)
    train_step(harness, 1)
    beat(harness, "here", version=1)
    news = fetch_news(harness, "silent")
    record.record_news(news)
    metrics = list_status_metrics(news.status, TokenRates(1.0, 1.0))
    assert metrics["weights/lag_here"] == 1.0
    assert not {"weights/lag_silent", "weights/lag_gone"} & set(metrics)
    record.close("finished")
    lag = json.loads((tmp_path / "summary.json").read_text())["weights"]["lag"]
    assert lag == {
        "here": {"mean": 1.0, "max": 1},
        "silent": {"mean": 1.0, "max": 1},
        "gone": {"mean": 1.0, "max": 1},
    }


def test_the_lags_of_thousands_who_are_gone_are_added_up_and_trackers_see_their_mean(
    harness: BufferHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.run_record.MAX_LAGS", 3)
    monkeypatch.setattr("slipstream.run_record.MAX_LAG_FIGURES", 2)
    record = RunRecord(load_config(SMALL_RUN), tmp_path, None)
    harness.publish(0)
    for step in range(3):
        for number in (0, 1):
            beat(harness, f"spot-{2 * step + number}", version=number * step)
        train_step(harness, step)
        news = fetch_news(harness)
        record.record_news(news)
        for number in (0, 1):
            harness.client.call(m.LeaveRun(generator=f"spot-{2 * step + number}"), m.Acknowledged)
    metrics = list_status_metrics(news.status, TokenRates(1.0, 1.0))
    assert (metrics["weights/lag_mean"], metrics["weights/lag_max"]) == (2.0, 3.0)
    assert "weights/lag_spot-4" in metrics
    news.status.generators["third"] = news.status.generators["spot-4"]
    news.status.roles["third"] = news.status.roles["spot-4"]
    assert not [
        name
        for name in list_status_metrics(news.status, TokenRates(1.0, 1.0))
        if name.startswith("weights/lag_spot")
    ]
    record.close("finished")
    lag = json.loads((tmp_path / "summary.json").read_text())["weights"]["lag"]
    assert lag == {
        "spot-3": {"mean": 1.0, "max": 1},
        "spot-4": {"mean": 3.0, "max": 3},
        "spot-5": {"mean": 1.0, "max": 1},
        "others": {"mean": 4 / 3, "max": 2},
    }


def test_a_run_that_stands_still_says_who_waits_for_whom_in_place_of_the_same_figures(
    harness: BufferHarness,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(live_view, "time", clock)
    view = LiveView(load_config(SMALL_RUN), tmp_path, None)
    harness.publish(0)
    train_step(harness, 0)
    news = fetch_news(harness, waiting_for="the learner waits: step 1 has 0 of 2 groups")
    said = []
    for clock.now in (103.0, 104.0, 106.0, 110.0, 112.0, 115.0, 118.0):
        view.show_news(news)
        said.append(capsys.readouterr().out)
    assert ["step 1/4  v1  reward" in line for line in said] == [True, False, True, *[False] * 4]
    waits = "step 1/4  v1  waiting for {} s: the learner waits: step 1 has 0 of 2 groups\n"
    assert said[4].endswith(waits.format(9)) and said[6].endswith(waits.format(15))
    assert not said[1] and not said[3] and not said[5], "and it says so seldom"
    train_step(harness, 1)
    clock.now = 120.5
    view.show_news(fetch_news(harness))
    assert "step 2/4  v2  reward" in capsys.readouterr().out
