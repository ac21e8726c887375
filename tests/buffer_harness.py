"""A buffer behind real sockets for tests: its settings, groups to hand in, and a client that speaks for
every role."""

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa

from buffers import messages as m
from buffers.client import BufferClient, RefusedByBuffer, TakenBatch
from buffers.evaluation_statistics import EvaluationResult
from buffers.run_status import RunStatus
from buffers.server import BufferServer, Stuck
from buffers.trajectory import SCHEMA, SCHEMA_VERSION, Trajectory, encode_batch, to_batch
from configs.schema import Config

SMALL_RUN = ["learner.groups_per_step=2", "learner.samples_per_prompt=2", "run.steps=4", "eval.prompts=0"]


def make_group(lease: m.Lease, version: int = 0, **changes: object) -> list[Trajectory]:
    fields: dict[str, object] = {
        "tokens": [5, 6, 7],
        "sampled": [False, True, True],
        "logprobs": [0.0, -0.5, -1.0],
        "versions": [-1, version, version],
        "reward": 1.0,
        "rewards": {"correct": 1.0},
        "finish_reason": "stop",
        "generator": "g",
        "started_at": 1.0,
        "finished_at": 2.0,
        "group": lease.group,
        "due": lease.due,
        "prompt_id": lease.index,
        "task": lease.task,
    }
    fields |= changes
    return [Trajectory(sample=i, **fields) for i in range(lease.num_samples)]  # type: ignore[arg-type]


def compress_batch(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    return sink.getvalue()[SCHEMA.serialize().size :]


class BufferHarness:
    """A buffer in a thread, and a client."""

    def __init__(self, config: Config, folder: Path, resume_step: int | None = None) -> None:
        self.server = BufferServer(config, folder, config_text="text", resume_step=resume_step)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.client = BufferClient(self.server.address, timeout_s=30.0)

    def _run(self) -> None:
        try:
            self.server.run()
        except Stuck as error:
            self.error = error

    def close(self) -> None:
        self.client.close()
        self.server.stop()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()

    def publish(self, version: int) -> None:
        self.client.call(m.PublishVersion(version=version, manifest_locator=f"w{version}"), m.Acknowledged)

    def ask(self, count: int = 100, generator: str = "g") -> list[m.Lease]:
        request = m.RequestLeases(generator=generator, count=count, wait_s=0.2)
        return self.client.call(request, m.LeaseGrant).leases

    def answer(self, lease: m.Lease, *rewards: float, **changes: Any) -> str:
        """Hands in the answer to an evaluation prompt and returns the verdict."""
        fields = {"generator": "g", "lease": lease.id, "rewards": [*rewards], "num_tokens": 2 * len(rewards)}
        fields |= {"oldest_version": lease.due, "newest_version": lease.due} | changes
        return self.client.call(m.SubmitEvaluation(**fields), m.LeaseReceipt).verdicts[0]

    def evaluations(self) -> list[EvaluationResult]:
        news = self.client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
        return [record.result for record in news.evaluations]

    def submit(self, lease: m.Lease, payload: pa.Buffer | None = None, num_rows: int = 0) -> str:
        """Hands in a group for a lease and returns the verdict. `num_rows` is for groups with branches."""
        data = encode_batch(to_batch(make_group(lease))) if payload is None else payload
        rows = [num_rows or lease.num_samples]
        request = m.SubmitGroups(generator="g", leases=[lease.id], rows=rows, schema=SCHEMA_VERSION)
        try:
            receipt, _ = self.client.exchange(request, payload=data)
        except RefusedByBuffer:
            return "refused"
        assert isinstance(receipt, m.LeaseReceipt)
        return receipt.verdicts[0]

    def train(self, step: int, metrics: dict[str, float] | None = None) -> list[int]:
        taken = self.client.take_batch(step, wait_s=1.0)
        assert isinstance(taken, TakenBatch), taken
        assert sorted(set(taken.table.column("group").to_pylist())) == taken.groups
        done = m.ReportTrainedStep(
            step=step, num_trained=2 * taken.table.num_rows, idle_s=0, alive_s=1, metrics=metrics or {}
        )
        self.client.call(done, m.Acknowledged)
        return taken.groups

    def status(self) -> RunStatus:
        return self.client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status
