"""Hosts on one machine: each has a network, processes, a hostname, a /dev/shm and a boot id of its own.

    host-1 ── eth0 ──┐
    host-2 ── eth0 ──┤ bridge in a network namespace of its own: nothing is seen from outside
    host-3 ── eth0 ──┘

They share the processors, the memory and the file system, but for /dev/shm and /tmp/ray. It needs the rights
of root and the programs `unshare`, `nsenter`, `ip` and `tc`: `find_obstacle` says what is missing.

A link may be taken down and up, and given a rate. All processes of a host end with `close`, or with the
process that made the hosts, however that one ends.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil

PROGRAMS = ("unshare", "nsenter", "mount", "ip", "tc", "bash", "timeout")
SUBNET = "10.77.0"
HOLD = """
set -e
mount -t tmpfs -o mode=1777 none /dev/shm
mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id
mkdir -p /tmp/ray && mount --bind "$1/ray" /tmp/ray
hostname "$2"
ip link set lo up
echo ready
exec cat
"""
"""The first program of a host. It ends, and all others of the host with it, when its input does."""
STEP_S = 10.0
"""Seconds that a step of the preparation may take."""


@cache
def find_obstacle() -> str:
    """Returns why this machine cannot have such hosts; empty where it can."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"hosts of their own need the programs {', '.join(missing)} (Debian: util-linux, iproute2)"
    try:
        with NetworkHosts(1) as hosts:
            hosts[0].run("true")
    except (subprocess.SubprocessError, OSError, RuntimeError) as error:
        return f"this machine allows no namespaces: {error}"
    return ""


class HostProcess:
    """A program that runs on a host."""

    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self.popen = popen
        self._process: psutil.Process | None = None

    @property
    def process(self) -> psutil.Process:
        """The program itself, as this machine sees it. `popen` is what has sent it to the host."""
        deadline = time.monotonic() + STEP_S
        while self._process is None and time.monotonic() < deadline:
            if found := psutil.Process(self.popen.pid).children():
                self._process = found[0]
            time.sleep(0.01)
        if self._process is None:
            raise RuntimeError(f"{self.popen.args!r} has not started within {STEP_S:.0f} s")
        return self._process

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.send_signal(number)


class NetworkHost:
    """One host. Its processes see each other, and no others."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        """`folder` keeps what is this host's alone on the file system."""
        self.name, self.address = name, address
        (folder / "ray").mkdir(parents=True)
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc",
             "sh", "-c", HOLD, "sh", str(folder), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None, "it is a pipe"
        if (said := self._holder.stdout.readline()) != "ready\n":
            raise RuntimeError(f"{name} cannot be made: {said.strip()}")
        (first,) = psutil.Process(self._holder.pid).children()
        self.pid = first.pid
        """Number of the host's first process, as this machine counts."""

    def start_program(
        self,
        *command: str | Path,
        environment: Mapping[str, str] | None = None,
        output: IO[Any] | int | None = subprocess.PIPE,
        folder: Path | None = None,
    ) -> HostProcess:
        """Starts a program on the host, with both outputs in one. `folder` is where it works."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-i", "-p"]
        where = [] if folder is None else [f"--wd={folder}"]
        return HostProcess(
            subprocess.Popen(
                [*enter, *where, "--", *map(str, command)], env=environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )
        )  # fmt: skip

    def run(self, *command: str | Path, timeout_s: float = STEP_S) -> str:
        """Runs a program on the host; returns what it prints. Raises subprocess.SubprocessError."""
        started = self.start_program(*command)
        try:
            said, _ = started.popen.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            started.send_signal(signal.SIGKILL)
            raise
        if started.popen.returncode:
            raise subprocess.SubprocessError(f"{' '.join(map(str, command))}: {said.strip()}")
        return said

    def list_processes(self) -> list[psutil.Process]:
        """Returns the processes of the host that live, but for its first."""
        own = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        found = []
        for process in psutil.process_iter(["pid", "status"]):
            with contextlib.suppress(OSError, psutil.Error):
                is_here = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == own
                if is_here and process.pid != self.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def reaches(self, other: "NetworkHost", timeout_s: float = 0.5) -> bool:
        """True when a connection to the other host is made, or refused there."""
        connect = f"timeout {timeout_s} bash -c 'echo > /dev/tcp/{other.address}/9' 2>&1 || echo $?"
        said = self.run("sh", "-c", connect)
        return "refused" in said or not said

    def count_received_bytes(self) -> int:
        """Returns the bytes that have come over the host's link so far."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        (counts,) = (line.split() for line in lines if line.strip().startswith("eth0:"))
        return int(counts[1])

    def list_shared_memory(self) -> list[str]:
        """Returns the names of what is in the host's /dev/shm."""
        return sorted(os.listdir(self.find_shared_memory()))

    def find_shared_memory(self) -> Path:
        """Returns the host's /dev/shm as this process sees it."""
        return Path(f"/proc/{self.pid}/root/dev/shm")

    def limit_shared_memory(self, room: int | None) -> None:
        """Leaves so many bytes in the host's /dev/shm beside what is there now. None: half of the memory, as
        at first."""
        place = os.statvfs(self.find_shared_memory())
        used = (place.f_blocks - place.f_bfree) * place.f_frsize
        size = "50%" if room is None else used + room
        self.run("mount", "-o", f"remount,size={size}", "/dev/shm")

    def close(self) -> None:
        """Ends all processes of the host."""
        self._holder.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).kill()
        self._holder.wait(STEP_S)


class NetworkHosts(Sequence[NetworkHost]):
    """Hosts on one bridge, for a `with` block."""

    def __init__(self, count: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._hosts: list[NetworkHost] = []
        self._switch = subprocess.Popen(
            ["unshare", "--net", "sh", "-ec",
             "ip link add br0 type bridge; ip link set br0 up; echo ready; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            assert self._switch.stdout is not None, "it is a pipe"
            if (said := self._switch.stdout.readline()) != "ready\n":
                raise RuntimeError(f"a bridge cannot be made: {said.strip()}")
            for number in range(1, count + 1):
                self._add_host(number)
        except BaseException:
            self.close()
            raise

    def _add_host(self, number: int) -> None:
        name = f"host-{number}"
        host = NetworkHost(name, f"{SUBNET}.{number}", self._folder / name)
        self._hosts.append(host)
        switch, port = str(self._switch.pid), f"port{number}"
        for command in (
            f"ip link add {port} netns {switch} type veth peer name eth0 netns {host.pid}",
            f"nsenter -t {switch} -n ip link set {port} master br0 up",
            f"nsenter -t {host.pid} -n ip addr add {host.address}/24 dev eth0",
            f"nsenter -t {host.pid} -n ip link set eth0 up",
        ):
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=STEP_S)
            if done.returncode:
                raise RuntimeError(f"{command}: {done.stderr.strip()}")

    # ---- links

    def cut_link(self, host: NetworkHost) -> None:
        """Separates a host from all others. Nobody is told: the interfaces stay up."""
        self._run_in_switch("ip", "link", "set", self._name_port(host), "nomaster")

    def mend_link(self, host: NetworkHost) -> None:
        self._run_in_switch("ip", "link", "set", self._name_port(host), "master", "br0")

    def limit_link(self, host: NetworkHost, bits_per_s: int | None) -> None:
        """Limits what a host sends, and what it receives, to a rate each. None: no limit."""
        port = self._name_port(host)
        tbf = ["tbf", "rate", f"{bits_per_s}bit", "burst", "16kb", "latency", "400ms"]
        for run, device in ((host.run, "eth0"), (self._run_in_switch, port)):
            with contextlib.suppress(subprocess.SubprocessError):  # there was no limit
                run("tc", "qdisc", "del", "dev", device, "root")
            if bits_per_s is not None:
                run("tc", "qdisc", "add", "dev", device, "root", *tbf)

    def _name_port(self, host: NetworkHost) -> str:
        return f"port{self._hosts.index(host) + 1}"

    def _run_in_switch(self, *command: str) -> None:
        enter = ["nsenter", "-t", str(self._switch.pid), "-n", *command]
        subprocess.run(enter, check=True, capture_output=True, timeout=STEP_S)

    def __getitem__(self, number: Any) -> Any:
        return self._hosts[number]

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> "NetworkHosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for host in self._hosts:
            host.close()
        self._switch.kill()
        self._switch.wait(STEP_S)
        shutil.rmtree(self._folder, ignore_errors=True)
