"""A worker that never comes up is named, with what it waits for."""

import os
import subprocess
import sys
from pathlib import Path

SILENT = """
import os, socket, sys, tempfile, time, ray
from pathlib import Path
from configs.load import load_config
folder = tempfile.mkdtemp()
never = socket.socket(socket.AF_UNIX)
never.bind(f"{folder}/generator")
never.listen()  # who asks this stage of the nursery for a worker waits for ever
os.environ["SLIPSTREAM_NURSERY"] = folder

from slipstream.answers import FirstAnswers
from slipstream.cluster import run_cluster, stage_options
from slipstream.role_failures import RoleFailed
from slipstream.stop_signals import StopSignals

class Up:
    def get_pid(self):
        return os.getpid()

class Stopped(Up):
    def get_pid(self):
        time.sleep(600)

with run_cluster(load_config(["generators.count=2"])):
    said, clock = [], [0.0]
    answers = FirstAnswers(said.append, StopSignals(), clock=lambda: clock[0])
    roles = {"learner-0": ray.remote(Up).options(num_cpus=0).remote()}
    roles["stopped"] = ray.remote(Stopped).options(num_cpus=0).remote()
    roles["generator-0"] = ray.remote(Up).options(num_cpus=0, **stage_options("generator")).remote()
    for name, actor in roles.items():
        answers.expect_answer(name, actor)
    ray.get(roles["learner-0"].get_pid.remote())
    while ray._private.state.actors(roles["stopped"]._actor_id.hex())["State"] != "ALIVE":
        time.sleep(0.05)
    for now in (44.0, 46.0, 299.0):
        clock[0] = now
        answers.check_silent_roles()
        print(now, *said)
        said.clear()
    clock[0] = 301.0
    try:
        answers.check_silent_roles()
    except RoleFailed as error:
        print(error)
"""


def test_a_worker_that_never_comes_up_is_named_within_a_minute_with_what_it_waits_for(tmp_path: Path) -> None:
    """Beside it stand a role that answers, and one whose process is up and answers nothing. Ray's state is
    real, the clock is not."""
    (tmp_path / "silent.py").write_text(SILENT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "silent.py")]
    with (tmp_path / "errors").open("w") as errors:  # a file, whose end no agent of Ray's holds up
        ran = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=300
        )
    assert ran.returncode == 0, (tmp_path / "errors").read_text()
    early, named, once, end = ran.stdout.splitlines()
    assert early == "44.0" and once == "299.0"
    assert (
        "generator-0 has been placed, and has not answered for 46 s: it waits for a worker process, which "
        "has "
        "not come up" in named
    )
    assert (
        "PENDING_CREATION" in named
        and "stopped has been placed, and has not answered for 46 s: its process" in named
    )
    assert "learner-0" not in named and end.startswith("stopped must answer within 300 s: its process ")
