"""A sandbox for code that nobody has read: bubblewrap's namespaces, and limits of the kernel.

The code has no network, no home and no keys: it sees `/usr` and its interpreter, read-only, and an empty
`/tmp` of bounded size. It is an unprivileged user who cannot become another. When it ends, or its time is
over, all its processes are gone, those that it has cut loose included: they share a process namespace, which
ends with its first process.
"""

import fcntl
import json
import os
import select
import selectors
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from generators.rewards.sandbox_driver import BEGAN

NOBODY = 65534
"""The user as whom root runs the sandbox: the kernel does not count the processes of root."""
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
START_S = 60.0
"""Seconds that a sandbox may take to begin, before the time of its code counts."""
LAST_S = 10.0
"""Seconds that the processes of a killed sandbox have to be gone."""
HOW_TO = (
    "install bubblewrap 0.8 or newer (apt-get install bubblewrap) and allow user namespaces "
    "(sysctl user.max_user_namespaces=16384; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; a "
    "container needs a seccomp profile that lets it unshare)"
)
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SandboxMissing(ValueError):
    """This machine cannot run a sandbox. The message says why, and how to mend it."""


class SandboxFailed(Exception):
    """A sandbox did not start, so nothing is known about the code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    timeout_s: float = 10.0
    """Seconds of the clock for one program, from its beginning."""
    memory_bytes: int = 512 << 20
    """Address space of each process."""
    disk_bytes: int = 64 << 20
    """Size of `/tmp`, which takes memory, and of its largest file."""
    processes: int = 16
    """Processes and threads at a time."""
    output_bytes: int = 1 << 20
    """Bytes on standard output, and as many on standard error."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    output: bytes
    """Standard output, up to the limit."""
    errors: bytes
    """Standard error, up to the limit."""
    exit_code: int
    verdict: str
    """`ended`, or the limit that ended it: `timeout` or `output`."""
    seconds: float = field(default=0.0, compare=False)
    """Time of the clock that the program took, the start of its sandbox left out."""


class Sandbox:
    """Runs one program at a time, each in a new sandbox."""

    def __init__(self, limits: SandboxLimits, python: str | None = None) -> None:
        """`python`: interpreter in the sandbox; None: the one of this process, or else the system's.

        Tries one program. Raises SandboxMissing where that fails.
        """
        self.limits = limits
        bwrap = find_bubblewrap()
        failures = []
        for candidate in [python] if python is not None else list_interpreters():
            self._argv = [bwrap, *list_isolation(limits, candidate), candidate, "-I", "-c", read_driver()]
            try:
                result = self.run_program({"kind": "program", "code": "print(6 * 7)"})
            except SandboxFailed as error:
                failures.append(f"{candidate}: {error}")
                continue
            if result.output == b"42\n":
                return
            failures.append(f"{candidate}: {result}")
        user = " as the user nobody" if os.getuid() == 0 else ""
        raise SandboxMissing(
            f"a sandbox must start on this machine{user}, got {'; '.join(failures)}. To mend it, {HOW_TO}"
        )

    def run_program(
        self, job: dict[str, Any], given: bytes = b"", timeout_s: float | None = None
    ) -> SandboxResult:
        """Runs a job of `sandbox_driver.run_job` with `given` as its standard input, for at most `timeout_s`
        (None: the limits').

        Returns when all its processes are gone. Raises SandboxFailed where the sandbox did not start.
        """
        limits = self.limits
        sizes = {
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            # bubblewrap's own process in the namespace counts too.
            "processes": limits.processes + 1,
            "cpu_s": int(limits.timeout_s) + 1,
        }
        header = json.dumps(job | sizes).encode()
        source = seal_bytes(b"%010d" % len(header) + header + given)
        told, tells = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        is_root = os.getuid() == 0
        try:
            process = subprocess.Popen(
                [*self._argv[:1], "--info-fd", str(tells), *self._argv[1:]],
                pass_fds=(tells,),
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd="/",
                env={},
                user=NOBODY if is_root else None,
                group=NOBODY if is_root else None,
                extra_groups=[] if is_root else None,
            )
        except OSError as error:
            os.close(told)
            raise SandboxFailed(f"bubblewrap must start, got {error}") from error
        finally:
            os.close(source)
            os.close(tells)
        with process:
            try:
                result = self._read_pipes(process, limits.timeout_s if timeout_s is None else timeout_s)
            finally:
                process.kill()
                process.wait()
                await_namespace(told)
                os.close(told)
        if not result.output.startswith(BEGAN):
            text = result.errors.decode(errors="replace").strip()
            raise SandboxFailed(
                f"a sandbox must begin, got exit code {process.returncode} ({result.verdict}): {text}"
            )
        return replace(result, output=result.output.removeprefix(BEGAN), exit_code=process.returncode)

    def _read_pipes(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> SandboxResult:
        """Reads both outputs until they end. At a limit it kills the sandbox, and reads on without keeping
        anything: the pipes end when the last process that holds them is gone."""
        assert process.stdout is not None and process.stderr is not None
        kept = {process.stdout: bytearray(), process.stderr: bytearray()}
        bounds = {
            process.stdout: self.limits.output_bytes + len(BEGAN),
            process.stderr: self.limits.output_bytes,
        }
        began_at, verdict, has_begun = time.monotonic(), "ended", False
        deadline = began_at + START_S
        with selectors.DefaultSelector() as selector:
            for pipe in kept:
                selector.register(pipe, selectors.EVENT_READ, pipe)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    pipe = key.data
                    data = os.read(pipe.fileno(), 1 << 16)
                    if not data:
                        selector.unregister(pipe)
                    elif verdict == "ended":
                        kept[pipe] += data
                        if not has_begun and kept[process.stdout].startswith(BEGAN):
                            has_begun, began_at = True, time.monotonic()
                            deadline = began_at + timeout_s
                        if len(kept[pipe]) > bounds[pipe]:
                            verdict, deadline = "output", time.monotonic() + LAST_S
                            process.kill()
                if not ready and time.monotonic() >= deadline:
                    if verdict != "ended":
                        raise SandboxFailed(
                            f"a killed sandbox must end within {LAST_S:g} s, got processes left"
                        )
                    verdict, deadline = "timeout", time.monotonic() + LAST_S
                    process.kill()
        output, errors = (bytes(kept[pipe][: bounds[pipe]]) for pipe in kept)
        # The exit code is known once the process has been waited for.
        return SandboxResult(output, errors, 0, verdict, time.monotonic() - began_at)


def await_namespace(told: int) -> None:
    """Waits until the first process of a sandbox is gone, and so all the others. bubblewrap, which has ended,
    wrote its pid to `told`.

    Raises SandboxFailed where it does not go.
    """
    try:
        pid = int(json.loads(os.read(told, 4096))["child-pid"])
        gone = os.pidfd_open(pid)
    except (BlockingIOError, ValueError, ProcessLookupError):  # not begun, or already gone
        return
    try:
        if not select.select([gone], [], [], LAST_S)[0]:
            raise SandboxFailed(f"a killed sandbox must end within {LAST_S:g} s, got process {pid} left")
        # A worker process inherits the orphans below it. Anywhere else init does.
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    finally:
        os.close(gone)


def seal_bytes(data: bytes) -> int:
    """Returns a file in memory that nobody can write to, at its beginning.

    A program that is given a pipe may let its writer wait; a file on disk could be written to through it.
    """
    descriptor = os.memfd_create("sandbox", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


@cache
def read_driver() -> str:
    return Path(__file__).with_name("sandbox_driver.py").read_text()


def find_bubblewrap() -> str:
    """Returns the path of bubblewrap. Raises SandboxMissing where it is missing or too old."""
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxMissing(f"bubblewrap must be on the PATH (`bwrap`), got none. To mend it, {HOW_TO}")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.split()[-1:]
    if not version or tuple(map(int, version[0].split(".")[:2])) < (0, 8):
        raise SandboxMissing(
            f"bubblewrap must be 0.8 or newer, got {version} at {path}. To mend it, {HOW_TO}"
        )
    return path


def list_interpreters() -> list[str]:
    """Returns the interpreters to try: this one, without its virtual environment, then the system's."""
    here = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = [str(path.resolve()) for path in (here, Path("/usr/bin/python3")) if path.exists()]
    return list(dict.fromkeys(found))


def list_isolation(limits: SandboxLimits, python: str) -> list[str]:
    """Returns bubblewrap's arguments: new namespaces, and a file system with nothing in it but the system and
    the interpreter."""
    words = ["--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session"]
    words += [
        "--cap-drop",
        "ALL",
        "--clearenv",
        "--setenv",
        "PATH",
        "/usr/bin:/bin",
        "--setenv",
        "HOME",
        "/tmp",
    ]
    words += ["--setenv", "LANG", "C.UTF-8", "--setenv", "PYTHONDONTWRITEBYTECODE", "1"]
    words += ["--setenv", "OMP_NUM_THREADS", "1", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    words += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    for folder in list_prefixes(python):
        words += ["--ro-bind", folder, folder]
    # Everything that bubblewrap made on the way is writable until it is remounted.
    words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    return [
        *words,
        "--size",
        str(limits.disk_bytes),
        "--tmpfs",
        "/tmp",
        "--remount-ro",
        "/",
        "--chdir",
        "/tmp",
        "--",
    ]


def list_prefixes(python: str) -> list[str]:
    """Returns the folders outside `/usr` that an interpreter lives in, its virtual environment first."""
    folders = [Path(python).absolute().parent.parent, Path(python).resolve().parent.parent]
    outside = [one for one in dict.fromkeys(folders) if one != Path("/") and not one.is_relative_to("/usr")]
    for folder in outside:
        if not list(folder.glob("lib/python3*")):
            raise ValueError(
                f"python must be PREFIX/bin/NAME with a folder PREFIX/lib/python3…, got {python!r}"
            )
    return [str(one) for one in outside]
