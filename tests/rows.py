"""All tests, in rows side by side, for most wait as much as they compute. One process imports what all rows need, and they are forked
from it.

python tests/rows.py      the last row says as it goes what it has to say, the others at the end; one failure fails the whole
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
    "checkpoint export families fsdp learner lora megatron mixtures models parity same_numbers shards step stream "
    "vllm_engine world"
)


def files(names: str) -> list[str]:
    return [f"tests/test_{name}.py" for name in names.split()]


ROWS = {
    "whole runs": ["-m", "whole_run", "tests/test_run.py"],
    "other whole runs": ["-m", "whole_run", "--ignore=tests/test_run.py"],
    "ranks and models": ["-m", "not whole_run", *files(RANKS)],
    "servers and links": ["-m", "not whole_run", *files(SERVERS)],
    "the rest": ["-m", "not whole_run", *(f"--ignore={file}" for file in files(f"{RANKS} {SERVERS}"))],
}

*_, LAST = ROWS
QUIET = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
"""Some plugins are imported before pytest begins."""


def leave(status: int) -> NoReturn:
    """Ends a row, and leaves to the first process what is not the row's: the nursery."""
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
    os.environ["OMP_NUM_THREADS"] = "1"  # as conftest.py does, which comes after the imports here
    sys.path += [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/bench")]
    import nests

    from slipstream.nursery import FOLDER

    with nests.nursery_for_all():  # it imports beside this process, which imports what tests need
        import pytest
        import warm  # noqa: F401

        os.environ[nests.ROWS] = "1"
        making = start_tiny_model()
        said, rows = Path(tempfile.mkdtemp()), {}
        for name, arguments in ROWS.items():
            if (process := os.fork()) == 0:
                os.setpgid(0, 0)  # Ctrl-C comes once, from `stop`
                if "whole" not in name:
                    del os.environ[FOLDER]
                if name != LAST:
                    out = os.open(said / name, os.O_WRONLY | os.O_CREAT)
                    os.dup2(out, 1)
                    os.dup2(out, 2)
                leave(pytest.main([*QUIET, *arguments]))
            rows[name] = process

        def stop(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(making, signal.SIGKILL)
            for process in rows.values():
                os.killpg(process, signal.SIGINT)

        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        failed = [
            name for name, process in rows.items() if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        ]
    for name in rows:
        if name != LAST:
            print(f"{name}:\n{(said / name).read_text()}", flush=True)
    shutil.rmtree(said)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
