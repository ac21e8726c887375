"""The generator: takes leases, drives an engine for the episodes beside it, and submits whole groups.

    RequestLeases ──▶ LeaseGrant ──▶ episodes, in a thread ──▶ SubmitGroups ──▶ LeaseReceipt
                                        │ ▲
                               prompts  ▼ │  replies
                                   engine.step()
                                        ▲
        new version ──▶ loaded between two steps, requests kept
    GeneratorHeartbeat, from a thread of its own ──▶ GeneratorStanding: revoked leases, the newest version

A generator keeps nothing that cannot be made again: when it dies, its leases expire and other generators make
the groups.

`Generator` is the loop and the conversation with the buffer. `weight_updates` brings new versions into the
engine, `leased_groups` makes the groups, `engine_turns` lets the learner have the GPUs that both share, and
`joining` builds all of them for a run that is under way.
"""

import logging
import secrets
import time
from collections.abc import Callable
from functools import partial

from msgspec import structs

from buffers import messages as m
from buffers.attempts import BEGIN_S
from buffers.client import BufferClient, BufferGone
from buffers.evaluation import read_digest
from buffers.heartbeat import HEARTBEAT_S, HeartbeatThread
from buffers.role_registry import ASLEEP, STARTING
from buffers.run_status import GeneratorReport
from buffers.timeline import Timeline
from configs.schema import Config
from generators.engine import Engine
from generators.engine_turns import EngineTurns
from generators.episode import Episodes
from generators.group import parse_lease_id
from generators.leased_groups import LeasedGroups
from generators.plain_values import describe_error
from generators.policy import EnginePolicy
from generators.probe import PROBE_LEASE, ParityProbe
from generators.weight_updates import WeightUpdates
from sync.subscriber import Subscriber
from sync.turns import LOOK_S

log = logging.getLogger("slipstream.generator")

IDLE_S = 0.05
"""Seconds that the loop waits for the buffer, for weights or for episodes when the engine has nothing to
do."""


WAIT_BESIDE_EVALUATION_S = 0.25
"""Seconds that a request for leases waits at the buffer while the generator plays evaluation prompts."""


STAY_S = 5.0
"""Seconds for which the buffer has to say that a generator has left before it joins again."""


class RunReplaced(ValueError):
    """Raised when another run answers at the buffer's address."""


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
        *,
        run: str = "",
        evaluates: bool = False,
        turns: EngineTurns | None = None,
    ) -> None:
        """`heart` is a heartbeat that has started already, because an engine takes its time to start. None
        starts one. `run`: name of the run that it has joined (`JoinedRun.run`); empty: whichever answers.
        `evaluates`: it has joined for evaluation alone. `turns`: it shares its GPUs with the learner."""
        self.name, self._config, self._client, self._evaluates = name, config, client, evaluates
        self._run, self._life = run, secrets.token_hex(8)
        self._engine, self._clock = engine, clock
        self._totals = GeneratorReport()
        self._wake_loop = client.open_wake_up()
        policy = EnginePolicy(self._wake_loop)
        self._groups = LeasedGroups(
            name, config, client, engine, episodes, policy, self._totals, self._wake_loop
        )
        # After the episodes are open: where they cannot be, no heart is left beating.
        self._heart = heart or start_heartbeat(client.open_another(), name, evaluates=evaluates)
        subscriber = Subscriber() if subscriber is None else subscriber
        self._updates = WeightUpdates(config, engine, subscriber, self._heart, self._totals, clock)
        self._probe, self._turns = ParityProbe(config, name), turns
        self._has_ended = False
        self._open_request: int | None = None
        """Number of the request for leases that has no answer yet."""
        self._is_out_of_touch = False
        """True while the buffer has been silent for longer than a lease lasts."""
        self._asks_anew = False
        """True when a version was loaded since the last request."""
        self._asked_with = frozenset[int]()
        """The leases with which the last request was sent."""
        self._waiting_since: dict[int, float] = {}
        """When each of the leases came that are not begun."""
        self._left_since: float | None = None
        """When the buffer first said that this generator has left; None while it is known there."""
        self._leave_by: float | None = None
        """When this generator leaves at the latest; None until it is told to leave."""
        self._renewed_leases: tuple[frozenset[int], list[int]] = (frozenset(), [])
        self._renewed_at = float("-inf")
        """Leases that the heartbeats renew, and when the heartbeat was last told of them."""
        self._started_at = self._idleness_counted_at = clock()
        self._was_idle = True

    def leave_within(self, grace_s: float) -> None:
        """Makes the loop leave the run. It gives back the leases that are not begun, hands in the groups that
        are, and gives back what is left after `grace_s`. The first call counts; a signal handler may make
        it."""
        if self._leave_by is None:
            self._leave_by = self._clock() + grace_s

    def run(self) -> bool:
        """Consumes leases and published weights; produces groups, scores and heartbeats.

        Waits for the buffer and for episodes, and only when the engine has nothing to do. Ends when the
        buffer says that the run is over, when it was told to leave (returns True then), with `BufferGone`
        when the buffer has been silent for `buffer.reconnect_s`, with RunReplaced when another run answers
        in its place, or with the engine's own error.
        """
        error: str | None = None  # nor is it one that the process is stopped, or that the run is another
        try:
            while not self._has_ended and not self._may_leave():
                self._receive_answers()
                self._tell_heartbeat()
                self._exchange_turns()
                self._update_weights()
                self._ask_for_leases()
                self._begin_groups()
                self._tell_heartbeat()
                self._exchange_samples()
                self._count_idleness()
                self._step_engine()
                self._count_idleness()
                self._groups.submit_played_groups()
            return not self._has_ended
        except RunReplaced:
            raise
        except Exception as raised:
            error = describe_error(raised)
            raise
        finally:
            # The heartbeat ends first: the buffer must not hear from it after `Leave`.
            self._heart.close()
            self._client.send_request(
                m.GeneratorHeartbeat(
                    generator=self.name, progress=self._groups.count_tokens(), report=self._make_report()
                )
            )
            self._client.send_request(m.LeaveRun(generator=self.name, error=error))
            self._groups.close()
            self._updates.close()
            self._client.close()
            if self._turns is not None:
                self._turns.close()
            # The engine ends with the process, because vLLM computes for two seconds when it is shut down.

    def _may_leave(self) -> bool:
        """True once a generator that was told to leave holds nothing, and the buffer has all that it has
        made; or when its time is over."""
        if self._leave_by is None:
            return False
        is_empty = not self._groups.lease_ids and not self._client.awaits_answers(besides=self._open_request)
        return is_empty or self._clock() >= self._leave_by

    def _receive_answers(self) -> None:
        self._count_idleness()
        self._heart.set_activity(*self._describe_activity())
        is_busy = self._can_step or (self._is_awake and self._updates.is_fetching)
        wait_s = 0.0 if is_busy else IDLE_S if self._turns is None else LOOK_S
        for answer in self._client.receive_answers(wait_s):
            if answer.number == self._open_request:
                self._open_request = None
            self._handle_reply(answer.reply)
        for standing in self._heart.take_standings():
            self._handle_reply(standing)
            self._stay_in_run(standing)
        self._bear_silence(self._heart.silent_s)

    def _bear_silence(self, silent_s: float) -> None:
        """Goes on without the buffer for a while: a link may be down, or the buffer is started again. The
        groups under way are played to their end. When the buffer is back it says which leases are lost."""
        said = f"the buffer at {self._client.address} has been silent for {silent_s:.0f} s"
        if silent_s > self._config.buffer.reconnect_s:
            raise BufferGone(said)
        was_out_of_touch = self._is_out_of_touch
        self._is_out_of_touch = silent_s > self._config.buffer.lease_s
        if self._is_out_of_touch and not was_out_of_touch:
            patience_s = self._config.buffer.reconnect_s
            log.warning("%s; its leases are lost; waiting for it for %.0f s in all", said, patience_s)
        elif was_out_of_touch and not self._is_out_of_touch:
            log.warning("the buffer at %s answers again", self._client.address)

    def _describe_activity(self) -> tuple[str, bool]:
        """Returns what the loop does in this round, and whether it makes progress with that."""
        if not self._is_awake:
            return ASLEEP, True
        if self._engine.num_unfinished:
            return "sampling", True
        if self._updates.is_fetching:
            return self._updates.describe_fetching()
        if self._groups.is_playing:
            return self._groups.activity, True
        if (version := self._groups.awaited_version) is not None:
            return f"waiting for version {version}", True
        if self._leave_by is not None:
            return "leaving", True
        return "waiting for leases", True

    def _handle_reply(self, reply: m.Reply) -> None:
        if isinstance(reply, m.LeaseGrant | m.GeneratorStanding | m.JoinedRun):
            self._check_run(reply.run)
        match reply:
            case m.LeaseGrant():
                self._groups.add_leases(reply.leases)
                self._note_standing(reply)
            case m.GeneratorStanding():
                self._note_standing(reply)
                for lease_id in reply.revoked:
                    self._groups.drop_lease(lease_id)
            case m.LeaseReceipt(verdicts=verdicts, leases=leases):
                for lease_id, verdict in zip(leases, verdicts, strict=True):
                    if verdict not in ("accepted", "zero_variance", "uninformative"):
                        log.info("lease %d: %s", lease_id, verdict)
            case m.RefusedRequest(reason=reason):
                log.error("the buffer has refused a message: %s", reason)

    def _check_run(self, run: str) -> None:
        """Raises RunReplaced where another run answers: its prompts and its weights are not this engine's."""
        if self._run and run != self._run:
            raise RunReplaced(
                f"the run that {self.name} has joined is over: another run, or the same one with other "
                f"settings, answers at {self._client.address}"
            )

    def _stay_in_run(self, standing: m.GeneratorStanding) -> None:
        """Joins again where the buffer has said for a while that this generator has left: somebody has said
        so in its place, and it lives. One whose driver has said so in earnest ends within a second."""
        now = self._clock()
        if not standing.has_left or standing.ended:
            self._left_since = None
        elif self._left_since is None:
            self._left_since = now
        elif now - self._left_since > STAY_S:
            self._left_since = None
            log.warning("the buffer was told that %s has left: it joins again", self.name)
            again = m.JoinRun(generator=self.name, evaluates=self._evaluates, again=True)
            self._client.send_request(again)

    def _note_standing(self, reply: m.LeaseGrant | m.GeneratorStanding) -> None:
        self._has_ended = self._has_ended or reply.ended
        self._updates.note_announcement(reply.version, reply.manifest_locator, reply.announcement_number)

    def _tell_heartbeat(self) -> None:
        """Tells the heartbeat which leases to renew. The loop does so before anything that may take long."""
        now, leases = self._clock(), (self._groups.lease_ids, self._groups.waiting_ids)
        if leases == self._renewed_leases and now - self._renewed_at < HEARTBEAT_S:
            return
        self._renewed_leases, self._renewed_at = leases, now
        # A copy, because the heartbeat's thread reads it while this thread counts on.
        report = structs.replace(self._make_report())
        # A sleeping engine could begin none, and does not hold up those that others could.
        since = self._waiting_since if self._is_awake else {}
        self._waiting_since = {one: since.get(one, now) for one in self._groups.waiting_ids}
        self._heart.set_composer(
            partial(
                m.GeneratorHeartbeat,
                generator=self.name,
                progress=self._groups.count_tokens(),
                overdue=[one for one, since in self._waiting_since.items() if now - since > BEGIN_S],
                report=report,
                evaluates=self._evaluates,
            )
        )

    def _make_report(self) -> GeneratorReport:
        self._totals.version, self._totals.alive_s = (
            self._updates.held_version,
            self._clock() - self._started_at,
        )
        decoding = sum(self._engine.count_sampled_tokens().values())
        self._totals.decoded_tokens = self._totals.sampled_tokens + decoding
        return self._totals

    # ---- turns

    @property
    def _is_awake(self) -> bool:
        """False while the learner has the GPUs."""
        return self._turns is None or self._turns.is_awake

    @property
    def _can_step(self) -> bool:
        return self._is_awake and self._engine.num_unfinished > 0 and self._engine.version is not None

    def _exchange_turns(self) -> None:
        if self._turns is None:
            return
        version, was_awake = self._engine.version, self._is_awake
        self._turns.exchange(self._engine, self._heart)
        if self._is_awake != was_awake:
            self._groups.pause_episodes(was_awake)
        if version is not None and self._engine.version is None:
            self._updates.note_lost_weights(version)

    # ---- the engine

    def _update_weights(self) -> None:
        """Loads the newest version if it is ready, and lets the parity probe sample from it."""
        version = self._updates.update_engine(may_load=self._is_awake)
        if version is not None:
            self._heart.set_activity(*self._describe_activity())
        self._asks_anew = self._asks_anew or version is not None
        # The learner compares the newest version, which one that evaluates alone may not hold.
        if version is not None and not self._evaluates:
            life = self._updates.held_life
            self._probe.begin_if_due(self._engine, self._updates.held_locator, life, version)

    def _ask_for_leases(self) -> None:
        room = max(0, self._groups.count_room())
        # A request that was made with the version before gives way to another.
        replaces = self._open_request is not None and self._asks_anew
        is_waiting = self._open_request is not None and not replaces
        if self._leave_by is not None or is_waiting or not room or self._updates.waits_for_idle_engine:
            return
        count = 0 if self._evaluates else room // self._config.samples_per_group
        leases = self._groups.lease_ids
        # Room for no whole group is for evaluation prompts, if there are some. The room for these grows with
        # each sample that ends, so no request waits long meanwhile.
        is_evaluating, may_wait = self._groups.is_evaluating, count > 0 or self._evaluates
        if may_wait or (is_evaluating and leases != self._asked_with):
            self._asked_with, self._asks_anew = leases, False
            self._open_request = self._client.send_request(
                m.RequestLeases(
                    generator=self.name,
                    count=count,
                    wait_s=5.0 if not is_evaluating else WAIT_BESIDE_EVALUATION_S if may_wait else 0.0,
                    evaluation_room=self._groups.count_evaluation_room(),
                    room=room,
                    version=self._updates.held_version,
                    replaces=replaces,
                    life=self._life,
                )
            )

    def _begin_groups(self) -> None:
        if self._leave_by is not None:
            self._groups.leave()
        may_begin = self._updates.is_current if self._evaluates else not self._updates.waits_for_idle_engine
        if may_begin:
            self._groups.begin_groups(self._updates.held_version, read_digest(self._updates.held_locator))

    def _exchange_samples(self) -> None:
        # With `sync.in_flight=false` the engine runs dry before it takes up a version, so nothing new may
        # enter it.
        may_add = self._is_awake and self._engine.version is not None
        self._groups.exchange_samples(may_add and not self._updates.waits_for_idle_engine)

    def _step_engine(self) -> None:
        if not self._can_step:
            return
        for completion in self._engine.step():
            if parse_lease_id(completion.id) == PROBE_LEASE:
                self._probe.take_completion(completion, self._client)
            else:
                self._groups.take_completion(completion)
        self._groups.show_progress()

    def _count_idleness(self) -> None:
        """Adds up the engine's idle seconds: from the moment that it has nothing to do to the moment that it
        steps again, whatever the loop and other threads do meanwhile."""
        now = self._clock()
        if self._was_idle:
            self._totals.idle_s += now - self._idleness_counted_at
        self._idleness_counted_at, self._was_idle = now, not self._can_step


def start_heartbeat(
    client: BufferClient, generator: str, *, evaluates: bool = False, timeline: Timeline | None = None
) -> HeartbeatThread:
    """Starts the heartbeat of a generator that has nothing to report yet."""
    compose = partial(
        m.GeneratorHeartbeat,
        generator=generator,
        progress={},
        report=GeneratorReport(),
        evaluates=evaluates,
    )
    return HeartbeatThread(client, compose, STARTING, timeline=timeline)
