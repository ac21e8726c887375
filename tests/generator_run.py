"""A run of simulated generators: a real buffer, generators in threads, and a learner that computes
nothing."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from buffers import messages as m
from buffers.client import BufferClient, TakenBatch
from buffers.evaluation_statistics import EvaluationResult
from buffers.run_status import RunStatus
from buffers.server import BufferServer
from buffers.trajectory import flatten_column
from configs.host import boot_id
from configs.schema import Config
from generators.episode import SimulatedEpisodes
from generators.simulated_engine import SimulatedEngine
from generators.worker import Generator
from sync.publisher import Publisher
from sync.stream import whole_parts
from sync.subscriber import Subscriber
from sync.transports.fetcher import Fetcher
from sync.transports.server import SnapshotServer
from sync.transports.tcp import FetchingEnd

OVERRIDES = [
    "generators.engine=simulated", "learner.engine=simulated", "learner.groups_per_step=4", "run.steps=3",
    "learner.samples_per_prompt=2", "eval.prompts=0", "generators.max_sequences=16", "buffer.max_attempts=2",
]  # fmt: skip


def make_fast_engine() -> SimulatedEngine:
    return SimulatedEngine(tokens_per_s=2000, slots=16, mean_tokens=6, cv=0.5)


class GeneratorRun:
    """A buffer and generators in threads, and a learner that only takes batches and publishes versions."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        episodes: SimulatedEpisodes,
        count: int = 1,
        far: bool = False,
        engine: SimulatedEngine | None = None,
        evaluator: SimulatedEngine | None = None,
    ) -> None:
        """`far`: the generators believe that the learner is on another host. `engine` is the one generator's;
        without it each has a fast one of its own. `evaluator` is that of a further generator, which evaluates
        alone."""
        self.folder, self.far, self._max_versions = folder, far, config.staleness.max_versions
        self.server = BufferServer(config, folder / "journal")
        self.threads = [threading.Thread(target=self.server.run)]
        self.threads[0].start()
        self.client = BufferClient(self.server.address, timeout_s=60.0)
        server = SnapshotServer(folder / "weights") if far else None
        self.publisher = Publisher(folder / "weights", "life", ends=[] if server is None else [server])
        self.fetchers = []
        self.generators: list[Generator] = []
        self.digests: dict[int, str] = {}
        """Digests of the published versions."""
        engines = [engine or make_fast_engine() for _ in range(count)]
        for number, own in enumerate([*engines, evaluator] if evaluator else engines):
            client = BufferClient(self.server.address, timeout_s=60.0)
            if evaluates := own is evaluator:
                client.call(m.JoinRun(generator=f"g{number}", evaluates=True), m.JoinedRun)
            fetcher = Fetcher(folder / "fetched") if far else None
            self.fetchers.append(fetcher)
            generator = Generator(
                f"g{number}",
                config,
                client,
                own,
                episodes,
                Subscriber(None if fetcher is None else FetchingEnd(fetcher)),
                evaluates=evaluates,
            )
            self.generators.append(generator)
            self.threads.append(threading.Thread(target=generator.run))
        for thread in self.threads[1:]:
            thread.start()

    def publish_version(self, version: int) -> None:
        manifest = self.publisher.publish_version(version, whole_parts({"w": torch.tensor([float(version)])}))
        announced = self.publisher.announce_version(manifest)
        if self.far:
            announced = announced.replace(boot_id(), "another host")
        self.digests[version] = manifest.digest
        request = m.PublishVersion(version=version, manifest_locator=announced)
        reply = self.client.call(request, m.PublishedVersion)
        self.publisher.needed_versions = frozenset(reply.needed_versions)

    def train_step(self, step: int) -> list[int]:
        """Takes the batch of a step, says that it is trained, and returns its groups."""
        taken = self.client.take_batch(step, wait_s=50.0)
        assert isinstance(taken, TakenBatch), taken
        oldest = step - self._max_versions
        versions = flatten_column(taken.table, "versions")[flatten_column(taken.table, "sampled")]
        trained = int(np.count_nonzero(versions >= oldest))  # a busy machine makes some too late
        done = m.ReportTrainedStep(step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={})
        self.client.call(done, m.Acknowledged)
        return taken.groups

    def read_status(self) -> RunStatus:
        return self.client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status

    def list_results(self) -> list[EvaluationResult]:
        news = self.client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
        return [record.result for record in news.evaluations]

    def wait_for(self, holds: Callable[[RunStatus], bool], timeout_s: float = 60.0) -> RunStatus:
        """Returns the first status that `holds`."""
        deadline = time.monotonic() + timeout_s
        while not holds(status := self.read_status()):
            assert time.monotonic() < deadline, status
            time.sleep(0.05)
        return status

    def close(self) -> RunStatus:
        """Stops the run; returns its status after the generators have left."""
        self.client.call(m.StopRun(reason="over"), m.Acknowledged)
        for thread in self.threads[1:]:
            thread.join(timeout=60)
            assert not thread.is_alive()
        status = self.read_status()
        self.server.stop()
        self.threads[0].join(timeout=60)
        self.client.close()
        self.publisher.close()
        return status
