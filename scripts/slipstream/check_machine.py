"""Checks of the machine itself, and the record of a check."""

import os
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIB, GIB = 1 << 20, 1 << 30


class NotHere(Exception):
    """The machine lacks what a check needs, and nothing is wrong with that."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    run: Callable[[], str]
    gpu: bool = False
    """True when the check is not possible without a GPU."""
    deadline_s: float = 60.0


def count_gpus() -> int:
    """Counts the GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    found = listed.stdout.count("GPU ") if listed.returncode == 0 else 0
    return (
        found if visible is None else min(found, len([name for name in visible.split(",") if name.strip()]))
    )


def check_with_package(package: str, how: str, check: Callable[[], str]) -> str:
    """Runs the check where the package is installed. Raises NotHere, with `how` to install it, elsewhere."""
    if find_spec(package) is None:
        raise NotHere(f"{package} is not installed ({how})")
    return check()


# ---- the machine


def check_packages() -> str:
    """Compares the installed packages with the versions that pyproject.toml names."""
    from packaging.requirements import Requirement

    wrong = []
    for line in requires("slipstream") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            wrong.append(f"{wanted} (not here)")
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            wrong.append(f"{wanted} (got {found})")
    if wrong:
        raise RuntimeError(f"the environment must have {', '.join(wrong)}: delete .venv and start again")
    return "as pyproject.toml has them"


def check_shared_memory() -> str:
    """Tries shared memory, where weights and batches lie."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="slipstream-check-") as file:
        file.write(bytes(64 * MIB))
    os.close(os.memfd_create("slipstream-check"))
    free = shutil.disk_usage("/dev/shm").free
    if free < 256 * MIB:
        raise RuntimeError(f"/dev/shm must have 256 MiB free (docker: --shm-size), got {free / MIB:.0f}")
    return f"{free / GIB:.1f} GiB free"


def check_limits() -> str:
    """Reads the limit of open files, and opens a pidfd, by which roles watch the driver."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1024:
        raise RuntimeError(f"the limit of open files must be at least 1024 (ulimit -n), got {hard}")
    os.close(os.pidfd_open(os.getpid()))
    return f"open files {soft} (at most {hard}), pidfd"


def check_disk() -> str:
    """Writes and syncs a file at the checkout, as the journal does."""
    free = shutil.disk_usage(ROOT).free
    with tempfile.TemporaryFile(dir=ROOT) as file:
        file.write(bytes(MIB))
        file.flush()
        os.fsync(file.fileno())
    if free < GIB:
        raise RuntimeError(f"{ROOT} must have 1 GiB free, got {free / GIB:.1f}")
    return f"{free / GIB:.0f} GiB free at the checkout"


def check_compiler() -> str:
    """Tries the C compiler with which torch.compile and Triton build their kernels."""
    if (found := shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")) is None:
        raise RuntimeError("a C compiler must be on the PATH (gcc), got none")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "check.c"
        source.write_text('#include <stdio.h>\nint main(void) { return puts("") < 0; }\n')
        subprocess.run([found, str(source), "-o", f"{folder}/check"], check=True, capture_output=True)
        subprocess.run([f"{folder}/check"], check=True, capture_output=True)
    return found


def check_ports() -> str:
    """Connects to a server on the loopback interface, and looks for CURVE in ZeroMQ."""
    import zmq

    if not zmq.has("curve"):
        raise RuntimeError("ZeroMQ must have CURVE (libsodium), got one without")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), 5.0),
    ):
        port = server.getsockname()[1]
    return f"127.0.0.1 (port {port} for one), ZeroMQ {zmq.zmq_version()} with CURVE"


# ---- the buffer, and Ray


def check_buffer() -> str:
    """Takes a group from its lease through the journal into a batch."""
    import threading

    from buffers import messages as m
    from buffers.client import BufferClient, TakenBatch
    from buffers.server import BufferServer
    from buffers.trajectory import Trajectory, to_batch
    from configs.load import load_config

    small = ["learner.groups_per_step=1", "learner.samples_per_prompt=2", "eval.prompts=0", "run.steps=1"]
    with tempfile.TemporaryDirectory() as folder:
        server = BufferServer(load_config([*small, "buffer.durability=fsync"]), Path(folder))
        thread = threading.Thread(target=server.run)
        thread.start()
        client = BufferClient(server.address, timeout_s=10.0)
        try:
            client.call(m.PublishVersion(version=0, manifest_locator="w"), m.Acknowledged)
            lease = client.call(m.RequestLeases(generator="g", count=1, wait_s=5.0), m.LeaseGrant).leases[0]
            rows = [
                Trajectory(
                    group=lease.group, sample=sample, due=lease.due, prompt_id=lease.index, task="t",
                    tokens=[1, 2], sampled=[False, True], logprobs=[0.0, -1.0], versions=[-1, 0], reward=1.0,
                    finish_reason="stop", generator="g", started_at=0.0, finished_at=1.0,
                )
                for sample in range(2)
            ]  # fmt: skip
            verdicts = client.submit_groups("g", [lease.id], [len(rows)], to_batch(rows))
            taken = client.take_batch(0, wait_s=5.0)
            if verdicts != ["accepted"] or not isinstance(taken, TakenBatch) or taken.table.num_rows != 2:
                raise RuntimeError(f"a group must be accepted and handed out, got {verdicts} and {taken}")
        finally:
            client.close()
            server.stop()
            thread.join()
    return "a group synced, and handed out"


def check_ray() -> str:
    """Starts a cluster on this host, as a run does."""
    from configs.load import load_config
    from slipstream.cluster import run_cluster

    simulated = ["generators.engine=simulated", "learner.engine=simulated", "generators.count=1"]
    with run_cluster(load_config(simulated)):
        return f"ray {version('ray')}"


def check_gpus() -> str:
    """Computes with torch on each GPU that nvidia-smi names."""
    import torch

    if torch.cuda.device_count() != count_gpus():
        raise RuntimeError(
            f"torch must see {count_gpus()} GPUs, as nvidia-smi does, got {torch.cuda.device_count()}"
        )
    for number in range(torch.cuda.device_count()):
        square = torch.ones(64, 64, device=f"cuda:{number}", dtype=torch.bfloat16)
        assert float((square @ square).sum()) == 64**3
    return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
