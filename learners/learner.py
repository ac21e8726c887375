"""The learner: trains on the buffer's batches, publishes a version after each step, writes checkpoints.

publish(v) ─▶ next batch, due at step v ─▶ pack ─▶ one training step (`learners.step`) ─┐
    ▲                                                                                   │
    └──────────────────────── v + 1, consumed(v), checkpoint ◀──────────────────────────┘

Before the first batch, what an engine has sampled of the version is compared with the learner's own numbers (`learners.parity`).
"""

import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import torch
import xxhash

from buffers import messages as m
from buffers.client import TakenBatch
from buffers.connections import watch_small_requests
from buffers.keys import start_authenticator
from buffers.probe import is_probed
from buffers.trajectory import decode
from configs.learner import LearnerKind
from configs.parallel import LoraPublish
from configs.schema import Config
from configs.sync import Transport
from learners import checkpoint
from learners.feed import PATIENCE_S, Feed
from learners.memory import GIB, MemoryMeter, plan_memory
from learners.models import make_models
from learners.packing import Batch, from_arrow
from learners.parity import ParityWatch, check_probe
from learners.step import Trainer
from learners.world import World
from sync.adapter import describe_adapters
from sync.folders import shared_memory_folder
from sync.publisher import Publisher
from sync.stream import TensorPart
from sync.transports.cuda_ipc import DeviceCopy, gpu_uuid
from sync.transports.server import SnapshotServer
from sync.transports.tcp import MAX_UNREAD_BYTES

log = logging.getLogger("slipstream.learner")


class Source(Protocol):
    """What a learner asks for batches and tells of its progress: a `BufferClient`, or a recording (`scripts/slipstream/replay.py`)."""

    def next(self, step: int, wait_s: float) -> TakenBatch | m.NotReadyYet | m.RunStopped: ...

    def call(self, request: m.Request, expect: type[Any]) -> Any: ...

    def exchange(self, request: m.Request, *, wait_s: float = 0.0) -> tuple[m.Reply, list[memoryview]]: ...

    def close(self) -> None: ...


class Learner:
    """One rank. Only the first one publishes, reports and writes; all train."""

    def __init__(
        self, config: Config, folder: Path, client: Source, trainer: Trainer, publisher: Publisher | None,
        world: World | None = None, writers: World | None = None, meter: MemoryMeter | None = None, *, rank: int = 0, first_step: int = 0, incarnation: str = "", probes: bool = False,
        say: Callable[[str], None] = lambda activity: None,
    ) -> None:  # fmt: skip
        """`probes`: there are engines to be compared with. `say` is told what the rank is doing whenever it begins something that may take long."""
        self._config, self._folder, self._client, self._trainer = config, folder, client, trainer
        self._publisher, self._rank, self._incarnation = publisher, rank, incarnation
        self._world, self._meter = world or World(), meter or MemoryMeter(cuda=False)
        self._feed = Feed(client, self._world, self._wait_on)
        self._writer = checkpoint.CheckpointWriter(
            folder / "checkpoints", config.learner.keep_checkpoints, writers or World()
        )
        self.step = first_step
        """Steps trained, which is also the version held."""
        self._probes = probes
        self._probed: dict[str, float] = {}
        """Figures of the newest probe, until the next step reports them."""
        self._told = ""
        """Name of the first rank's last message to the others."""
        self._first_step = first_step
        self._began, self._say, self._activity = time.monotonic(), say, ""
        trainer.moved = self._go_on
        trainer.watch = self._watch = ParityWatch(config) if probes else None

    def run(self) -> None:
        """Consumes batches; produces versions, step records and checkpoints.

        Waits for the buffer to have the batch of the step at hand, never for a particular generator. Ends after
        `run.steps` steps, once the last version is evaluated, or when the run is stopped (with a checkpoint).
        """
        try:
            self._publish()
            saved = self.step
            if self._probes:
                self._probe()
            while self.step < self._config.run.steps and (batch := self._next()) is not None:
                self._turn_to(f"training step {self.step}")
                metrics, num_trained = self._trainer.train(batch, self.step)
                metrics["memory/peak_gib"] = self._peak_gib()
                metrics |= (
                    {}
                    if self._writer.last_write_s is None
                    else {"time/checkpoint_s": self._writer.last_write_s}
                )
                metrics |= self._probed
                self._probed = {}
                self.step += 1
                self._publish()
                self._report(num_trained, metrics)
                self._saved()
                if self.step % self._config.learner.checkpoint_every == 0:
                    saved = self._save()
                if self._probes and is_probed(self._config, self.step):
                    self._probe()
            if saved != self.step:
                self._save()
            self._saved(wait=True)
            if self._rank == 0:
                self._finish()
        finally:
            self._writer.close()
            self._client.close()
            if self._publisher is not None:
                self._publisher.close()

    def _turn_to(self, activity: str) -> None:
        """What the rank does from now on; `_go_on` says that it gets on with it."""
        self._activity = activity
        self._say(activity)

    def _go_on(self) -> None:
        self._say(self._activity)

    # ---- the buffer

    def _next(self) -> Batch | None:
        self._turn_to(f"waiting for the batch of step {self.step}")
        taken = self._feed.next(self.step)
        if isinstance(taken, m.RunStopped):
            log.info("stopping: %s", taken.reason)
            return None
        return taken

    def _wait_on(self, waiting_for: str) -> None:
        """Called every now and then while there is no batch: none will come where weights are not served any more."""
        log.info(waiting_for)
        if self._publisher is not None:
            self._publisher.check_alive()

    def _finish(self) -> None:
        self._turn_to("waiting for the last evaluation")
        while isinstance(
            reply := self._client.exchange(m.AwaitEvaluations(wait_s=PATIENCE_S), wait_s=PATIENCE_S)[0],
            m.NotReadyYet,
        ):
            log.info("waiting: %s", reply.waiting_for)

    def _publish(self) -> None:
        self._turn_to(f"publishing version {self.step}")
        if self._watch is not None:
            self._watch.published_at = time.time()
        if self._publisher is None:
            for _ in self._weights():  # a collective: every rank takes part
                pass
            return
        manifest = self._publisher.publish_version(self.step, self._weights())
        self._client.call(
            m.PublishVersion(version=self.step, manifest_locator=self._publisher.announce_version(manifest)),
            m.Acknowledged,
        )

    def _weights(self) -> Iterator[TensorPart]:
        """The policy's, a part at a time; each one shows that the publication gets on."""
        for part in self._trainer.models.policy.stream_weights():
            self._go_on()
            yield part

    def _peak_gib(self) -> float:
        """Of the rank that has needed most."""
        return max(
            float(told)
            for told in self._world.gather_messages(str(self._meter.measure_peak() / GIB).encode())
        )

    def _report(self, num_trained: int, metrics: dict[str, float]) -> None:
        if self._rank == 0:
            metrics |= self._publisher.metrics() if self._publisher is not None else {}
            self._client.call(
                m.ReportTrainedStep(
                    step=self.step - 1, num_trained=num_trained, idle_s=self._feed.waited_s,
                    alive_s=time.monotonic() - self._began, metrics=metrics,
                ),
                m.Acknowledged,
            )  # fmt: skip

    # ---- checkpoints

    def _save(self) -> int:
        """Begins a checkpoint: the copy is made now, and written while training goes on."""
        self._turn_to(f"copying the checkpoint of step {self.step}, after the one before is written")
        began, run = time.monotonic(), self._config.run
        manifest = checkpoint.CheckpointManifest(
            self.step,
            self._incarnation,
            run.seed,
            self._trainer.kl_coef,
            self._ledger(),
            str(self._config.learner.engine),
        )
        self._tell(self._writer.begin_checkpoint(manifest, self._trainer.models.copy_state(), self._go_on))
        log.info(
            "checkpoint of step %d begun: training has waited %.2f s for it",
            self.step,
            time.monotonic() - began,
        )
        return self.step

    def _saved(self, *, wait: bool = False) -> None:
        """Tells the buffer of a checkpoint that has become complete."""
        if wait:
            self._turn_to("writing the last checkpoint")
        self._tell(self._writer.take_written(wait=wait, moved=self._go_on))

    def _tell(self, manifest: checkpoint.CheckpointManifest | None) -> None:
        if manifest is None:
            return
        log.info("checkpoint of step %d written", manifest.step)
        if self._rank == 0:
            oldest = checkpoint.find_checkpoints(self._folder / "checkpoints")[0].manifest.step
            self._client.call(m.ReportCheckpoint(step=manifest.step, oldest=oldest), m.Acknowledged)

    def _ledger(self) -> checkpoint.LedgerTotals | None:
        return read_ledger(self._client) if self._rank == 0 else None

    # ---- parity

    def _probe(self) -> None:
        """Waits for an engine to have sampled the probe of the version held, and compares. Raises ParityError, on all ranks."""
        self._turn_to(f"waiting for the parity probe of version {self.step}")
        began = time.monotonic()
        rows = self._probe_rows()
        self._feed.waited_s += time.monotonic() - began
        if rows:
            probe = from_arrow(pa.Table.from_batches([decode(rows)]))
            self._turn_to("comparing the parity probe")
            self._probed = check_probe(
                probe,
                self._trainer.logprobs(probe),
                self._config,
                self.step,
                again=self.step > self._first_step,
            )

    def _probe_rows(self) -> bytes:
        """The probe, on every rank, after the first has got it; empty when the run was told to stop. Generators may come late, so ranks
        wait outside of collectives."""
        name = f"parity probe of version {self.step}"
        if self._world.rank == 0:
            ask = m.RequestParityProbe(wait_s=PATIENCE_S)
            reply, rows = self._client.exchange(ask, wait_s=PATIENCE_S)
            while isinstance(reply, m.NotReadyYet):
                self._wait_on(f"waiting: {reply.waiting_for}")
                reply, rows = self._client.exchange(ask, wait_s=PATIENCE_S)
            found = b"" if isinstance(reply, m.RunStopped) else bytes(rows[0])
            self._world.tell(name, found, instead_of=self._told)
            self._told = name
            return found
        while (told := self._world.hear(name, PATIENCE_S)) is None:
            self._wait_on("waiting: for the first rank, which waits for the parity probe")
        return told


def read_ledger(client: Source) -> checkpoint.LedgerTotals | None:
    """None where a recording stands in the place of the buffer."""
    reply, _ = client.exchange(m.WatchRun(after=sys.maxsize, wait_s=0.0))
    if not isinstance(reply, m.RunNews):
        return None
    tokens = reply.status.tokens
    return checkpoint.LedgerTotals(tokens.total, tokens.trained, tokens.masked)


def check_checkpoint(
    manifest: checkpoint.CheckpointManifest, config: Config, now: checkpoint.LedgerTotals | None
) -> None:
    """Is it of this run? `now`: the buffer's ledger, which has gone back to the checkpoint's step. Raises ValueError."""
    if manifest.engine != config.learner.engine:
        raise ValueError(
            f"learner.engine must be {manifest.engine}, which wrote the checkpoint, got {config.learner.engine} (another engine takes up "
            "its export: scripts/export.sh, and model.path of a new run)"
        )
    then = manifest.ledger
    if then is not None and now is not None and (then.trained, then.masked) != (now.trained, now.masked):
        raise ValueError(
            f"journal and checkpoint must be of the same run: at step {manifest.step} {then.trained} tokens were trained and "
            f"{then.masked} masked, the journal's ledger has {now.trained} and {now.masked}"
        )


def start(
    config: Config, folder: Path, client: Source, rank: int, rendezvous: str, resume_step: int | None,
    *, publish: bool = True, say: Callable[[str], None] = lambda activity: None,
) -> Learner:  # fmt: skip
    """One rank of the learner, ready to run: process group, engines (from the checkpoint, if any), publisher.

    Raises ValueError for a checkpoint that is damaged or not of this run.
    """
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    cuda = torch.cuda.is_available()
    meter, needed = MemoryMeter(cuda=cuda), plan_memory(config, cuda=cuda)
    if needed is not None and rank == 0:
        log.info("%s", needed)
    if (
        needed is not None
        and cuda
        and needed.total > (has := (config.learner.gpu_memory_fraction or 1.0) * _gpu_bytes())
    ):
        log.warning("that is more than its %.1f GiB: see docs/learner.md for what makes it less", has / GIB)
    (models, world, writers), kl_coef = make_models(config, rank, rendezvous), None
    if resume_step is not None:
        held = folder / "checkpoints" / f"step_{resume_step}"
        manifest = verify_once(held, world, say)
        say("loading the checkpoint")
        check_checkpoint(manifest, config, read_ledger(client) if rank == 0 else None)
        models.load_state(held)
        kl_coef = manifest.kl_coef if config.algo.kl.target is not None else None
    incarnation = secrets.token_hex(4)
    publisher = make_publisher(config, folder, incarnation) if rank == 0 and publish else None
    return Learner(
        config, folder, client, Trainer(config, models, world, kl_coef), publisher, world, writers, meter,
        rank=rank, first_step=resume_step or 0, incarnation=incarnation, say=say,
        probes=publish and config.learner.engine is not LearnerKind.simulated,
    )  # fmt: skip


def verify_once(held: Path, world: World, say: Callable[[str], None]) -> checkpoint.CheckpointManifest:
    """The checkpoint's manifest, on every rank after the first has read all of its files, which may take longer than a collective.
    Raises Damaged."""
    if world.rank == 0:
        manifest = checkpoint.verify_checkpoint(held, lambda num_bytes: say(f"verifying {held.name}"))
        world.tell("verified", b"")
        return manifest
    say(f"waiting for the first rank, which verifies {held.name}")
    while world.hear("verified", PATIENCE_S) is None:
        pass
    return checkpoint.read_manifest(held)


def _gpu_bytes() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def make_publisher(config: Config, folder: Path, incarnation: str) -> Publisher:
    where, server, device = weights_folder(config, folder), None, None
    if (address := config.weights_address) is not None:
        keys = config.buffer.keys
        secure = (lambda socket: start_authenticator(socket, Path(keys))) if keys is not None else None
        watch = partial(watch_small_requests, encrypted=keys is not None, max_unread=MAX_UNREAD_BYTES)
        nccl = config.sync.transport is Transport.nccl
        server = SnapshotServer(where, address, secure=secure, watch=watch, nccl=nccl)
        log.info("weights are served at %s", server.address)
    # An offloaded model leaves its GPU's memory to others: engines take the host's copy unless they are told not to.
    always, offered = config.sync.transport is Transport.cuda_ipc, config.sync.transport is Transport.auto
    if torch.cuda.is_available() and (always or (offered and not config.learner.fsdp.cpu_offload)):
        device = DeviceCopy(where, gpu_uuid(), torch.device("cuda", torch.cuda.current_device()), always)
    model = Path(config.model.path) if config.sync.transport is Transport.disk else None
    lora, adapter = config.learner.lora, None
    if lora.rank is not None and lora.publish is LoraPublish.adapter:
        adapter = describe_adapters(Path(config.model.path), str(config.model.dtype), lora.alpha / lora.rank)
    return Publisher(where, incarnation, server=server, device=device, model=model, adapter=adapter)


def weights_folder(config: Config, folder: Path) -> Path:
    if config.sync.transport is Transport.disk:
        return Path(config.sync.folder) if config.sync.folder else folder / "weights"
    return shared_memory_folder(f"{folder.name}-{xxhash.xxh32_hexdigest(str(folder).encode())}")
