"""The learner: trains on the buffer's batches, publishes a version after each step, writes checkpoints.

publish(v) ─▶ next batch, due at step v ─▶ pack ─▶ advantages ─▶ proximal log-probabilities ─▶ minibatch updates ─┐
    ▲                                                                                                            │
    └──────────────────────────────────── v + 1, consumed(v), checkpoint ◀───────────────────────────────────────┘
"""

import logging
import secrets
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from algos.advantages import ADVANTAGES
from algos.aggregation import token_weights
from algos.loss import policy_loss, summarize
from algos.rewards import soft_overlong_penalty
from buffers import messages as m
from buffers.client import Taken
from buffers.keys import open_door
from buffers.staleness import trainable
from configs.schema import Config, Dtype, LearnerKind, Proximal, Transport
from learners import checkpoint
from learners.engine import Engine
from learners.packing import Batch, Packed, from_arrow, microbatches, minibatch_rows
from sync.folders import shared_memory_folder
from sync.publisher import Publisher
from sync.transports.cuda_ipc import DeviceCopy, gpu_uuid
from sync.transports.server import SnapshotServer

log = logging.getLogger("slipstream.learner")

PATIENCE_S = 30.0
"""How long one question to the buffer may stay open before it is asked again (and the wait is named in the log)."""


class ParityError(ValueError):
    """Generator and learner disagree about the log-probabilities of the same tokens: training would be wrong."""


class Source(Protocol):
    """What a learner asks for batches and tells of its progress: a `BufferClient`, or a recording (`scripts/replay.py`)."""

    def next(self, step: int, wait_s: float) -> Taken | m.NotYet | m.Over: ...

    def call(self, request: m.Request, expect: type[Any]) -> Any: ...

    def exchange(self, request: m.Request, *, wait_s: float = 0.0) -> tuple[m.Reply, list[memoryview]]: ...

    def close(self) -> None: ...


class Learner:
    """One rank. Only the first one publishes, reports and writes; all train."""

    def __init__(
        self, config: Config, folder: Path, client: Source, engine: Engine, publisher: Publisher | None,
        *, rank: int = 0, first_step: int = 0, incarnation: str = "",
    ) -> None:  # fmt: skip
        self._config, self._folder, self._client, self._engine = config, folder, client, engine
        self._publisher, self._rank, self._incarnation = publisher, rank, incarnation
        self.step = first_step
        """Steps trained, which is also the version held."""
        self._probed = config.learner.engine is LearnerKind.simulated
        self._began = time.monotonic()
        self._idle_s = 0.0

    def run(self) -> None:
        """Consumes batches; produces versions, step records and checkpoints.

        Waits for the buffer to have the batch of the step at hand, never for a particular generator. Ends after
        `run.steps` steps, once the last version is evaluated, or when the run is stopped (with a checkpoint).
        """
        try:
            self._publish()
            saved = self.step
            while self.step < self._config.run.steps and (batch := self._next()) is not None:
                metrics, num_trained = self._train(batch)
                self.step += 1
                self._publish()
                self._report(num_trained, metrics)
                if self.step % self._config.learner.checkpoint_every == 0:
                    saved = self._save()
            if saved != self.step:
                self._save()
            if self._rank == 0:
                self._finish()
        finally:
            self._client.close()
            if self._publisher is not None:
                self._publisher.close()

    # ---- the buffer

    def _next(self) -> Batch | None:
        began = time.monotonic()
        while isinstance(taken := self._client.next(self.step, PATIENCE_S), m.NotYet):
            log.info("waiting: %s", taken.waiting_for)
        self._idle_s += time.monotonic() - began
        if isinstance(taken, m.Over):
            log.info("stopping: %s", taken.reason)
            return None
        return from_arrow(taken.table, taken.weights)

    def _finish(self) -> None:
        while isinstance(reply := self._client.exchange(m.Finish(wait_s=PATIENCE_S), wait_s=PATIENCE_S)[0], m.NotYet):
            log.info("waiting: %s", reply.waiting_for)

    def _publish(self) -> None:
        if self._publisher is None:
            for _ in self._engine.weights():  # a collective: every rank takes part
                pass
            return
        manifest = self._publisher.publish(self.step, self._engine.weights())
        self._client.call(m.Publish(version=self.step, weights=self._publisher.announcement(manifest)), m.Done)

    def _report(self, num_trained: int, metrics: dict[str, float]) -> None:
        if self._rank == 0:
            metrics |= self._publisher.metrics() if self._publisher is not None else {}
            self._client.call(
                m.Consumed(
                    step=self.step - 1, num_trained=num_trained, idle_s=self._idle_s,
                    alive_s=time.monotonic() - self._began, metrics=metrics,
                ),
                m.Done,
            )  # fmt: skip

    def _save(self) -> int:
        learner, run = self._config.learner, self._config.run
        barrier = dist.barrier if learner.ranks > 1 else (lambda: None)
        manifest = checkpoint.CheckpointManifest(self.step, self._incarnation, run.seed)
        checkpoint.save(
            self._folder / "checkpoints",
            manifest,
            self._engine.save,
            learner.keep_checkpoints,
            first_rank=self._rank == 0,
            barrier=barrier,
        )
        log.info("checkpoint of step %d written", self.step)
        if self._rank == 0:
            oldest = checkpoint.complete(self._folder / "checkpoints")[0].manifest.step
            self._client.call(m.Checkpointed(step=self.step, oldest=oldest), m.Done)
        return self.step

    # ---- the step

    def _train(self, batch: Batch) -> tuple[dict[str, float], int]:
        """One step; returns its metrics and the number of tokens trained (on all ranks)."""
        began = time.monotonic()
        config, algo = self._config, self._config.algo
        mask = torch.from_numpy(trainable(batch.versions.numpy(), batch.sampled.numpy(), self.step, config.bound))
        advantages = self._advantages(batch, mask)[batch.sequence]
        self._probe(batch)
        proximal = self._proximal(batch)
        sums: dict[str, Tensor] = {}
        norms = []
        parts = minibatch_rows(batch, config.learner.minibatches)
        for rows in parts:
            inside = torch.isin(batch.sequence, torch.tensor(rows))
            weights = token_weights(algo.aggregation, mask & inside, batch.sequence, batch.num_sequences)
            weights = weights * batch.weights[batch.sequence]  # importance weights of the sampler
            weights = weights * (1 if algo.aggregation == "token_mean" else len(parts))

            def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed, weights: Tensor = weights) -> Tensor:
                loss, found = policy_loss(
                    algo,
                    logprobs=logprobs,
                    proximal_logprobs=logprobs.detach() if proximal is None else proximal[packed.index],
                    behavior_logprobs=packed.behavior_logprobs,
                    advantages=advantages[packed.index],
                    mask=mask[packed.index],
                    weights=weights[packed.index],
                    entropy=entropy,
                    sequence=packed.sequence,
                )
                for name, value in found.items():
                    sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value
                return loss

            norms.append(self._engine.update(self._microbatches(batch, rows), loss_fn, self._lr()))
        totals = self._add_ranks(sums)
        metrics = summarize(totals) | _describe(batch, mask, self.step)
        metrics |= {
            "optimizer/grad_norm": sum(norms) / len(norms),
            "optimizer/lr": self._lr(),
            "time/train_s": time.monotonic() - began,
        }
        return metrics, int(totals["tokens"])

    def _advantages(self, batch: Batch, mask: Tensor) -> Tensor:
        """[N]"""
        algo, rewards = self._config.algo, batch.rewards
        trained, sampled = (
            torch.zeros(batch.num_sequences).index_add_(0, batch.sequence, of.float()) for of in (mask, batch.sampled)
        )
        if algo.overlong_share is not None:
            most = self._config.sampling.max_tokens
            rewards = rewards + soft_overlong_penalty(sampled, most, algo.overlong_share * most)
        return ADVANTAGES[algo.advantage](rewards, batch.groups, trained)

    def _microbatches(self, batch: Batch, rows: list[int]) -> list[Packed]:
        learner = self._config.learner
        return microbatches(batch, rows, learner.tokens_per_microbatch, learner.ranks, self._rank)

    def _lr(self) -> float:
        learner = self._config.learner
        return learner.lr * min(1.0, (self.step + 1) / learner.warmup_steps if learner.warmup_steps else 1.0)

    def _proximal(self, batch: Batch) -> Tensor | None:
        """[T] log-probabilities of the learner at the start of the step. None: those of the one update's own forward."""
        if self._config.algo.proximal is Proximal.behavior:
            return batch.behavior_logprobs
        if self._config.learner.minibatches == 1:
            return None
        return self._current(batch)

    def _current(self, batch: Batch) -> Tensor:
        """[T] log-probabilities of the whole batch under the weights held."""
        found = torch.zeros(len(batch.tokens))
        packed = self._microbatches(batch, list(range(batch.num_sequences)))
        for part, logprobs in zip(packed, self._engine.logprobs(packed), strict=True):
            found[part.index] = logprobs
        if self._config.learner.ranks > 1:
            dist.all_reduce(found)
        return found

    def _add_ranks(self, sums: dict[str, Tensor]) -> dict[str, float]:
        values = torch.stack([sums[name] for name in sorted(sums)])
        if self._config.learner.ranks > 1:
            dist.all_reduce(values)
        return dict(zip(sorted(sums), values.tolist(), strict=True))

    def _probe(self, batch: Batch) -> None:
        """The parity probe, once: on tokens that the very version held has sampled, both sides must agree."""
        fresh = batch.sampled & (batch.versions == self.step)
        if self._probed or not fresh.any():
            return
        self._probed = True
        check_parity(
            self._current(batch), batch.behavior_logprobs, fresh, batch.tokens, self._config.model.dtype,
            self._config.learner.parity_tolerance,
        )  # fmt: skip


def check_parity(
    learner: Tensor, generator: Tensor, fresh: Tensor, tokens: Tensor, dtype: Dtype, tolerance: float | None
) -> None:
    """Compares log-probabilities [T] where `fresh` [T]. Raises ParityError with the worst token and both values.

    Tolerance: the largest difference. By default 1e-4 for float32; for bfloat16 0.5, and 0.03 for the mean.
    """
    difference = torch.where(fresh, (learner - generator).abs(), 0.0)
    worst = int(difference.argmax())
    mean = float(difference.sum() / fresh.sum())
    largest = float(difference[worst])
    limit = tolerance if tolerance is not None else {Dtype.float32: 1e-4, Dtype.bfloat16: 0.5}[dtype]
    mean_limit = 0.03 if tolerance is None and dtype is Dtype.bfloat16 else limit
    log.info("parity probe: %d tokens, largest difference %.2e, mean %.2e", int(fresh.sum()), largest, mean)
    if not (largest <= limit and mean <= mean_limit):
        raise ParityError(
            f"log-probabilities of generator and learner must agree within {limit:g} (mean {mean_limit:g}) in {dtype}, got "
            f"{largest:.3g} (mean {mean:.3g}): token {worst} of the first batch, id {int(tokens[worst])}, has "
            f"{float(generator[worst]):.6f} from the generator and {float(learner[worst]):.6f} from the learner"
        )


def _describe(batch: Batch, mask: Tensor, step: int) -> dict[str, float]:
    """What the batch is like: rewards, lengths, staleness."""
    staleness = (step - batch.versions[mask]).double()
    sampled = np.add.reduceat(batch.sampled.numpy().astype(np.int64), batch.offsets[:-1])
    return {
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std()) if batch.num_sequences > 1 else 0.0,
        "length/mean": float(sampled.mean()),
        "length/max": float(sampled.max()),
        "staleness/mean": float(staleness.mean()) if len(staleness) else 0.0,
        "staleness/max": float(staleness.max()) if len(staleness) else 0.0,
        "staleness/masked_fraction": 1.0 - float(mask.sum()) / max(1, int(batch.sampled.sum())),
    }


def start(
    config: Config, folder: Path, client: Source, rank: int, rendezvous: str, resume_step: int | None,
    *, publish: bool = True,
) -> Learner:  # fmt: skip
    """One rank of the learner, ready to run: process group, engine (from the checkpoint, if any), publisher."""
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    engine = make_engine(config, rank, rendezvous)
    if resume_step is not None:
        engine.load(folder / "checkpoints" / f"step_{resume_step}" / "engine")
    incarnation = secrets.token_hex(4)
    publisher = make_publisher(config, folder, incarnation) if rank == 0 and publish else None
    return Learner(
        config, folder, client, engine, publisher,
        rank=rank, first_step=resume_step or 0, incarnation=incarnation,
    )  # fmt: skip


def make_publisher(config: Config, folder: Path, incarnation: str) -> Publisher:
    where, server, device = weights_folder(config, folder), None, None
    if (address := config.weights_address) is not None:
        keys = config.buffer.keys
        secure = (lambda socket: open_door(socket, Path(keys))) if keys is not None else None
        server = SnapshotServer(where, address, secure=secure)
        log.info("weights are served at %s", server.address)
    if torch.cuda.is_available() and config.sync.transport in (Transport.auto, Transport.cuda_ipc):
        device = DeviceCopy(where, gpu_uuid(), always=config.sync.transport is Transport.cuda_ipc)
    model = Path(config.model.path) if config.sync.transport is Transport.disk else None
    return Publisher(where, incarnation, server=server, device=device, model=model)


def weights_folder(config: Config, folder: Path) -> Path:
    if config.sync.transport is Transport.disk:
        return Path(config.sync.folder) if config.sync.folder else folder / "weights"
    return shared_memory_folder(f"{folder.name}-{xxhash.xxh32_hexdigest(str(folder).encode())}")


def make_engine(config: Config, rank: int, rendezvous: str) -> Engine:
    if config.learner.engine is LearnerKind.simulated:
        from learners.simulated import SimulatedTrainingEngine

        return SimulatedTrainingEngine(config.generators.simulated.train_tokens_per_s)
    from learners.fsdp import FsdpEngine

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_per_process_memory_fraction(config.learner.gpu_memory_fraction)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=rendezvous, rank=rank, world_size=config.learner.ranks,
        timeout=timedelta(minutes=10),
    )  # fmt: skip
    return FsdpEngine(
        config.model.path,
        dtype=config.model.dtype,
        temperature=config.sampling.temperature,
        attention=config.learner.attention,
        betas=(config.learner.betas[0], config.learner.betas[1]),
        weight_decay=config.learner.weight_decay,
        max_grad_norm=config.learner.max_grad_norm,
        activation_checkpointing=config.learner.activation_checkpointing,
        bucket_bytes=config.sync.bucket_mb << 20,
    )
