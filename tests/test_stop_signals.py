"""A user who presses Ctrl-C again and again ends a run in order, wherever the signal strikes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.stop_signals import STOP_SIGNALS, Interrupted, StopSignals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    signals = StopSignals()
    signals.install_handlers()
    yield signals
    for number, handler in zip(STOP_SIGNALS, before, strict=True):
        signal.signal(number, handler)


def test_the_first_signal_is_noted_and_the_second_is_raised_once_at_a_safe_point(
    signals: StopSignals,
) -> None:
    signal.raise_signal(signal.SIGTERM)
    signals.raise_if_hurried()
    assert signals.received == "SIGTERM"
    signal.raise_signal(signal.SIGINT)  # strikes here, and does not raise here
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(Interrupted):
        signals.raise_if_hurried()
    signals.raise_if_hurried()
    with signals.interruptible():
        signal.raise_signal(signal.SIGINT)
    assert signals.received == "SIGTERM"


def test_several_sigterms_within_a_moment_are_one_request() -> None:
    times = iter([0.0, 0.1, 1.9, 30.0])
    signals = StopSignals(lambda: next(times))
    for _ in range(3):  # of a scheduler, and of two programs that hand it on
        signals._note_signal(signal.SIGTERM, None)
        signals.raise_if_hurried()
    assert signals.received == "SIGTERM" and not signals.was_hurried
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    signals._note_signal(signal.SIGTERM, None)
    for number, handler in zip(STOP_SIGNALS, before, strict=True):
        signal.signal(number, handler)
    with pytest.raises(Interrupted):
        signals.raise_if_hurried()


def test_an_interruptible_wait_ends_at_the_second_signal(signals: StopSignals) -> None:
    def press_twice() -> None:
        for _ in range(2):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_twice).start()
    began = time.monotonic()
    with pytest.raises(Interrupted), signals.interruptible():
        time.sleep(60)
    assert time.monotonic() - began < 30
    signals.raise_if_hurried()  # it was raised once


def test_a_second_signal_before_an_interruptible_block_keeps_it_from_starting(signals: StopSignals) -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(Interrupted), signals.interruptible():
        raise AssertionError("the block has started")


class Swallower:
    """Its destructor meets the second signal; Python reports the exception of a destructor, and goes on."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_that_a_destructor_swallows_is_raised_at_the_end_of_the_block(
    signals: StopSignals,
) -> None:
    signal.raise_signal(signal.SIGINT)
    swallower = [Swallower()]
    with pytest.raises(Interrupted), signals.interruptible():
        swallower.clear()


WITH_RAY = """
import itertools, os, signal, threading, time, ray
from configs.load import load_config
from slipstream.answers import FirstAnswers
from slipstream.cluster import run_cluster
from slipstream.ray_waits import wait_for_results
from slipstream.stop_signals import Interrupted, StopSignals

class Busy:
    def get_pid(self):
        return os.getpid()
    def work(self):
        time.sleep(600)

def press_twice():
    for _ in range(2):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

def time_wait(name, wait):
    signals = StopSignals()
    signals.install_handlers()
    threading.Thread(target=press_twice).start()
    began = time.monotonic()
    try:
        wait(signals)
    except Interrupted:
        print(name, round(time.monotonic() - began - 1.0, 2))

signals = StopSignals(itertools.count(0, 60).__next__)  # a minute between two signals
signals.install_handlers()
start_ray = ray.init
def start_and_be_stopped(**options):
    signal.raise_signal(signal.SIGTERM)
    start_ray(**options)
    print(signals.received)

ray.init = start_and_be_stopped
with run_cluster(load_config([])):
    os.kill(os.getpid(), signal.SIGTERM)
    print(signals.received)
    try:
        signals.raise_if_hurried()
    except Interrupted:
        print("interrupted")
    never = ray.remote(Busy).options(num_cpus=0).remote().work.remote()
    time_wait("answers", lambda signals: FirstAnswers(print, signals).wait_for_result(never, ray.get))
    time_wait("waits", lambda signals: wait_for_results([never], 1, 60.0, signals))
"""


def test_signals_while_ray_starts_and_waits_are_noted_and_interrupt_in_order(tmp_path: Path) -> None:
    """Ray runs signal handlers inside its compiled calls, where an exception would become a SystemError."""
    (tmp_path / "busy.py").write_text(WITH_RAY)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "busy.py")]
    with (tmp_path / "errors").open("w") as errors:  # a file, whose end no agent of Ray's holds up
        ran = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=300
        )
    assert ran.returncode == 0, (tmp_path / "errors").read_text()
    first, second, interrupted, *waits = ran.stdout.splitlines()
    assert (first, second, interrupted) == ("SIGTERM", "SIGTERM", "interrupted"), (
        "the start of Ray leaves our SIGTERM handler alone"
    )
    late_s = {name: float(late_s) for name, late_s in (line.split() for line in waits)}
    assert late_s.keys() == {"answers", "waits"}
    assert max(late_s.values()) < 5, f"a user waits for half a second, not for {late_s}"
