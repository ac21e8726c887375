"""All tests, in rows side by side, because most tests wait as much as they compute.

One process imports what all rows need, and the rows are forked from it.

python tests/rows.py      the last row prints as it goes, the others at the end; one failure fails the whole
"""

import contextlib
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).parents[1]
SERVERS = "bad_weights chaos closed fuzz heartbeat scoring sync transports"
RANKS = (
    "checkpoint export families fsdp learner lora megatron mixtures models parity same_numbers shards step "
    "stream vllm_engine world"
)


def list_files(names: str) -> list[str]:
    return [f"tests/test_{name}.py" for name in names.split()]


ROWS = {
    "whole runs": ["-m", "whole_run", *list_files("run pages")],
    "other whole runs": ["-m", "whole_run", *(f"--ignore={file}" for file in list_files("run pages"))],
    "ranks and models": ["-m", "not whole_run", *list_files(RANKS)],
    "servers and links": ["-m", "not whole_run", *list_files(SERVERS)],
    "the rest": ["-m", "not whole_run", *(f"--ignore={file}" for file in list_files(f"{RANKS} {SERVERS}"))],
}

*_, LAST = ROWS
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


def main() -> int:
    # conftest.py sets it too, and comes after the imports here.
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path += [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/bench")]
    import nests

    from slipstream.nursery import FOLDER

    # The nursery imports beside this process, which imports what tests need.
    with nests.nursery_for_all():
        import pytest
        import warm  # noqa: F401

        os.environ[nests.ROWS] = "1"
        making = start_tiny_model()
        outputs, rows = Path(tempfile.mkdtemp()), {}
        for name, arguments in ROWS.items():
            if (process := os.fork()) == 0:
                # A process group of its own, so that Ctrl-C comes once, from `stop_rows`.
                os.setpgid(0, 0)
                if "whole" not in name:
                    del os.environ[FOLDER]
                if name != LAST:
                    out = os.open(outputs / name, os.O_WRONLY | os.O_CREAT)
                    os.dup2(out, 1)
                    os.dup2(out, 2)
                end_row(pytest.main([*QUIET, *arguments]))
            rows[name] = process

        def stop_rows(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(making, signal.SIGKILL)
            for process in rows.values():
                os.killpg(process, signal.SIGINT)

        signal.signal(signal.SIGINT, stop_rows)
        signal.signal(signal.SIGTERM, stop_rows)
        statuses = {
            name: os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for name, process in rows.items()
        }
    for name in rows:
        if name != LAST:
            print(f"{name}:\n{(outputs / name).read_text()}", flush=True)
    shutil.rmtree(outputs)
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
