"""The generator: takes leases, drives an engine, scores what comes out, and submits whole groups.

    Ask ──▶ Work(leases) ──▶ begin: prompt, floor, samples into the engine
                                │
        new weights ──▶ load between two steps, requests kept
                                ▼
                          engine.step() ──▶ all samples of a group done ──▶ score, in a thread ──▶ Submit ──▶ Receipt
    Heartbeat, from a thread of its own ──▶ Standing(revoked leases: abort them; the newest version)

It keeps nothing that cannot be made again: when it dies, its leases expire and others make the groups.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import xxhash
from msgspec import structs

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, hand_in
from buffers.connections import watch_small_requests
from buffers.fleet import STARTING
from buffers.heartbeat import HEARTBEAT_S, HeartbeatThread
from buffers.keys import has_door, open_door, show_key
from buffers.probe import probe_lengths
from buffers.run_status import GeneratorReport
from buffers.trajectory import GREEDY, Trajectory, to_batch
from configs.generators import EngineKind
from configs.load import parse_config
from configs.schema import Config
from configs.sync import Transport
from generators.engine import Engine, Sample
from generators.episode import Episodes, SimulatedEpisodes, TextEpisodes
from generators.group import Group, lease_of, sample_of, sample_seed, trajectory
from generators.probe import PROBE, ParityProbe
from generators.scoring import Scored, ScoringPool, describe
from sync.folders import shared_memory_folder
from sync.manifest import DigestMismatch, Manifest
from sync.snapshot import Snapshot
from sync.subscriber import Subscriber
from sync.transports.fetcher import Fetcher
from sync.transports.nccl import NcclBroadcast
from sync.transports.server import SnapshotServer
from sync.transports.tcp import MAX_UNREAD_BYTES

log = logging.getLogger("slipstream.generator")

IDLE_S = 0.05
"""How long the loop of an idle engine waits for the buffer or for weights before it comes round."""


class Generator:
    def __init__(
        self,
        name: str,
        config: Config,
        client: BufferClient,
        engine: Engine,
        episodes: Episodes,
        subscriber: Subscriber | None = None,
        heart: HeartbeatThread | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`heart` beats already, where the engine took its time to start. None: one with a client like `client`."""
        self.name, self._config, self._client = name, config, client
        self._subscriber = Subscriber() if subscriber is None else subscriber
        self._engine, self._episodes, self._clock = engine, episodes, clock
        self._makes_baselines = config.algo.needs_greedy_response
        self._groups: dict[int, Group] = {}  # in the engine
        self._scoring: dict[int, Group] = {}  # in the scoring pool
        self._waiting: deque[m.Lease] = deque()  # leased, not begun
        self._asked: int | None = None  # number of the question under way
        self._newest = (-1, "")  # version and where its manifest is
        self._change = 0  # number of the publication that it comes from
        self._held = ""  # where the manifest of the version held is
        self._preparer = ThreadPoolExecutor(1, "weights")  # the subscriber is this thread's
        self._preparing: tuple[str, Future[Snapshot | NcclBroadcast]] | None = None
        self._ended = False
        self._started_at = self._watched_at = clock()
        self._told_at, self._told = float("-inf"), frozenset[int]()  # the leases that heartbeats renew
        self._was_idle = True
        self._fetched_bytes = 0
        self._totals = GeneratorReport()
        self._probe = ParityProbe(config, name)
        self._scores = ScoringPool(config.generators.score_threads, config.generators.score_timeout_s)
        self._heart = heartbeat(client.another(), name) if heart is None else heart

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
                self._tell()
                self._update_weights()
                self._ask()
                self._begin()
                self._watch_idleness()
                self._step()
                self._watch_idleness()
                self._submit()
            error = None
        except Exception as raised:
            error = describe(raised)
            raise
        finally:
            self._heart.close()  # first: nothing of it may come after the farewell
            self._client.post(
                m.GeneratorHeartbeat(generator=self.name, progress=self._progress(), report=self._report())
            )
            self._client.post(m.LeaveRun(generator=self.name, error=error))
            self._scores.close()
            self._preparer.shutdown(cancel_futures=True)
            self._subscriber.close()
            self._client.close()  # the engine ends with the process: vLLM's own farewell computes for two seconds

    # ---- the buffer

    def _listen(self) -> None:
        self._watch_idleness()
        self._heart.say(*self._activity())
        busy = self._engine.num_unfinished > 0 or self._is_fetching or bool(self._scoring)
        for answer in self._client.receive(0.0 if busy else IDLE_S):
            self._hear(answer.reply)
        for standing in self._heart.standings():
            self._hear(standing)
        if (silent_s := self._heart.silent_s) > self._config.buffer.lease_s:
            raise BufferGone(f"the buffer at {self._client.address} has been silent for {silent_s:.0f} s")

    def _activity(self) -> tuple[str, bool]:
        """What the loop is doing in this round, and whether that goes on."""
        if self._engine.num_unfinished:
            return "sampling", True
        if self._is_fetching:
            return self._fetching()
        if self._scoring:
            return "scoring", True
        if self._waiting:
            return f"waiting for version {self._waiting[0].min_version}", True
        return "waiting for leases", True

    @property
    def _is_fetching(self) -> bool:
        return self._preparing is not None and self._newest[1] != self._held

    def _fetching(self) -> tuple[str, bool]:
        before, self._fetched_bytes = self._fetched_bytes, self._subscriber.fetched_bytes
        return f"fetching version {self._newest[0]}", before != self._fetched_bytes

    def _watch_idleness(self) -> None:
        """The engine is idle from the moment that it has nothing to do to the moment that it steps again, whatever the loop
        and other threads do meanwhile."""
        now = self._clock()
        if self._was_idle:
            self._totals.idle_s += now - self._watched_at
        self._watched_at, self._was_idle = now, self._engine.num_unfinished == 0

    def _hear(self, reply: m.Reply) -> None:
        match reply:
            case m.LeaseGrant():
                self._asked = None
                self._waiting.extend(reply.leases)
                self._notice(reply)
            case m.GeneratorStanding():
                self._notice(reply)
                for lease_id in reply.revoked:
                    self._drop(lease_id)
            case m.LeaseReceipt(verdicts=verdicts, leases=leases):
                for lease_id, verdict in zip(leases, verdicts, strict=True):
                    if verdict not in ("accepted", "zero_variance"):
                        log.info("lease %d: %s", lease_id, verdict)
            case m.RefusedRequest(reason=reason):
                log.error("the buffer has refused a message: %s", reason)

    def _notice(self, reply: m.LeaseGrant | m.GeneratorStanding) -> None:
        """Answers come over two connections: the older may be read last."""
        self._ended = self._ended or reply.ended
        if reply.version >= 0 and reply.announcement_number >= self._change:
            self._newest, self._change = (
                (reply.version, reply.manifest_locator),
                reply.announcement_number,
            )  # a rewind makes it a lower one

    def _tell(self) -> None:
        """Tells the heartbeat which leases to renew, before anything that may take long."""
        now, leases = (
            self._clock(),
            frozenset([lease.id for lease in self._waiting] + [*self._groups, *self._scoring]),
        )
        if leases == self._told and now - self._told_at < HEARTBEAT_S:
            return
        self._told_at, self._told = now, leases
        report = structs.replace(self._report())  # a copy: other threads read it
        self._heart.tell(
            partial(m.GeneratorHeartbeat, generator=self.name, progress=self._progress(), report=report)
        )

    def _progress(self) -> dict[int, int]:
        progress = {lease.id: 0 for lease in self._waiting}
        for lease_id, group in (self._groups | self._scoring).items():
            progress[lease_id] = group.num_tokens(group.done.values())
        for sample_id, num_tokens in self._engine.progress().items():
            if lease_of(sample_id) == PROBE:
                continue
            group = self._groups[lease_of(sample_id)]
            if sample_of(sample_id) < group.lease.num_samples:
                progress[group.lease.id] += num_tokens
        return progress

    def _report(self) -> GeneratorReport:
        self._totals.version, self._totals.alive_s = self._held_version, self._clock() - self._started_at
        self._totals.abandoned_scores = self._scores.num_abandoned
        self._totals.decoded_tokens = self._totals.sampled_tokens + sum(self._engine.progress().values())
        return self._totals

    def _ask(self) -> None:
        each = self._config.learner.samples_per_prompt + self._makes_baselines
        backlog = max(
            0, len(self._scoring) * each - self._config.generators.max_sequences
        )  # if scoring cannot keep up
        used = self._engine.num_unfinished - self._probe.num_unfinished + len(self._waiting) * each + backlog
        count = (self._config.generators.max_sequences - used) // each
        if self._asked is None and count > 0:
            self._asked = self._client.post(m.RequestLeases(generator=self.name, count=count, wait_s=5.0))

    # ---- weights

    def _update_weights(self) -> None:
        """Takes up the newest version: once it has been verified, or (`sync.in_flight=false`) when the engine has run dry."""
        if self._newest[1] == self._held or (not self._config.sync.in_flight and self._engine.num_unfinished):
            return
        weights, preparing = self._prepare(self._newest[1])
        if not preparing.done() and not self._engine.num_unfinished:
            wait([preparing], IDLE_S)
        if not preparing.done():
            return
        self._preparing = None
        try:
            manifest = self._take_up(weights, preparing)
        except FileNotFoundError as error:  # gone: a newer one has replaced it; or not to be had for now
            log.info("%s cannot be taken up: %s", weights, error)
            if self._newest[1] == weights:
                self._newest = (
                    self._held_version,
                    self._held,
                )  # the next heartbeat's answer says what is newest then
            return
        self._held = weights
        self._totals.updates += 1
        self._totals.update_bytes += manifest.num_bytes
        self._preparer.submit(self._settle)
        self._probe.begin(self._engine, weights, _life(weights), manifest.version)

    def _prepare(self, weights: str) -> "tuple[str, Future[Snapshot | NcclBroadcast]]":
        """Fetches and verifies the snapshot beside the engine. One that is under way for an older version is taken up first: else no
        version would ever be, where they come faster than they can be brought. Not that of a life before a rewind."""
        if self._preparing is not None and self._preparing[0] != weights:
            is_waiting = self._preparing[1].cancel()
            if is_waiting or _life(self._preparing[0]) != _life(weights):
                self._preparing = None
        if self._preparing is None:
            self._preparing = (weights, self._preparer.submit(self._bring, weights))
        return self._preparing

    def _bring(self, weights: str, again: bool = False) -> Snapshot | NcclBroadcast:
        """In the preparing thread."""
        began = self._clock()
        try:
            snapshot = self._subscriber.prepare_version(weights, again=again)
        finally:
            self._totals.prepare_s += self._clock() - began
            self._totals.fetched_bytes = self._subscriber.fetched_bytes
        self._totals.digest_checks += snapshot.checks
        return snapshot

    def _settle(self) -> None:
        """In the preparing thread. Whatever goes wrong makes the next version slower to come, and no more."""
        try:
            self._subscriber.refresh_spare()
        except Exception:
            log.exception("could not make ready for the next version")

    def _take_up(self, weights: str, preparing: "Future[Snapshot | NcclBroadcast]") -> Manifest:
        """A first mismatch is repaired by reading all again, a second one ends the generator."""
        try:
            return self._load(preparing.result())
        except DigestMismatch as error:
            self._totals.digest_mismatches += 1
            log.error("%s; pulling it again", error)
            again = self._preparing = (weights, self._preparer.submit(self._bring, weights, again=True))
            while not again[
                1
            ].done():  # nothing may be sampled meanwhile: the engine may hold what nobody published
                self._heart.say(*self._fetching())
                wait([again[1]], HEARTBEAT_S)
            self._preparing = None
            return self._load(again[1].result())

    def _load(self, source: Snapshot | NcclBroadcast) -> Manifest:
        began = self._clock()
        self._totals.digest_checks += 1
        self._heart.say(f"loading version {source.manifest.version}")
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
        while self._waiting and not draining and self._waiting[0].min_version <= self._held_version:
            self._open(self._waiting.popleft())

    def _open(self, lease: m.Lease) -> None:
        which = f"prompt {lease.index} of task {lease.task}"
        try:
            opening = self._episodes.open(lease)
        except (
            BaseException
        ) as error:  # a task is user code: whatever it raises fails this group, not the run
            self._fail(lease, 0, f"{which} could not be begun", describe(error), error)
            return
        try:
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
        except Exception as error:  # too long a prompt, for one
            self._engine.abort([f"{lease.id}/{sample}" for sample in range(self._num_samples(lease))])
            self._fail(lease, 0, f"{which} could not be begun", describe(error), error)
            return
        self._groups[lease.id] = Group(lease, opening, time.time())

    def _num_samples(self, lease: m.Lease) -> int:
        """Samples to be made for a lease: a group's, and for ReMax a greedy one after them, which is scored and not trained. Like
        evaluation, it stands outside the ledger."""
        return lease.num_samples + (self._makes_baselines and lease.split == "train")

    def _step(self) -> None:
        if not self._engine.num_unfinished:
            return
        for completion in self._engine.step():
            if lease_of(completion.id) == PROBE:
                self._probe.take(completion, self._client)
                continue
            self._totals.sampled_tokens += len(completion.tokens)
            group = self._groups[lease_of(completion.id)]
            group.done[sample_of(completion.id)] = completion
            if len(group.done) == self._num_samples(group.lease):
                self._hand_over(group)

    def _hand_over(self, group: Group) -> None:
        """To the scoring pool: the engine goes on meanwhile."""
        lease = group.lease
        self._scoring[lease.id] = self._groups.pop(lease.id)
        tokens = [group.done[sample].tokens for sample in range(len(group.done))]
        calls = [partial(self._episodes.score, group.opening, each) for each in tokens]
        self._scores.submit(lease.id, calls, f"prompt {lease.index} of task {lease.task}")

    def _submit(self) -> None:
        """Hands in the groups that have been scored, all in one message."""
        whole: dict[int, list[Trajectory]] = {}  # by lease
        idle = self._scoring and not self._engine.num_unfinished
        for scored in self._scores.collect(IDLE_S if idle else 0.0):
            if (rows := self._rows(self._scoring.pop(scored.lease), scored)) is not None:
                whole[scored.lease] = rows
        if whole:
            batch = to_batch([row for rows in whole.values() for row in rows])
            hand_in(self._client, self.name, list(whole), batch)

    def _rows(self, group: Group, scored: Scored) -> list[Trajectory] | None:
        """The group's rows; None when it is an evaluation prompt (the score is sent) or could not be scored."""
        lease, scores = group.lease, scored.scores
        completions = [group.done[sample] for sample in range(len(group.done))]
        if scored.error is not None:
            what = f"prompt {lease.index} of task {lease.task} could not be scored"
            self._fail(lease, group.num_tokens(completions), what, scored.error, scored.raised)
            return None
        if lease.split == "eval":
            self._client.post(
                m.SubmitEvaluation(generator=self.name, lease=lease.id, reward=scores[0].reward)
            )
            return None
        baseline = {GREEDY: scores[-1].reward} if len(scores) > lease.num_samples else {}
        return [
            trajectory(group, sample, completions[sample], scores[sample], baseline, self.name)
            for sample in range(lease.num_samples)
        ]

    def _fail(
        self, lease: m.Lease, num_tokens: int, what: str, error: str, raised: BaseException | None
    ) -> None:
        log.error("%s: %s", what, error, exc_info=raised)
        self._client.post(
            m.FailLease(generator=self.name, lease=lease.id, num_tokens=num_tokens, error=error)
        )

    def _drop(self, lease_id: int) -> None:
        """The lease is someone else's now, or nobody's: stop, and say how far it had come."""
        held = {lease.id: lease for lease in self._waiting}
        if lease_id not in held and lease_id not in self._groups and lease_id not in self._scoring:
            return  # it has been handed in meanwhile
        held.pop(lease_id, None)
        self._waiting = deque(held.values())
        self._scores.forget(lease_id)
        group = self._groups.pop(lease_id, None) or self._scoring.pop(lease_id, None)
        num_tokens = 0
        if group is not None:
            unfinished = [
                f"{lease_id}/{s}" for s in range(self._num_samples(group.lease)) if s not in group.done
            ]
            aborted = self._engine.abort(unfinished)
            self._totals.sampled_tokens += sum(len(completion.tokens) for completion in aborted)
            num_tokens = group.num_tokens([*aborted, *group.done.values()])
        self._client.post(
            m.FailLease(
                generator=self.name, lease=lease_id, num_tokens=num_tokens, error="revoked", revoked=True
            )
        )


def _life(weights: str) -> str:
    """Of the learner that announced a version: the end of its manifest's name."""
    return weights.rpartition("-")[2]


def heartbeat(client: BufferClient, name: str) -> HeartbeatThread:
    """A generator's, before it has anything to report."""
    compose = partial(m.GeneratorHeartbeat, generator=name, progress={}, report=GeneratorReport())
    return HeartbeatThread(client, compose, STARTING)


def join(
    address: str,
    name: str,
    seed: int,
    keys: str | None,
    gpu_memory: float | None = None,
    shares_gpu: bool = False,
) -> Generator:
    """Joins the run whose buffer answers at `address`: its configuration decides model, task and sampling; `gpu_memory`, the share of
    its GPU that the engine may take, and whether others are on that GPU are matters of this host."""
    client = BufferClient(address, keys=keys)
    welcome = client.call(m.JoinRun(generator=name), m.JoinedRun)
    config, heart = parse_config(welcome.config), heartbeat(client.another(), name)
    config.generators.gpu_memory_fraction = gpu_memory
    try:
        engine, episodes = make_engine(config, seed, shares_gpu), make_episodes(config)
        return Generator(
            name, config, client, engine, episodes, make_subscriber(config, address, keys), heart
        )
    except BaseException as error:
        heart.close()
        client.post(m.LeaveRun(generator=name, error=describe(error)))
        client.close()
        raise


def make_subscriber(config: Config, buffer: str, keys: str | None) -> Subscriber:
    """`buffer` is its address: the hosts' folders of what they fetch are named by it."""
    if config.sync.transport not in (Transport.auto, Transport.tcp, Transport.nccl):
        return Subscriber()
    folder = shared_memory_folder(f"fetched-{xxhash.xxh32_hexdigest(f'{buffer} {config.run.name}'.encode())}")
    show = None if keys is None else lambda socket: show_key(socket, Path(keys))
    door = None if keys is None else lambda socket: open_door(socket, Path(keys))
    watch = partial(watch_small_requests, encrypted=keys is not None, max_unread=MAX_UNREAD_BYTES)
    may_relay = config.sync.relays and (keys is None or has_door(Path(keys)))
    return Subscriber(
        Fetcher(folder, secure=show),
        relay=partial(SnapshotServer, secure=door, watch=watch) if may_relay else None,
        broadcast=config.sync.transport is Transport.nccl,
    )


def make_engine(config: Config, seed: int, shares_gpu: bool = False) -> Engine:
    if config.generators.engine is EngineKind.simulated:
        from generators.simulated_engine import SimulatedEngine

        simulated = config.generators.simulated
        return SimulatedEngine(
            tokens_per_s=simulated.tokens_per_s,
            slots=simulated.slots,
            mean_tokens=simulated.mean_tokens,
            cv=simulated.cv,
        )
    from generators.vllm_engine import (
        VllmEngine,
    )  # here, because importing vLLM takes seconds and changes torch

    return VllmEngine(
        config.model.path,
        dtype=config.model.dtype,
        max_model_len=config.generators.max_model_len,
        max_sequences=config.generators.max_sequences
        + len(probe_lengths(config)),  # a probe waits for no rollout
        kv_cache_mb=config.generators.kv_cache_mb,
        prefix_cache=config.generators.prefix_cache,
        kv_cache=config.sync.kv_cache,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        min_p=config.sampling.min_p,
        seed=seed,
        gpu_memory_fraction=config.generators.gpu_memory_fraction,
        shares_gpu=shares_gpu,
        record_experts=config.learner.moe.router_replay,
        transfer={Transport.auto: "ipc", Transport.cuda_ipc: "ipc", Transport.nccl: "nccl"}.get(
            config.sync.transport
        ),
    )


def make_episodes(config: Config) -> Episodes:
    if config.generators.engine is EngineKind.simulated:
        return SimulatedEpisodes()
    from transformers import AutoTokenizer

    from generators.tasks import load_task

    return TextEpisodes(
        load_task(config.task.name, config.task.args), AutoTokenizer.from_pretrained(config.model.path)
    )
