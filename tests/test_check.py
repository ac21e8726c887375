"""`scripts/check.sh`: what a machine has, what works on it, and that a check which breaks is a row of the
table and no more."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import broken_checks
import psutil
import pytest
from rich.console import Console

from slipstream import check, check_machine, checks
from slipstream.check import KILLED, CheckOutcome, describe_machine, report_checks, run_check

TESTS = Path(__file__).parent
BROKEN = {one.name: one for one in broken_checks.CHECKS}
REAL = {one.name: one for one in checks.CHECKS}
CHEAP = [
    "packages", "shared memory", "limits", "disk", "C compiler", "ports", "buffer", "weights, shared memory",
    "weights, disk", "weights, TCP", "weights, TCP with keys",
]  # fmt: skip
"""Checks that need no process of their own and take a second. Tests of their own try what the others try."""


@pytest.fixture(autouse=True)
def make_checks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(check, "count_gpus", lambda: 0)


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("works", CheckOutcome.ok, "as it should [in brackets]"),
        ("lacks", CheckOutcome.not_here, "no such device"),
        ("needs a GPU", CheckOutcome.not_here, "there is no GPU"),
        ("raises", CheckOutcome.failed, "ValueError: the field must be 1, got 2"),
        ("crashes", CheckOutcome.failed, "its process died of SIGSEGV"),
        ("exits", CheckOutcome.failed, "its process ended with exit code 3"),
    ],
)
def test_a_check_ends_with_an_outcome_and_words_however_it_ends(
    name: str, outcome: CheckOutcome, words: str
) -> None:
    found = run_check(BROKEN[name], "broken_checks")
    assert (found.outcome, found.words) == (outcome, words)
    assert ("before the end" in found.report) == (name == "raises")


def find_sleepers() -> list[psutil.Process]:
    """Finds the processes that `broken_checks.hangs` has started."""
    mine = "import time; time.sleep(1000)"
    return [one for one in psutil.process_iter(["cmdline"]) if mine in (one.info["cmdline"] or [])]


def test_a_check_that_hangs_fails_at_its_deadline_and_leaves_no_process() -> None:
    found = run_check(BROKEN["hangs"], "broken_checks")
    assert (found.outcome, found.words) == (CheckOutcome.failed, "no end within 3 s")
    wait_until(lambda: not find_sleepers(), None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_who_is_told_to_stop_leaves_no_process_and_shows_what_is_known(number: signal.Signals) -> None:
    code = (
        "import sys, signal, dataclasses, broken_checks; from slipstream import check; from rich.console "
        "import Console; check.count_gpus = lambda: 0; "
        "signal.signal(signal.SIGTERM, signal.default_int_handler); by = "
        "{c.name: c for c in broken_checks.CHECKS}; "
        "slow = dataclasses.replace(by['hangs'], deadline_s=100); "
        "sys.exit(check.report_checks([by['works'], slow, by['raises']], Console(), 'broken_checks'))"
    )
    path = f"{TESTS}:{TESTS.parent / 'scripts'}:{TESTS.parent}"
    driver = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    wait_until(lambda: len(find_sleepers()) == 2, driver)
    driver.send_signal(number)
    said, _ = driver.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert driver.returncode == KILLED
        assert (
            "1 ok, 0 failed, 0 not possible here, 2 not tried" in said
            and "as it should [in brackets]" in said
        )
    wait_until(lambda: not find_sleepers(), None)


def wait_until(holds: Callable[[], bool], driver: "subprocess.Popen[str] | None") -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline and (driver is None or driver.poll() is None)
        time.sleep(0.05)


def print_report(*names: str) -> tuple[int, str]:
    console = Console(file=StringIO(), width=160)
    status = report_checks([BROKEN[name] for name in names], console, "broken_checks")
    return status, console.file.getvalue()  # type: ignore[attr-defined]


def test_only_what_should_work_and_does_not_makes_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:secret@host:1")
    status, said = print_report("works", "lacks", "needs a GPU")
    assert status == 0 and "1 ok, 0 failed, 2 not possible here" in said
    assert "secret" not in said and "http_proxy set" in said, "it goes into bug reports"
    status, said = print_report("works", "raises")
    assert status == 1 and "raises has printed:" in said and "before the end" in said


def test_the_facts_are_what_a_bug_report_needs() -> None:
    assert set(describe_machine()) >= {
        "Slipstream",
        "system",
        "Python",
        "processor",
        "memory",
        "shared memory",
        "limits",
        "GPUs",
        "packages",
    }
    assert "torch 2.13" in describe_machine()["packages"] and "commit" in describe_machine()["Slipstream"]


def test_names_choose_checks_and_a_wrong_one_is_answered_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["limits", "disk"]) == 0
    assert "2 ok, 0 failed" in capsys.readouterr().out
    assert check.main(["wieghts"]) == 2
    assert "got wieghts: 'packages'" in capsys.readouterr().err


@pytest.mark.parametrize("name", CHEAP)
def test_this_machine_passes_what_any_machine_must(name: str) -> None:
    assert REAL[name].run()


@pytest.mark.gpu
@pytest.mark.skipif(check_machine.count_gpus() == 0, reason="there is no GPU")
@pytest.mark.parametrize(
    "name", [one.name for one in checks.CHECKS if one.gpu or one.name.startswith(("engine", "learner"))]
)
def test_a_machine_with_a_gpu_passes_its_checks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "count_gpus", check_machine.count_gpus)
    found = run_check(REAL[name])
    assert found.outcome is not CheckOutcome.failed, f"{found.words}\n{found.report}"
