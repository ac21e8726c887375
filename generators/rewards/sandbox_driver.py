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
from collections.abc import Set

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
    # Made before the code runs, which may replace any function.
    expressions = [compile(one, "<test>", "eval") for one in job.get("expressions", ())]
    statements = compile("\n".join(job.get("statements", ())), "<test>", "exec")
    run, evaluate, write = exec, eval, os.write
    names = vars(importlib.import_module("solution"))
    if job["kind"] == "call":
        owner = names["Solution"]() if job["function"] not in names and "Solution" in names else None
        function = names[job["function"]] if owner is None else getattr(owner, job["function"])
        answer = json.dumps(function(*job["arguments"]))
    elif job["kind"] == "values":
        tested = dict(names)
        answer = json.dumps([write_literal(evaluate(one, tested)) for one in expressions])
    else:
        run(statements, dict(names))
        answer = job["token"]
    write(answers, answer.encode())


def write_literal(value: object) -> str:
    """Returns a value as text that `ast.literal_eval` reads; subclasses become what Python has of itself.

    Raises TypeError for a value of another type.
    """
    if value is None:
        return "None"
    for kind in (bool, int, str, bytes, complex):
        if isinstance(value, kind):
            return kind.__repr__(value)
    if isinstance(value, float):
        # Infinity has no literal of its own.
        return float.__repr__(value).replace("inf", "1e999")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write_literal(k)}: {write_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(write_literal, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(f"{write_literal(one)}, " for one in value) + ")"
    if isinstance(value, Set):
        return "{" + ", ".join(map(write_literal, value)) + "}" if value else "set()"
    if hasattr(value, "dtype") and hasattr(value, "item"):
        return write_literal(value.item())
    if hasattr(value, "__index__"):
        return str(int(value))
    if hasattr(value, "__float__"):
        return write_literal(float(value))
    raise TypeError(f"a tested value must be a number, text or a collection of them, got {type(value)}")


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
