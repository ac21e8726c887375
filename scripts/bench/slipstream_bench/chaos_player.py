"""A process that `chaos.py` kills: a generator whose episodes have several turns and wait for tools.

The generator is the product's own. Its engine is simulated, and weights are only numbered. Each environment
starts a child process, as a sandbox does, and none of them may outlive the generator.
"""

import contextlib
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from buffers import messages as m
from buffers.client import BufferClient, BufferGone
from configs.schema import Config
from generators.environment import Message, Row, Turn
from generators.simulated_engine import SimulatedEngine
from generators.task_episodes import TaskEpisodes
from generators.worker import Generator
from slipstream_bench.byte_tokenizer import make_byte_tokenizer


class SandboxEnvironment:
    """Plays one to three turns. Each waits for a tool, for up to twice as long as a lease lasts."""

    name = "sandbox"

    def reset(self, row: Row, seed: int) -> Turn:
        # A session of its own, as a daemon has.
        self._sandbox = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self._left = 1 + seed % 3
        self._wait_s = (seed % 7) / 7 * 0.5 if seed % 20 else 3.0
        return Turn(messages=[{"role": "user", "content": f"question {row['index']}"}])

    def step(self, reply: Message) -> Turn:
        time.sleep(self._wait_s)
        self._left -= 1
        messages = [{"role": "user", "content": "next"}] if self._left else []
        return Turn(messages=messages, reward=float(self._left), done=not self._left)

    def close(self) -> None:
        if (sandbox := getattr(self, "_sandbox", None)) is not None:
            sandbox.kill()
            sandbox.wait()


class NumberedWeights:
    """Stands in for a subscriber: the chaos consumer announces `life/version` and publishes no weights."""

    fetched_bytes = 0

    def prepare_version(self, announced: str, *, again: bool = False) -> Any:
        manifest = SimpleNamespace(version=int(announced.rpartition("/")[2]), num_bytes=0, digest="")
        return SimpleNamespace(manifest=manifest, checks=1)

    def refresh_spare(self) -> None:
        """Holds no spare."""

    def close(self) -> None:
        """Holds nothing."""

    def describe_fetching(self) -> tuple[str, bool]:
        return "fetching", True


class RecordingGenerator(Generator):
    """Writes down each group that the buffer acknowledges as accepted, for the audit."""

    def __init__(self, folder: Path, name: str, *arguments: Any) -> None:
        super().__init__(name, *arguments)
        self._record = open(folder / f"{name}.acknowledged", "a", buffering=1)  # noqa: SIM115
        self._leased_groups: dict[int, int] = {}
        """Numbers of groups by lease id."""

    def _handle_reply(self, reply: m.Reply) -> None:
        match reply:
            case m.LeaseGrant(leases=leases):
                self._leased_groups |= {lease.id: lease.group for lease in leases}
            case m.LeaseReceipt(leases=leases, verdicts=verdicts):
                for lease_id, verdict in zip(leases, verdicts, strict=True):
                    if verdict == "accepted" and lease_id in self._leased_groups:
                        self._record.write(f"{lease_id} {self._leased_groups[lease_id]}\n")
        super()._handle_reply(reply)


def play_episodes(config: Config, folder: Path, name: str) -> None:
    """Runs generators until the process is killed. One that has not heard of the buffer for as long as a
    lease lasts leaves, as it should, and another one joins."""
    # The configuration is the journal's, so the task is named here and not there.
    config.task.name, config.task.args = f"{__name__}:SandboxEnvironment", {}
    config.generators.max_sequences, config.sampling.max_tokens = 16, 24
    config.generators.max_model_len = 256
    tokenizer = make_byte_tokenizer()
    while True:
        client = BufferClient(config.buffer.address, timeout_s=30.0)
        client.call(m.JoinRun(generator=name), m.JoinedRun)
        engine = SimulatedEngine(tokens_per_s=400, slots=8, mean_tokens=12, cv=1.0)
        generator = RecordingGenerator(
            folder, name, config, client, engine, TaskEpisodes(config, tokenizer), NumberedWeights()
        )
        with contextlib.suppress(BufferGone):
            generator.run()
