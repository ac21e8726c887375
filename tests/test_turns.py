"""The benchmark's turns: its two sides never compute at the same moment."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psutil
import pytest

from slipstream_bench import turns

BURN = "import time; print(flush=True); exec('while True: pass')"
DRIVER = f"""
import subprocess, sys
names = ["ray::GeneratorRole.run", "ray::LearnerRole.run", "ray::BufferRole.run"]
children = [
    subprocess.Popen([name, "-c", {BURN!r}], executable=sys.executable, stdout=subprocess.PIPE)
    for name in names
]
for child in children:
    child.stdout.readline()
print(*(child.pid for child in children), flush=True)
sys.stdin.read()
for child in children:
    child.kill()
"""


@pytest.fixture
def roles() -> Iterator[tuple[int, list[psutil.Process]]]:
    """A driver's process id, and its generator, learner and buffer, all of which compute without end."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as driver:
        assert driver.stdout is not None
        yield driver.pid, [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]


def used_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def test_sides_never_compute_at_the_same_moment_and_others_are_not_stopped(
    roles: tuple[int, list[psutil.Process]],
) -> None:
    driver, (generator, learner, buffer) = roles
    with turns.Turns(driver, 0.5, 0.02) as both:
        time.sleep(0.2)
        before, began = used_s(generator) + used_s(learner), time.monotonic()
        for _ in range(50):
            assert buffer.status() != psutil.STATUS_STOPPED
            time.sleep(0.02)
        both_s, wall_s = used_s(generator) + used_s(learner) - before, time.monotonic() - began
    assert 0 < both_s < 1.05 * wall_s + 0.03  # a clock tick each
    assert 0.3 < both.measured_share < 0.7


def test_nobody_stays_stopped_when_the_turns_are_over(roles: tuple[int, list[psutil.Process]]) -> None:
    driver, (generator, learner, _) = roles
    with turns.Turns(driver, 0.5, 0.02):
        stopped = [p.status() for _ in range(50) for p in (generator, learner) if not time.sleep(0.005)]
    assert psutil.STATUS_STOPPED in stopped
    assert all(process.status() != psutil.STATUS_STOPPED for process in (generator, learner))


def test_nobody_stays_stopped_when_the_driver_has_died_or_the_turns_fail(
    roles: tuple[int, list[psutil.Process]], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, (generator, learner, _) = roles
    monkeypatch.setattr(turns, "SEARCH_PERIOD_S", 0.05)
    try:
        with turns.Turns(driver, 0.5, 0.02):
            time.sleep(0.1)
            psutil.Process(driver).kill()
            time.sleep(0.3)
        assert all(process.status() != psutil.STATUS_STOPPED for process in (generator, learner))
        monkeypatch.setattr(turns, "find_sides", lambda driver: [[generator], [learner]])
        monkeypatch.setattr(turns, "_signal_each", fail_fifth_call(turns._signal_each))
        with pytest.raises(PermissionError, match="not yours"), turns.Turns(driver, 0.5, 0.02):
            time.sleep(0.3)
        assert all(process.status() != psutil.STATUS_STOPPED for process in (generator, learner))
    finally:
        for process in roles[1]:
            process.kill()


def fail_fifth_call(each: Callable[..., None]) -> Callable[..., None]:
    """Returns `each` with a fifth call that fails."""
    calls = count()

    def call(*arguments: Any) -> None:
        if next(calls) == 5:
            raise PermissionError("not yours")
        each(*arguments)

    return call


def test_a_side_that_has_died_or_is_not_there_yet_is_no_error(
    roles: tuple[int, list[psutil.Process]],
) -> None:
    driver, (generator, learner, _) = roles
    with turns.Turns(driver, 0.5, 0.02):
        generator.kill()
        time.sleep(0.1)
        assert learner.status() in (psutil.STATUS_RUNNING, psutil.STATUS_STOPPED)
    with turns.Turns(2**22 + 1, 0.5, 0.02):  # nobody has this number
        time.sleep(0.05)
