"""All tests, in rows side by side, because most tests wait as much as they compute.

One process imports what all rows need, and the rows are forked from it.

Rows disturb one another: five of them share the cores. So what fails is run once more, alone, when all rows
have ended. A failure there fails the whole. A test that passes there is named as flaky, and its first failure
is printed: it is a defect that someone mends, and no reason to refuse a change to something else. More than
three failures are not run again.

python tests/rows.py      the last row prints as it goes, the others at the end; one failure fails the whole
"""

import contextlib
import json
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).parents[1]
SERVERS = (
    "agents bad_weights chaos closed cluster_check connections episodes fleet fuzz gateway gateway_streams "
    "heartbeat judge lost_links reward_trial role_placement slow_hosts slow_judges sync transports "
    "user_code_attacks"
)
RANKS = (
    "branches checkpoint export families fsdp gpu_turns learner long_sequences lora megatron megatron_memory "
    "memory mixtures model_loading models older_training parity publication publishing_hosts rank_hosts "
    "recipes same_numbers shards step stream tensor_parallel transformers_engine vllm_engine world"
)
"""All files whose tests start ranks are here: each row that does pays for what the ranks import."""
RUNS = "chaos_run gpu_turns pages run"


def list_files(names: str) -> list[str]:
    return [f"tests/test_{name}.py" for name in names.split()]


ROWS = {
    "whole runs": ["-m", "whole_run", *list_files(RUNS)],
    "other whole runs": ["-m", "whole_run", *(f"--ignore={file}" for file in list_files(RUNS))],
    "ranks and models": ["-m", "not whole_run", *list_files(RANKS)],
    "servers and links": ["-m", "not whole_run", *list_files(SERVERS)],
    "the rest": ["-m", "not whole_run", *(f"--ignore={file}" for file in list_files(f"{RANKS} {SERVERS}"))],
}

*_, LAST = ROWS
MOST_FLAKY = 3
QUIET = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
"""Pytest warns of plugins that are imported before it begins, as some are here."""


def end_row(status: int) -> NoReturn:
    """Ends a row's process without ending the nursery, which belongs to the first process."""
    sys.stdout.flush()
    sys.stderr.flush()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    os._exit(status)


def start_tiny_model() -> int:
    """Starts a process that makes the tiny model beside tests that do not need it; returns the process's id.

    Where it fails, the first test that needs the model says why.
    """
    from tiny_models import find_tiny_model

    if process := os.fork():
        return process
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        find_tiny_model()
    finally:
        os._exit(0)


def start_row(name: str, arguments: list[str], outputs: Path, prints: bool) -> int:
    """Starts a process that runs a row's tests; returns the process's id.

    The names of tests that fail are in the row's own cache, `outputs/<name>.cache`.
    """
    import pytest

    from slipstream.nursery import FOLDER

    if process := os.fork():
        return process
    # A process group of its own, so that Ctrl-C comes once, from `stop_rows`.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if "whole" not in name:
        del os.environ[FOLDER]
    if not prints:
        out = os.open(outputs / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        status = pytest.main([*QUIET, "-rs", "-o", f"cache_dir={outputs / name}.cache", *arguments])
    except BaseException:  # it would end the nursery on its way
        traceback.print_exc()
    end_row(status)


def list_failed_tests(name: str, outputs: Path) -> list[str]:
    cache = outputs / f"{name}.cache/v/cache/lastfailed"
    return list(json.loads(cache.read_text())) if cache.exists() else []


def run_failed_again(
    statuses: dict[str, int], outputs: Path, running: dict[str, int]
) -> tuple[dict[str, int], list[str]]:
    """Runs what failed once more, alone; returns the new statuses, and the names of tests that pass now."""
    suspects = {name: list_failed_tests(name, outputs) for name, status in statuses.items() if status == 1}
    flaky: list[str] = []
    if sum(map(len, suspects.values())) > MOST_FLAKY:
        return statuses, flaky
    for name, tests in suspects.items():
        if tests:
            print(f"once more, alone: {' '.join(tests)}", flush=True)
            running[name] = start_row(name, ["--last-failed", *ROWS[name]], outputs, prints=True)
            statuses[name] = wait_for_row(running.pop(name))
            flaky += [] if statuses[name] else tests
    return statuses, flaky


def wait_for_row(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main() -> int:
    # conftest.py sets it too, and comes after the imports here.
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path += [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/bench")]
    import nests

    # The nursery imports beside this process, which imports what tests need.
    with nests.nursery_for_all():
        import warm  # noqa: F401

        os.environ[nests.ROWS] = "1"
        making = start_tiny_model()
        outputs, rows = Path(tempfile.mkdtemp()), {}

        def stop_rows(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(making, signal.SIGKILL)
            for process in rows.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGINT)
            stopped.append(number)

        stopped: list[int] = []
        for name, arguments in ROWS.items():
            rows[name] = start_row(name, arguments, outputs, prints=name == LAST)
        signal.signal(signal.SIGINT, stop_rows)
        signal.signal(signal.SIGTERM, stop_rows)
        statuses = {name: wait_for_row(process) for name, process in rows.items()}
        for name in ROWS:
            if name != LAST:
                print(f"{name}:\n{(outputs / name).read_text()}", flush=True)
        rows.clear()
        flaky: list[str] = []
        if not stopped:
            statuses, flaky = run_failed_again(statuses, outputs, rows)
    shutil.rmtree(outputs)
    if flaky:
        print(f"flaky, passed only when run again: {', '.join(flaky)}", file=sys.stderr)
    # A row that a signal has ended could not say so itself.
    failed = [
        f"{name} (ended by {signal.Signals(-status).name})" if status < 0 else name
        for name, status in statuses.items()
        if status
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
