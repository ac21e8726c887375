"""The first program inside the sandbox: it takes its limits, then runs a reply's code in its own place.

The sandbox runs this file's text with `python -I -c`, so it imports nothing of Slipstream. On its input stand
ten digits, that many bytes of JSON, and then the input of the code. It writes `BEGAN` as soon as the limits
hold.
"""

import importlib
import json
import os
import resource
import runpy
import sys

BEGAN = b"began\n"
FOLDER = "/tmp"
"""The one place in which the code may write."""


def read_exactly(size: int) -> bytes:
    """Reads from the file itself, so that nothing of the code's input is swallowed."""
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            raise EOFError("the sandbox's input ended early")
        data += piece
    return data


def take_limits(job: dict) -> None:
    limits = {
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_CPU: job["cpu_s"],
        resource.RLIMIT_FSIZE: job["disk_bytes"],
        resource.RLIMIT_NPROC: job["processes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def run_job(job: dict) -> None:
    write_file("solution.py", job["code"])
    sys.argv = [f"{FOLDER}/solution.py"]
    sys.path.insert(0, FOLDER)
    if job["kind"] == "program":
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    # What the code prints is not its answer, so the answer has a file of its own.
    answers = os.dup(1)
    os.dup2(2, 1)
    names = vars(importlib.import_module("solution"))
    if job["kind"] == "call":
        owner = names["Solution"]() if job["function"] not in names and "Solution" in names else None
        function = names[job["function"]] if owner is None else getattr(owner, job["function"])
        answer = json.dumps(function(*job["arguments"]))
    else:
        write_file("statements.py", "\n".join(job["statements"]))
        runpy.run_path(f"{FOLDER}/statements.py", init_globals=dict(names))
        answer = job["token"]
    os.write(answers, answer.encode())


def write_file(name: str, text: str) -> None:
    with open(f"{FOLDER}/{name}", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def main() -> None:
    job = json.loads(read_exactly(int(read_exactly(10))))
    take_limits(job)
    os.write(1, BEGAN)
    run_job(job)


if __name__ == "__main__":
    main()
