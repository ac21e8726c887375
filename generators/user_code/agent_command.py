"""Runs an agent as a command: it finds the gateway and its row in its environment, and the last line that it
prints is its outcome."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

MAX_TAIL = 1 << 20
"""Bytes of the end of what a command prints, in which its outcome stands."""


MAX_ROW = 128 << 10
"""The kernel's limit on one variable of a process's environment, in bytes."""
UNPROXIED = ("NO_PROXY", "no_proxy")


def bypass_proxies(base_url: str) -> None:
    """Lets this process and its children reach the gateway directly on a host that has a proxy for HTTP: the
    proxy cannot, and would see the key."""
    host = urlsplit(base_url).hostname or ""
    held = [value for name in UNPROXIED if (value := os.environ.get(name))]
    for name in UNPROXIED:
        os.environ[name] = ",".join(dict.fromkeys([*",".join(held).split(","), host])).strip(",")


def check_command(command: Any) -> list[str]:
    """Raises ValueError for an `agent_command` that is no list of words."""
    is_list = isinstance(command, Sequence) and not isinstance(command, str)
    if not is_list or not command or not all(isinstance(word, str) and word for word in command):
        raise ValueError(f"agent_command must be a list of words, got {command!r}")
    return list(command)


def run_command(command: Sequence[str], row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
    """Runs the command to its end; returns the last line that it prints, as JSON where it is that.

    Its output also goes to this process's own, whose limit so holds for it. It dies with this process. Raises
    ValueError when the command cannot be started or fails.
    """
    written = json.dumps(row)
    if (size := len(f"SLIPSTREAM_ROW={written}") + 1) > MAX_ROW:
        raise ValueError(
            f"the row of an agent_command must have at most {MAX_ROW} bytes as SLIPSTREAM_ROW (hand longer "
            f"facts over in a file that the row names), got {size}"
        )
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "SLIPSTREAM_ROW": written,
    }
    try:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"agent_command must name a program that starts, got {command!r}: {error}"
        ) from error
    output = _follow_output(process)
    if status := process.wait():
        raise ValueError(f"agent_command must exit with 0, got {status} from {command!r}")
    return parse_outcome(output)


def _follow_output(process: "subprocess.Popen[bytes]") -> bytes:
    """Returns the end of what the command prints until it ends; children of it that live on may hold its
    output open."""
    assert process.stdout is not None
    pipe, ending = process.stdout.fileno(), os.pidfd_open(process.pid)
    os.set_blocking(pipe, False)
    tail = bytearray()
    try:
        while True:
            has_ended = ending in select.select([pipe, ending], [], [])[0]
            while part := _read_part(pipe):
                sys.stdout.buffer.write(part)
                sys.stdout.buffer.flush()
                tail = (tail + part)[-MAX_TAIL:]
            if has_ended or part is not None:
                return bytes(tail)
    finally:
        os.close(ending)


def _read_part(pipe: int) -> bytes | None:
    """Returns None when there is nothing to read now, and nothing at the end of the output."""
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return None


def parse_outcome(output: bytes) -> Any:
    """Returns the last line that is not empty: what it means in JSON, or its text."""
    lines = output.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        return json.loads(last)
    except (ValueError, RecursionError):
        return last
