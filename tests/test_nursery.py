"""Workers that are forked instead of started: they cannot be told from those that Ray starts, but for the
time they take."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from runs import is_alive

from slipstream import newborn
from slipstream.nursery import Stage, run_nursery

SHOW = """
import json, os, sys
print(json.dumps({
    "arguments": sys.argv[1:], "folder": os.getcwd(), "name": __name__,
    "environment": dict(os.environ), "pid": os.getpid(),
    "group": os.getpgid(0), "imported": sorted({"colorsys", "wave", "chatty", "threads"} & set(sys.modules)),
}))
print("complaint", file=sys.stderr)
"""
MODULES = {
    "chatty": "import os; os.environ['SET_BY_IMPORT'] = 'yes'; SEEN = os.environ.get('SET_BY_RAYLET')",
    "threads": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "show.py").write_text(SHOW)
    return folder


@pytest.fixture(scope="module")
def stages(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))
        with run_nursery(
            {
                "buffer": Stage(["colorsys"], []),
                "learner": Stage(["wave"], ["chatty"]),
                "generator": Stage(["threads"], []),
            }
        ):
            yield


def ask_for_worker(
    folder: Path, stage: str | None, *arguments: str, raylet: int | None = None
) -> subprocess.Popen[str]:
    """Starts the process that a raylet starts for an actor of this stage."""
    context = {} if stage is None else {"env_vars": {newborn.STAGE: stage}}
    command = [
        sys.executable,
        newborn.__file__,
        *arguments,
        f"{newborn.CONTEXT}{json.dumps(context)}",
        "--language=PYTHON",
    ]
    environment = os.environ | {"SET_BY_RAYLET": "yes"}
    environment |= {} if raylet is None else {"RAY_RAYLET_PID": str(raylet)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def test_a_worker_has_the_files_folder_arguments_and_environment_of_who_asks_and_the_imports_of_its_stage(
    stages: None, folder: Path
) -> None:
    groups = set()
    for stage, imported in ((None, ["colorsys"]), ("learner", ["chatty", "colorsys", "wave"])) * 2:
        asking = ask_for_worker(folder, stage, str(folder / "show.py"), "--a", "b c")
        out, err = asking.communicate(timeout=60)
        worker = json.loads(out)
        assert err == "complaint\n" and asking.returncode == 0
        assert worker["arguments"] == ["--a", "b c"] and worker["name"] == "__main__"
        assert worker["folder"] == str(folder) and worker["environment"]["SET_BY_RAYLET"] == "yes"
        assert (worker["environment"].get("SET_BY_IMPORT") == "yes") == (stage is not None), (
            "imports may set some too"
        )
        assert worker["imported"] == imported and worker["pid"] != asking.pid, "forked"
        groups.add(worker["group"])
    assert len(groups) == 4, "a raylet kills a worker with its process group"


def test_modules_that_read_the_environment_are_imported_with_that_of_the_first_who_asks(
    stages: None, folder: Path
) -> None:
    (folder / "seen.py").write_text("import chatty; print(chatty.SEEN)")
    out, _ = ask_for_worker(folder, "learner", str(folder / "seen.py")).communicate(timeout=60)
    assert out == "yes\n"


def test_who_asks_lives_as_long_as_the_worker(stages: None, folder: Path) -> None:
    (folder / "sleep.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    asking = ask_for_worker(folder, None, str(folder / "sleep.py"))
    assert asking.stdout is not None
    worker = psutil.Process(int(asking.stdout.readline()))
    assert asking.poll() is None
    worker.kill()
    asking.communicate(timeout=60)
    psutil.wait_procs([worker], timeout=60)
    assert not is_alive(worker)


def test_a_worker_that_is_no_role_yet_ends_when_its_raylet_does(stages: None, folder: Path) -> None:
    (folder / "sleep.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    raylet = subprocess.Popen(["sleep", "600"])
    asking = ask_for_worker(folder, None, str(folder / "sleep.py"), raylet=raylet.pid)
    assert asking.stdout is not None
    worker = psutil.Process(int(asking.stdout.readline()))
    raylet.kill()
    raylet.wait()
    psutil.wait_procs([worker], timeout=60)
    assert not is_alive(worker)
    asking.communicate(timeout=60)
    late = ask_for_worker(folder, None, str(folder / "sleep.py"), raylet=raylet.pid)
    assert late.communicate(timeout=60)[0] == ""


def test_where_a_stage_has_ended_ray_starts_its_own_worker(stages: None, folder: Path) -> None:
    out, _ = ask_for_worker(folder, "generator", str(folder / "show.py"), "--a").communicate(timeout=120)
    worker = json.loads(out)
    assert worker["imported"] == [] and worker["arguments"] == ["--a"], (
        "the stage had a thread, which a fork would lack"
    )
    assert worker["environment"][newborn.STAGE] == "generator", (
        "Ray's own start takes the environment from the context"
    )


def test_a_nursery_ends_with_its_driver(folder: Path) -> None:
    code = (
        "import sys, time; from nursery import Stage, run_nursery\n"
        "with run_nursery({'buffer': Stage(['colorsys'], []), 'learner': Stage(['wave'], [])}): print('up', "
        "flush=True); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(newborn.__file__).parent)}
    driver = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None and driver.stdout.readline() == "up\n"
    (first,) = psutil.Process(driver.pid).children()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 60
    with pytest.raises(ProcessLookupError):  # stages are one process group
        while time.monotonic() < deadline:
            os.killpg(first.pid, 0)
            time.sleep(0.05)
    driver.stdout.close()


def test_a_driver_that_finds_the_tiny_model_or_a_checkpoint_never_imports_torch() -> None:
    code = (
        "import sys, pathlib; from slipstream import train; from learners import checkpoint; assert "
        "checkpoint.find_latest(pathlib.Path('nowhere')) is None\n"
        "from learners import tiny_cache; tiny_cache.Path.exists = lambda path: True\n"
        "tiny_cache.prepare_tiny_model(iter([('1 + 1', '2')])); assert not {'torch', 'transformers', 'vllm'} "
        "& set(sys.modules)"
    )
    root = Path(newborn.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'scripts'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
