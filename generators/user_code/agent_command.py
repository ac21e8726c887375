"""An agent's command, run in a worker: it speaks with the gateway, and its exit code is its outcome."""

import collections
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

_KEPT_BYTES = 64 << 10
"""The end of the output that the outcome holds."""
_CHUNK_BYTES = 1 << 16


def run_command(
    command: Sequence[str], row: Mapping[str, Any], base_url: str, api_key: str
) -> dict[str, Any]:
    """Runs `command` (argv) until it ends, and returns `exit_code` and `output`, which is the end of what it
    printed.

    Its environment has OPENAI_BASE_URL, OPENAI_API_KEY, and the row as JSON in SLIPSTREAM_ROW.
    """
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "SLIPSTREAM_ROW": json.dumps(row),
    }
    with subprocess.Popen(
        list(command), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        # The output is read while it is written, because an agent may print more than a pipe holds.
        chunks = collections.deque[bytes](maxlen=_KEPT_BYTES // _CHUNK_BYTES + 1)
        while chunk := process.stdout.read(_CHUNK_BYTES):
            chunks.append(chunk)
        output = b"".join(chunks)[-_KEPT_BYTES:]
    return {"exit_code": process.returncode, "output": output.decode(errors="replace")}
