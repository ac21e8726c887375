"""The generator: takes leases, drives an engine, scores what comes out, and submits whole groups.

    Ask ──▶ Work(leases) ──▶ begin: prompt, floor, samples into the engine
                                │
        new weights ──▶ load between two steps, requests kept
                                ▼
                          engine.step() ──▶ all samples of a group done ──▶ score ──▶ Submit ──▶ Receipt
    Heartbeat ──▶ Standing(revoked leases: abort them; the newest version)

It keeps nothing that cannot be made again: when it dies, its leases expire and others make the groups.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import xxhash

from buffers import messages as m
from buffers.client import BufferClient, BufferGone
from buffers.keys import has_door, open_door, show_key
from buffers.trajectory import GREEDY, SCHEMA_VERSION, Trajectory, encode, to_batch
from configs import load as configs
from configs.algorithms import Advantage
from configs.schema import Config, EngineKind, Transport
from generators.engine import Completion, Engine, Sample
from generators.episode import Episodes, Opening, SimulatedEpisodes, TextEpisodes
from generators.task import Score
from sync.folders import shared_memory_folder
from sync.manifest import DigestMismatch, Manifest
from sync.snapshot import Snapshot
from sync.subscriber import Subscriber
from sync.transports.fetcher import Fetcher
from sync.transports.nccl import Broadcast
from sync.transports.server import SnapshotServer

log = logging.getLogger("slipstream.generator")

HEARTBEAT_S = 0.5


@dataclass(slots=True)
class Group:
    """A lease being worked on."""

    lease: m.Lease
    opening: Opening
    started_at: float
    done: dict[int, Completion] = field(default_factory=dict)
    """Finished samples by index; beyond the lease's `num_samples` stands ReMax's greedy one."""

    def num_tokens(self, completions: Iterable[Completion]) -> int:
        """Sampled tokens of those that are the group's."""
        return sum(len(c.tokens) for c in completions if _sample_of(c.id) < self.lease.num_samples)


def sample_seed(run_seed: int, split: str, group: int, sample: int) -> int:
    """The seed of one sample: the same for every attempt at the group, whoever makes it."""
    return xxhash.xxh32_intdigest(f"{run_seed}/{split}/{group}/{sample}".encode())


class Generator:
    def __init__(
        self,
        name: str,
        config: Config,
        client: BufferClient,
        engine: Engine,
        episodes: Episodes,
        subscriber: Subscriber | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._config, self._client = name, config, client
        self._subscriber = Subscriber() if subscriber is None else subscriber
        self._engine, self._episodes, self._clock = engine, episodes, clock
        self._makes_baselines = config.algo.advantage is Advantage.remax
        self._groups: dict[int, Group] = {}
        self._waiting: deque[m.Lease] = deque()  # leased, not begun
        self._asked: int | None = None  # number of the question under way
        self._newest = (-1, "")  # version and where its manifest is
        self._held = ""  # the same of the version held
        self._preparer = ThreadPoolExecutor(1, "weights")  # the subscriber is this thread's
        self._preparing: tuple[str, Future[Snapshot | Broadcast]] | None = None
        self._ended = False
        self._started_at = self._last_beat = clock()
        self._totals = m.GeneratorReport()

    def run(self) -> None:
        """Consumes leases and published weights; produces groups, scores and heartbeats.

        Waits for the buffer only, and only when the engine has nothing to do. Ends when the buffer says that the run is
        over, with `BufferGone` when it has been silent for as long as a lease lasts (by then all leases are lost), or with
        the engine's own error.
        """
        error: str | None = "its process was stopped"
        try:
            while not self._ended:
                self._listen()
                self._beat()
                self._update_weights()
                self._ask()
                self._begin()
                self._step()
            error = None
        except Exception as raised:
            error = _describe(raised)
            raise
        finally:
            self._beat(last=True)
            self._client.post(m.Leave(generator=self.name, error=error))
            self._preparer.shutdown(cancel_futures=True)
            self._subscriber.close()
            self._engine.shutdown()
            self._client.close()

    # ---- the buffer

    def _listen(self) -> None:
        busy = self._engine.num_unfinished > 0
        began = self._clock()
        for answer in self._client.receive(0.0 if busy else HEARTBEAT_S / 2):
            self._hear(answer.number, answer.reply)
        if not busy:
            self._totals.idle_s += self._clock() - began
        if self._client.silent_s > self._config.buffer.lease_s:
            raise BufferGone(f"the buffer at {self._client.address} has been silent for {self._client.silent_s:.0f} s")

    def _hear(self, number: int, reply: m.Reply) -> None:
        match reply:
            case m.Work():
                self._asked = None
                self._waiting.extend(reply.leases)
                self._notice(reply.version, reply.weights, reply.ended)
            case m.Standing():
                self._notice(reply.version, reply.weights, reply.ended)
                for lease_id in reply.revoked:
                    self._drop(lease_id)
            case m.Receipt(verdicts=verdicts, leases=leases):
                for lease_id, verdict in zip(leases, verdicts, strict=True):
                    if verdict not in ("accepted", "zero_variance"):
                        log.info("lease %d: %s", lease_id, verdict)
            case m.Refused(reason=reason):
                log.error("the buffer has refused a message: %s", reason)

    def _notice(self, version: int, weights: str, ended: bool) -> None:
        self._ended = self._ended or ended
        if version >= 0:
            self._newest = (version, weights)  # after a rewind it may be lower than the one held

    def _beat(self, last: bool = False) -> None:
        now = self._clock()
        if not last and now - self._last_beat < HEARTBEAT_S:
            return
        self._last_beat = now
        self._client.post(m.Heartbeat(generator=self.name, progress=self._progress(), report=self._report(now)))

    def _progress(self) -> dict[int, int]:
        progress = {lease.id: 0 for lease in self._waiting}
        for lease_id, group in self._groups.items():
            progress[lease_id] = group.num_tokens(group.done.values())
        for sample_id, num_tokens in self._engine.progress().items():
            group = self._groups[_lease_of(sample_id)]
            if _sample_of(sample_id) < group.lease.num_samples:
                progress[group.lease.id] += num_tokens
        return progress

    def _report(self, now: float) -> m.GeneratorReport:
        self._totals.version, self._totals.alive_s = self._held_version, now - self._started_at
        return self._totals

    def _ask(self) -> None:
        each = self._config.learner.samples_per_prompt + self._makes_baselines
        used = self._engine.num_unfinished + len(self._waiting) * each
        count = (self._config.generators.max_sequences - used) // each
        if self._asked is None and count > 0:
            self._asked = self._client.post(m.Ask(generator=self.name, count=count, wait_s=5.0))

    # ---- weights

    def _update_weights(self) -> None:
        """Takes up the newest version: once it has been verified, or (`sync.in_flight=false`) when the engine has run dry."""
        version, weights = self._newest
        if weights == self._held or (not self._config.sync.in_flight and self._engine.num_unfinished):
            return
        preparing = self._prepare(weights)
        if self._engine.num_unfinished and not preparing.done():
            return
        self._preparing = None
        try:
            manifest = self._take_up(weights, preparing)
        except FileNotFoundError as error:  # gone: a newer one has replaced it; or not to be had for now
            log.info("version %d cannot be taken up: %s", version, error)
            self._newest = (self._held_version, self._held)
            self._last_beat = float("-inf")  # ask at once what the newest is
            return
        self._held = weights
        self._totals.updates += 1
        self._totals.update_bytes += manifest.num_bytes
        self._preparer.submit(self._settle)

    def _prepare(self, weights: str) -> "Future[Snapshot | Broadcast]":
        """Fetches and verifies the snapshot beside the engine; one that is under way for an older version is not waited for."""
        if self._preparing is None or self._preparing[0] != weights:
            if self._preparing is not None:
                self._preparing[1].cancel()
            self._preparing = (weights, self._preparer.submit(self._bring, weights))
        return self._preparing[1]

    def _bring(self, weights: str, again: bool = False) -> Snapshot | Broadcast:
        """In the preparing thread."""
        began = self._clock()
        try:
            snapshot = self._subscriber.prepare(weights, again=again)
        finally:
            self._totals.prepare_s += self._clock() - began
            self._totals.fetched_bytes = self._subscriber.fetched_bytes
        self._totals.digest_checks += snapshot.checks
        return snapshot

    def _settle(self) -> None:
        """In the preparing thread. Whatever goes wrong makes the next version slower to come, and no more."""
        try:
            self._subscriber.settle()
        except Exception:
            log.exception("could not make ready for the next version")

    def _take_up(self, weights: str, preparing: "Future[Snapshot | Broadcast]") -> Manifest:
        """A first mismatch is repaired by reading all again, a second one ends the generator."""
        try:
            return self._load(preparing.result())
        except DigestMismatch as error:
            self._totals.digest_mismatches += 1
            log.error("%s; pulling it again", error)
            return self._load(self._preparer.submit(self._bring, weights, again=True).result())

    def _load(self, source: Snapshot | Broadcast) -> Manifest:
        began = self._clock()
        self._totals.digest_checks += 1
        self._engine.load(source)
        self._totals.pause_s += self._clock() - began
        return source.manifest

    @property
    def _held_version(self) -> int:
        return -1 if self._engine.version is None else self._engine.version

    # ---- groups

    def _begin(self) -> None:
        """Begins what is leased, in order, once the engine holds a version at or above the lease's floor."""
        draining = not self._config.sync.in_flight and self._newest[1] != self._held
        while self._waiting and not draining and self._waiting[0].floor <= self._held_version:
            self._open(self._waiting.popleft())

    def _open(self, lease: m.Lease) -> None:
        try:
            opening = self._episodes.open(lease)
            samples = [
                Sample(
                    id=f"{lease.id}/{sample}",
                    prompt=opening.tokens,
                    max_tokens=self._config.sampling.max_tokens,
                    seed=sample_seed(lease.seed, lease.split, lease.group, sample),
                    greedy=sample == lease.num_samples,
                )
                for sample in range(self._num_samples(lease))
            ]
            for sample in samples:
                self._engine.add(sample)
        except Exception as error:  # a task is user code: whatever it raises fails this group, not the run
            log.exception("prompt %d of task %s could not be begun", lease.index, lease.task)
            self._engine.abort([f"{lease.id}/{sample}" for sample in range(self._num_samples(lease))])
            self._client.post(m.Fail(generator=self.name, lease=lease.id, num_tokens=0, error=_describe(error)))
            return
        self._groups[lease.id] = Group(lease, opening, time.time())

    def _num_samples(self, lease: m.Lease) -> int:
        """Samples to be made for a lease: a group's, and for ReMax a greedy one after them, which is scored and not trained. Like
        evaluation, it stands outside the ledger."""
        return lease.num_samples + (self._makes_baselines and lease.split == "train")

    def _step(self) -> None:
        if not self._engine.num_unfinished:
            return
        whole: dict[int, list[Trajectory]] = {}  # by lease
        for completion in self._engine.step():
            self._totals.sampled_tokens += len(completion.tokens)
            group = self._groups[_lease_of(completion.id)]
            group.done[_sample_of(completion.id)] = completion
            if len(group.done) == self._num_samples(group.lease):
                del self._groups[group.lease.id]
                if (rows := self._score(group)) is not None:
                    whole[group.lease.id] = rows
        if whole:
            batch = to_batch([row for rows in whole.values() for row in rows])
            self._client.post(m.Submit(generator=self.name, leases=list(whole), schema=SCHEMA_VERSION), encode(batch))

    def _score(self, group: Group) -> list[Trajectory] | None:
        """The group's rows; None when it is an evaluation prompt (the score is sent) or could not be scored."""
        lease = group.lease
        completions = [group.done[sample] for sample in range(len(group.done))]
        try:
            scores = [_finite(self._episodes.score(group.opening, c.tokens)) for c in completions]
        except Exception as error:  # user code, as in `_open`
            log.exception("prompt %d of task %s could not be scored", lease.index, lease.task)
            num_tokens = group.num_tokens(completions)
            self._client.post(
                m.Fail(generator=self.name, lease=lease.id, num_tokens=num_tokens, error=_describe(error))
            )
            return None
        if lease.split == "eval":
            self._client.post(m.Evaluated(generator=self.name, lease=lease.id, reward=scores[0].reward))
            return None
        baseline = {GREEDY: scores[-1].reward} if len(scores) > lease.num_samples else {}
        return [
            _trajectory(group, sample, completions[sample], scores[sample], baseline, self.name)
            for sample in range(lease.num_samples)
        ]

    def _drop(self, lease_id: int) -> None:
        """The lease is someone else's now, or nobody's: stop, and say how far it had come."""
        self._waiting = deque(lease for lease in self._waiting if lease.id != lease_id)
        group = self._groups.pop(lease_id, None)
        num_tokens = 0
        if group is not None:
            unfinished = [f"{lease_id}/{s}" for s in range(self._num_samples(group.lease)) if s not in group.done]
            aborted = self._engine.abort(unfinished)
            self._totals.sampled_tokens += sum(len(completion.tokens) for completion in aborted)
            num_tokens = group.num_tokens([*aborted, *group.done.values()])
        self._client.post(
            m.Fail(generator=self.name, lease=lease_id, num_tokens=num_tokens, error="revoked", revoked=True)
        )


def _trajectory(
    group: Group, sample: int, completion: Completion, score: Score, baseline: dict[str, float], generator: str
) -> Trajectory:
    prompt = group.opening.tokens
    return Trajectory(
        group=group.lease.group,
        sample=sample,
        due=group.lease.due,
        prompt_id=group.lease.index,
        task=group.lease.task,
        tokens=[*prompt, *completion.tokens],
        sampled=[False] * len(prompt) + [True] * len(completion.tokens),
        logprobs=[0.0] * len(prompt) + completion.logprobs,
        versions=[-1] * len(prompt) + completion.versions,
        reward=score.reward,
        rewards=score.components | baseline,
        finish_reason=completion.finish_reason,
        generator=generator,
        started_at=group.started_at,
        finished_at=time.time(),
    )


def _finite(score: Score) -> Score:
    if not abs(score.reward) < float("inf"):
        raise ValueError(f"reward must be finite, got {score.reward}")
    return score


def _lease_of(sample_id: str) -> int:
    return int(sample_id.partition("/")[0])


def _sample_of(sample_id: str) -> int:
    return int(sample_id.partition("/")[2])


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def join(address: str, name: str, seed: int, keys: str | None) -> Generator:
    """Joins the run whose buffer answers at `address`: its configuration decides model, task and sampling."""
    client = BufferClient(address, keys=keys)
    welcome = client.call(m.Join(generator=name), m.Welcome)
    config = configs.parse(welcome.config)
    engine, episodes = make_engine(config, seed), make_episodes(config)
    return Generator(name, config, client, engine, episodes, make_subscriber(config, address, keys))


def make_subscriber(config: Config, buffer: str, keys: str | None) -> Subscriber:
    """`buffer` is its address: the hosts' folders of what they fetch are named by it."""
    if config.sync.transport not in (Transport.auto, Transport.tcp, Transport.nccl):
        return Subscriber()
    folder = shared_memory_folder(f"fetched-{xxhash.xxh32_hexdigest(f'{buffer} {config.run.name}'.encode())}")
    show = None if keys is None else lambda socket: show_key(socket, Path(keys))
    door = None if keys is None else lambda socket: open_door(socket, Path(keys))
    may_relay = config.sync.relays and (keys is None or has_door(Path(keys)))
    return Subscriber(
        Fetcher(folder, secure=show),
        relay=partial(SnapshotServer, secure=door) if may_relay else None,
        broadcast=config.sync.transport is Transport.nccl,
    )


def make_engine(config: Config, seed: int) -> Engine:
    if config.generators.engine is EngineKind.simulated:
        from generators.simulated_engine import SimulatedEngine

        simulated = config.generators.simulated
        return SimulatedEngine(
            tokens_per_s=simulated.tokens_per_s,
            slots=simulated.slots,
            mean_tokens=simulated.mean_tokens,
            cv=simulated.cv,
        )
    from generators.vllm_engine import VllmEngine  # here, because importing vLLM takes seconds and changes torch

    return VllmEngine(
        config.model.path,
        dtype=config.model.dtype,
        max_model_len=config.generators.max_model_len,
        max_sequences=config.generators.max_sequences,
        kv_cache_mb=config.generators.kv_cache_mb,
        prefix_cache=config.generators.prefix_cache,
        kv_cache=config.sync.kv_cache,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        min_p=config.sampling.min_p,
        seed=seed,
        gpu_memory_fraction=config.generators.gpu_memory_fraction,
        transfer={Transport.auto: "ipc", Transport.cuda_ipc: "ipc", Transport.nccl: "nccl"}.get(config.sync.transport),
    )


def make_episodes(config: Config) -> Episodes:
    if config.generators.engine is EngineKind.simulated:
        return SimulatedEpisodes()
    from transformers import AutoTokenizer

    from generators.tasks import load_task

    return TextEpisodes(load_task(config.task.name, config.task.args), AutoTokenizer.from_pretrained(config.model.path))
