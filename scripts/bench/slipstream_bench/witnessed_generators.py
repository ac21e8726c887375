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
        """Group of each lease, by lease; -1 for a lease of an evaluation, which trains nothing."""

    def _handle_reply(self, reply: m.Reply) -> None:
        super()._handle_reply(reply)
        if isinstance(reply, m.LeaseGrant):
            self._group_of |= {lease.id: -1 if lease.evaluation else lease.group for lease in reply.leases}
        if isinstance(reply, m.LeaseReceipt):
            verdicts = zip(reply.leases, reply.verdicts, strict=True)
            accepted = [
                (lease, self._group_of[lease]) for lease, verdict in verdicts if verdict == "accepted"
            ]
            kept = [f"{lease} {group}\n" for lease, group in accepted if group >= 0]
            with open(self._record, "a") as file:
                file.write("".join(kept))


sys.modules["generators.vllm_engine"] = small_engine
generators.joining.Generator = WitnessedGenerator  # type: ignore[misc]
