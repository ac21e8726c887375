"""The learner: trains on the buffer's batches, publishes a version after each step, writes checkpoints.

copy version v ─▶ take the batch due at step v ─▶ one training step (`learners.step`) ─┐
    ▲     │                                                                             │
    │     └─▶ a thread writes version v, and announces it                               │
    └──────────── checkpoint ◀── report of step v ◀── copy version v + 1 ◀──────────────┘

The thread announces a version when it is written: while the next step trains, or while the learner waits for
a batch.

A rank that shares its GPU with engines by turns (`sync.turns`) has it from its batch to the publication.

Before the first batch, the learner compares its own log-probabilities with those of an engine that has
sampled from the version it has published (`learners.parity`). `learners.startup` makes a learner.
"""

import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from buffers import messages as m
from buffers.client import TakenBatch
from buffers.timeline import Timeline
from buffers.trajectory import decode_batch
from configs.parity_probe import is_probed
from configs.schema import Config
from learners import checkpoint
from learners.feed import PATIENCE_S, Feed
from learners.memory import GIB, MemoryMeter
from learners.packing import Batch, batch_from_arrow
from learners.parity import ParityWatch, check_probe
from learners.publication import Publication
from learners.step import Trainer
from learners.turns import OwnGpu
from learners.world import World

log = logging.getLogger("slipstream.learner")


class BatchSource(Protocol):
    """Gives a learner its batches and takes its reports: a `BufferClient`, or a recording
    (`scripts/slipstream/replay.py`)."""

    def take_batch(self, step: int, wait_s: float) -> TakenBatch | m.NotReadyYet | m.RunStopped: ...

    def call(self, request: m.Request, expect: type[Any]) -> Any: ...

    def exchange(self, request: m.Request, *, wait_s: float = 0.0) -> tuple[m.Reply, list[memoryview]]: ...

    def close(self) -> None: ...


class Learner:
    """One rank of the learner.

    All ranks train and publish their rows; only the first one reports to the buffer and completes
    checkpoints.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        source: BatchSource,
        trainer: Trainer,
        publication: Publication | None,
        world: World | None = None,
        writers: World | None = None,
        meter: MemoryMeter | None = None,
        *,
        rank: int = 0,
        first_step: int = 0,
        incarnation: str = "",
        probes: bool = False,
        say: Callable[[str], None] = lambda activity: None,
        turns: OwnGpu | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """`publication`: None where nothing is published. `writers` is a second world of all ranks, for the
        checkpoint's thread. `turns`: the rank shares its GPU with engines, and has its turn now.

        `probes`: there are engines whose log-probabilities are compared with the learner's. `say` receives
        the rank's activity whenever it begins something that may take long, and again when it gets on with
        it.
        """
        self._config, self._folder, self._source, self._trainer = config, folder, source, trainer
        self._publication, self._rank, self._incarnation = publication, rank, incarnation
        self._world, self._meter = world or World(), meter or MemoryMeter(cuda=False)
        self._turns = turns or OwnGpu()
        self._turns.hand_over(trainer.models)
        self._feed = Feed(source, self._world, self._log_wait, is_at_work=self._is_publishing)
        self._writer = checkpoint.CheckpointWriter(
            folder / "checkpoints", config.learner.keep_checkpoints, writers or World(), timeline
        )
        self.step = first_step
        """Steps trained, which is also the version held."""
        self._first_step = first_step
        self._saved_step = first_step
        """Step of the newest checkpoint that was begun; at first, of the one that this life went on from."""
        self._probes = probes
        self._probe_metrics: dict[str, float] = {}
        """Figures of the newest probe, until the next step reports them."""
        self._began, self._say, self._activity = time.monotonic(), say, ""
        self._num_written = 0
        """Bytes that the publication had written when a wait told of it last."""
        trainer.report_progress = self._get_on_with_step
        trainer.watch = self._watch = ParityWatch(config) if probes else None

    def run(self) -> None:
        """Trains until the run's last step.

        Consumes the batch of each step, and an engine's sample of the parity probe. Produces versions,
        reports of steps and checkpoints. Waits for the buffer to have the batch of the step at hand, never
        for a particular generator. Ends after `run.steps` steps, once the last version is evaluated, or when
        the run is stopped; in both cases with a checkpoint.
        """
        try:
            with self._turns.hold("publishing the first version"):
                self._publish_version()
                self._finish_within_turn()
            if self._probes:
                self._compare_probe()
            while (batch := self._take_batch()) is not None:
                with self._turns.hold(f"training step {self.step}"):
                    metrics, num_trained = self._train_step(batch)
                    self._publish_version()
                    self._finish_within_turn()
                    is_saved = self.step % self._config.learner.checkpoint_every == 0
                    if not is_saved:
                        self._turns.end()
                    self._report_step(metrics, num_trained)
                    self._report_checkpoint()
                    if is_saved:
                        self._begin_checkpoint()
                if self._probes and is_probed(self._config, self.step):
                    self._compare_probe()
            self._finish_publication()
            if self._saved_step != self.step:
                self._begin_checkpoint()
            self._report_checkpoint(wait=True)
            self._wait_for_evaluation()
            # After an error the turn ends with the process, which has its memory until then.
            self._turns.close()
        finally:
            self._writer.close()
            self._source.close()
            if self._publication is not None:
                self._publication.close()

    def _begin_activity(self, activity: str) -> None:
        """Says what the rank does from now on.

        `_repeat_activity` says that it gets on with it, so that nobody takes it for stuck.
        """
        self._activity = activity
        self._say(activity)

    def _repeat_activity(self) -> None:
        self._say(self._activity)

    # ---- one step

    def _take_batch(self) -> Batch | None:
        """Returns the batch of the step at hand; None after the last step, or when the run is stopped."""
        if self.step >= self._config.run.steps:
            return None
        self._begin_activity(f"waiting for the batch of step {self.step}")
        taken = self._feed.take_batch(self.step)
        if isinstance(taken, m.RunStopped):
            log.info("stopping: %s", taken.reason)
            return None
        return taken

    def _train_step(self, batch: Batch) -> tuple[dict[str, float], int]:
        """Returns the step's metrics and the number of tokens it has trained; the version held is then a new
        one."""
        self._begin_activity(f"training step {self.step}")
        metrics, num_trained = self._trainer.train(batch, self.step)
        metrics["memory/peak_gib"] = self._measure_peak_gib()
        if self._writer.last_write_s is not None:
            metrics["time/checkpoint_s"] = self._writer.last_write_s
        metrics |= self._probe_metrics
        self._probe_metrics = {}
        self.step += 1
        return metrics, num_trained

    def _measure_peak_gib(self) -> float:
        """Returns the peak memory of the rank that has needed most, in GiB."""
        own = str(self._meter.measure_peak() / GIB)
        return max(float(peak) for peak in self._world.gather_messages(own.encode()))

    def _publish_version(self) -> None:
        """Begins to publish the version held: copies this rank's rows, which a thread writes."""
        if self._watch is not None:
            self._watch.published_at = time.time()
        if self._publication is None:
            return
        began = time.perf_counter()
        self._finish_publication()
        self._begin_activity(f"copying version {self.step}")
        stream = self._trainer.models.policy.stream_weights
        self._publication.begin_version(self.step, stream, self._repeat_activity)
        self._publication.waited_s = time.perf_counter() - began

    def _get_on_with_step(self) -> None:
        """Called whenever a training step gets on. Raises the error of a publication beside it."""
        self._repeat_activity()
        if self._publication is not None:
            self._publication.check_alive()

    def _finish_within_turn(self) -> None:
        """Waits for the newest version before the engines have their turn: it is what they wake up for."""
        if self._turns.are_shared:
            self._finish_publication()

    def _finish_publication(self) -> None:
        """Waits until the version under way, if any, is announced. Raises the error that its publication has
        ended with."""
        if self._publication is None or not self._publication.is_under_way:
            return
        before = self._activity
        self._begin_activity("writing the newest version")
        self._publication.finish_version(self._repeat_activity)
        self._begin_activity(before)

    def _report_step(self, metrics: dict[str, float], num_trained: int) -> None:
        """Tells the buffer that the step is trained, with its metrics."""
        self._begin_activity(f"reporting step {self.step - 1}")
        if self._rank == 0:
            metrics |= self._publication.metrics() if self._publication is not None else {}
            report = m.ReportTrainedStep(
                step=self.step - 1,
                num_trained=num_trained,
                idle_s=self._feed.waited_s + self._turns.waited_s,
                alive_s=time.monotonic() - self._began,
                metrics=metrics,
            )
            self._source.call(report, m.Acknowledged)

    def _log_wait(self, waiting_for: str) -> None:
        """Logs what a rank waits for, now and then while it waits. Raises an error of the publication, or of
        the server that serves the weights.

        Without that server no generator gets the version held, so the batch that the rank waits for would
        never come. Before the version is announced it may not come either: then the rank does not wait, it
        writes, and the watchdog waits for it as long as it gets on.
        """
        if self._publication is not None:
            self._publication.check_alive()
        if self._publication is None or not self._publication.is_at_work:
            self._repeat_activity()
            log.info(waiting_for)
        elif (written := self._publication.num_written) != self._num_written:
            self._num_written = written
            self._say("writing the newest version")

    def _is_publishing(self) -> bool:
        return self._publication is not None and self._publication.is_at_work

    def _wait_for_evaluation(self) -> None:
        """Waits until the buffer has the evaluation of the last version, which is announced.

        Collective: until then each host serves its rows of that version.
        """
        self._begin_activity("waiting for the last evaluation")
        self._world.broadcast_message(
            "last evaluation",
            self._await_evaluations,
            look_s=PATIENCE_S,
            while_waiting=partial(
                self._log_wait, "waiting: for the first rank, which waits for the last evaluation"
            ),
        )
        # The first rank keeps the store, from which the others learn of it.
        self._world.barrier()

    def _await_evaluations(self) -> bytes:
        request = m.AwaitEvaluations(wait_s=PATIENCE_S)
        while isinstance(reply := self._source.exchange(request, wait_s=PATIENCE_S)[0], m.NotReadyYet):
            self._log_wait(f"waiting: {reply.waiting_for}")
        return b""

    # ---- checkpoints

    def _begin_checkpoint(self) -> None:
        """Copies the state now; a thread writes the copy while training goes on."""
        self._begin_activity(f"copying the checkpoint of step {self.step}, after the one before is written")
        began = time.monotonic()
        if self._writer.is_under_way:
            # Two copies would take twice the memory. Engines do not wait for the disk meanwhile.
            self._turns.end()
            self._tell_buffer(self._writer.take_written(wait=True, on_progress=self._repeat_activity))
        manifest = checkpoint.CheckpointManifest(
            step=self.step,
            incarnation=self._incarnation,
            seed=self._config.run.seed,
            kl_coef=self._trainer.kl_coef,
            ledger=read_ledger(self._source) if self._rank == 0 else None,
            engine=str(self._config.learner.engine),
        )
        with self._turns.hold(self._activity):
            write = self._trainer.models.copy_state()
        self._tell_buffer(self._writer.begin_checkpoint(manifest, write, self._repeat_activity))
        waited_s = time.monotonic() - began
        log.info("checkpoint of step %d begun: training has waited %.2f s for it", self.step, waited_s)
        self._saved_step = self.step

    def _report_checkpoint(self, *, wait: bool = False) -> None:
        """Tells the buffer of a checkpoint that has become complete.

        With `wait`, it first waits for the one that is being written.
        """
        if wait:
            self._begin_activity("writing the last checkpoint")
        self._tell_buffer(self._writer.take_written(wait=wait, on_progress=self._repeat_activity))

    def _tell_buffer(self, written: checkpoint.CheckpointManifest | None) -> None:
        if written is None:
            return
        log.info("checkpoint of step %d written", written.step)
        if self._rank == 0:
            oldest = checkpoint.find_checkpoints(self._folder / "checkpoints")[0].manifest.step
            self._source.call(m.ReportCheckpoint(step=written.step, oldest=oldest), m.Acknowledged)

    # ---- parity

    def _compare_probe(self) -> None:
        """Waits until an engine has sampled the parity probe of the version held, and compares.

        Raises ParityError on all ranks.
        """
        self._finish_publication()
        self._begin_activity(f"waiting for the parity probe of version {self.step}")
        began = time.monotonic()
        # Generators may come late, later than a collective waits.
        rows = self._world.broadcast_message(
            "parity probe",
            self._take_probe,
            look_s=PATIENCE_S,
            while_waiting=partial(
                self._log_wait, "waiting: for the first rank, which waits for the parity probe"
            ),
        )
        self._feed.waited_s += time.monotonic() - began
        if not rows:
            return
        probe = batch_from_arrow(pa.Table.from_batches([decode_batch(rows)]))
        self._begin_activity("comparing the parity probe")
        with self._turns.hold(self._activity):
            logprobs, is_later = self._trainer.infer_logprobs(probe), self.step > self._first_step
        self._probe_metrics = check_probe(probe, logprobs, self._config, self.step, again=is_later)

    def _take_probe(self) -> bytes:
        """Returns the probe's rows from the buffer; no bytes when the run is stopped."""
        request = m.RequestParityProbe(wait_s=PATIENCE_S)
        reply, rows = self._source.exchange(request, wait_s=PATIENCE_S)
        while isinstance(reply, m.NotReadyYet):
            self._log_wait(f"waiting: {reply.waiting_for}")
            reply, rows = self._source.exchange(request, wait_s=PATIENCE_S)
        return b"" if isinstance(reply, m.RunStopped) else bytes(rows[0])


def read_ledger(source: BatchSource) -> checkpoint.LedgerTotals | None:
    """Returns the totals of the buffer's ledger; None where a recording stands in the place of the buffer."""
    reply, _ = source.exchange(m.WatchRun(after=sys.maxsize, wait_s=0.0))
    if not isinstance(reply, m.RunNews):
        return None
    tokens = reply.status.tokens
    return checkpoint.LedgerTotals(tokens.total, tokens.trained, tokens.masked)
