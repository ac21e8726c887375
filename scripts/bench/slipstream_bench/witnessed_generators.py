"""The generators of `chaos_run.py`: a process that has imported this module has the small engine in vLLM's
place, and a witness of what the buffer acknowledges."""

import os
import sys
from pathlib import Path
from typing import Any

import generators.joining
from buffers import messages as m
from generators.worker import Generator
from slipstream_bench import small_engine
from slipstream_bench.leftovers import FOLDER_MARK


class WitnessedGenerator(Generator):
    """Writes down each group that the buffer has acknowledged, as `audit.py` wants it: `LEASE GROUP`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._record = Path(os.environ[FOLDER_MARK]) / f"{self.name}.acknowledged"
        self._group_of: dict[int, int] = {}
        """Group of each lease, by lease."""

    def _handle_reply(self, reply: m.Reply) -> None:
        super()._handle_reply(reply)
        if isinstance(reply, m.LeaseGrant):
            self._group_of |= {lease.id: lease.group for lease in reply.leases if not lease.evaluation}
        if isinstance(reply, m.LeaseReceipt):
            verdicts = zip(reply.leases, reply.verdicts, strict=True)
            kept = [
                f"{lease} {self._group_of[lease]}\n" for lease, verdict in verdicts if verdict == "accepted"
            ]
            with open(self._record, "a") as file:
                file.write("".join(kept))


sys.modules["generators.vllm_engine"] = small_engine
generators.joining.Generator = WitnessedGenerator  # type: ignore[misc]
