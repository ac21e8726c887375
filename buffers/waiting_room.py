"""Requests that cannot be answered yet: no work, no batch, no probe, no news. Each waits until its deadline
at most.

The room is bounded, and so is the share of one client in it.
"""

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, assert_never

from buffers import messages as m
from buffers.announcements import Announcer
from buffers.buffer import Buffer, LeaseRoom
from buffers.outbox import Outbox
from buffers.parity_probe import ParityProbes
from buffers.refusal import Refusal
from buffers.run_status import RunStatus

MAX_WAITERS = 20_000
MAX_WAITERS_OF_CLIENT = 200
MAX_WAIT_S = 60.0
"""Longest wait for an answer, whatever `wait_s` a request asks for."""
MAX_RECORDS_PER_NEWS = 500
"""Step records in one answer to a watcher."""

R = TypeVar("R")
Found = tuple[m.Reply, list[bytes]]
"""An answer and its binary frame, if it has one."""


@dataclass(frozen=True, slots=True)
class Waiter(Generic[R]):
    """A request that waits for its answer."""

    sender: bytes
    number: bytes
    request: R
    deadline: float
    """On the server's clock, in seconds."""
    user: str
    """The sender's public key; empty where there are no keys."""


@dataclass(slots=True)
class LeaseHand:
    """The leases that one request is dealt."""

    request: m.RequestLeases
    samples_per_group: int
    leases: list[m.Lease] = field(default_factory=list)
    num_groups: int = 0
    num_evaluated: int = 0
    """Samples of the evaluation prompts."""

    @property
    def room(self) -> LeaseRoom:
        """The bounds of the next lease."""
        asked, groups_left = self.request, self.request.count - self.num_groups
        whole = asked.count * self.samples_per_group if asked.room is None else asked.room
        left = max(0, whole - self.num_evaluated - self.num_groups * self.samples_per_group)
        return LeaseRoom(
            num_samples=left,
            num_evaluated=max(0, min(left, asked.evaluation_room - self.num_evaluated)),
            takes_groups=groups_left > 0 and (left >= self.samples_per_group or not self.leases),
            held=asked.version,
        )

    def add_lease(self, lease: m.Lease) -> None:
        self.leases.append(lease)
        if lease.evaluation:
            self.num_evaluated += lease.num_samples
        else:
            self.num_groups += 1


@dataclass(frozen=True, slots=True)
class GivenLeases:
    """The leases in the last answer to a generator that gave any."""

    sender: bytes
    number: bytes
    life: str
    """As in the request."""
    leases: list[int]

    def are_lost(self, sender: bytes, number: bytes, request: m.RequestLeases) -> bool:
        """True where this request is the one that was answered, and has come again because the connection had
        ended before the answer came."""
        is_same = bool(self.life) and (self.life, self.number) == (request.life, number)
        return is_same and self.sender != sender


GiveLease = Callable[[m.RequestLeases, LeaseRoom], m.Lease | None]
"""Gives a lease to a request, within what there is room for. None: there is no more for it."""


def deal_leases(
    requests: Sequence[m.RequestLeases], room: int, samples_per_group: int, lease: GiveLease
) -> list[list[m.Lease]]:
    """Deals the leases that are to be had (`room` at most) evenly to all who wait. Returns the leases of each
    request, in their order, without the last ones where nothing was left for them."""
    # A share is dealt in a row: groups that are leased together are stored together, and read together.
    share = max(1, room // len(requests))
    waiting, hands, hungry = iter(requests), list[LeaseHand](), deque[LeaseHand]()
    num_dealt = 0
    while num_dealt < room:
        if (request := next(waiting, None)) is not None:
            hands.append(hand := LeaseHand(request, samples_per_group))
        elif hungry:
            hand = hungry.popleft()
        else:
            break
        for _ in range(share):
            given = lease(hand.request, hand.room)
            if given is None:
                break
            hand.add_lease(given)
            num_dealt += 1
        else:
            hungry.append(hand)
    return [hand.leases for hand in hands]


class WaitingRoom:
    """Keeps one queue for each kind of request, and answers from them what can be answered."""

    def __init__(self, buffer: Buffer, probes: ParityProbes, announcer: Announcer, outbox: Outbox) -> None:
        self._buffer, self._probes, self._announcer, self._outbox = buffer, probes, announcer, outbox
        self.lease_requests: dict[str, Waiter[m.RequestLeases]] = {}
        """By generator, which has one at most; those that wait for longest come first."""
        self._given: OrderedDict[str, GivenLeases] = OrderedDict()
        """By generator."""
        self._batch_requests: list[Waiter[m.RequestBatch]] = []
        self._probe_requests: list[Waiter[m.RequestParityProbe]] = []
        self._evaluation_requests: list[Waiter[m.AwaitEvaluations]] = []
        self._watch_requests: list[Waiter[m.WatchRun]] = []
        self._fleet_requests: list[Waiter[m.WatchGenerators]] = []
        self._num_waiting: Counter[bytes] = Counter()
        """Waiting requests by sender."""
        self._offered_step = -1
        """The last step whose batch a rank has got."""

    def __iter__(self) -> Iterator[Waiter[Any]]:
        return itertools.chain(
            self.lease_requests.values(),
            self._batch_requests,
            self._probe_requests,
            self._evaluation_requests,
            self._watch_requests,
            self._fleet_requests,
        )

    # ---- coming and going

    def add_request(
        self, sender: bytes, number: bytes, request: m.WaitingRequest, user: str, now: float
    ) -> None:
        """Lets a request wait. Raises Refusal when the room or the client's share of it is full."""
        if self._num_waiting[sender] >= MAX_WAITERS_OF_CLIENT or self._num_waiting.total() >= MAX_WAITERS:
            raise Refusal(
                "too many requests",
                f"at most {MAX_WAITERS_OF_CLIENT} requests of a client, and {MAX_WAITERS} of all, "
                "may wait for an answer",
            )
        if isinstance(request, m.RequestLeases):
            self._take_back_lost(sender, number, request)
            # A generator has one request: another one takes its place.
            has_ended = self.end_lease_request(request.generator)
            if request.replaces and not has_ended:
                grant = self._announcer.make_lease_grant(request.generator, [])
                self._outbox.add_answer(sender, number, grant)
                return
        self._num_waiting[sender] += 1
        deadline = now + min(request.wait_s, MAX_WAIT_S)
        match request:
            case m.RequestLeases():
                waiter = Waiter(sender, number, request, deadline, user)
                self.lease_requests[request.generator] = waiter
            case m.RequestBatch():
                self._batch_requests.append(Waiter(sender, number, request, deadline, user))
            case m.RequestParityProbe():
                self._probe_requests.append(Waiter(sender, number, request, deadline, user))
            case m.AwaitEvaluations():
                self._evaluation_requests.append(Waiter(sender, number, request, deadline, user))
            case m.WatchRun():
                self._watch_requests.append(Waiter(sender, number, request, deadline, user))
            case m.WatchGenerators():
                self._fleet_requests.append(Waiter(sender, number, request, deadline, user))
            case _:
                assert_never(request)

    def _take_back_lost(self, sender: bytes, number: bytes, request: m.RequestLeases) -> None:
        """Takes back the leases that were given in an answer to this request, which is lost."""
        given = self._given.get(request.generator)
        if given is not None and given.are_lost(sender, number, request):
            del self._given[request.generator]
            for lease in given.leases:
                self._buffer.fail_lease(lease, 0, "its grant was lost on the way", revoked=True)

    def end_lease_request(self, generator: str) -> bool:
        """Answers a generator's request for leases with none: it has left, has begun a new life, or asks
        anew. Nobody waits for those leases, but somebody may listen still. Returns whether there was one."""
        if (waiter := self.lease_requests.pop(generator, None)) is None:
            return False
        self._answer_leases(waiter, [])
        return True

    def drop_requests(self, is_unwanted: Callable[[Waiter[Any]], bool]) -> None:
        """Takes out requests without an answer."""
        gone = {id(waiter): waiter for waiter in self if is_unwanted(waiter)}
        for waiter in gone.values():
            self._count_out(waiter)
        if gone:
            self.lease_requests = {
                name: one for name, one in self.lease_requests.items() if id(one) not in gone
            }
            self._batch_requests = [one for one in self._batch_requests if id(one) not in gone]
            self._probe_requests = [one for one in self._probe_requests if id(one) not in gone]
            self._evaluation_requests = [one for one in self._evaluation_requests if id(one) not in gone]
            self._watch_requests = [one for one in self._watch_requests if id(one) not in gone]
            self._fleet_requests = [one for one in self._fleet_requests if id(one) not in gone]

    def _count_out(self, waiter: Waiter[Any]) -> None:
        self._num_waiting[waiter.sender] -= 1
        if not self._num_waiting[waiter.sender]:
            del self._num_waiting[waiter.sender]

    # ---- answers

    def answer_ready_requests(self, now: float, *, look_at_deadlines: bool) -> None:
        """Answers every request that can be answered, and those whose deadline has come.

        `look_at_deadlines` is false in turns between two ticks: then requests for leases and those of fleets,
        of which there may be thousands, are not searched for overdue ones.
        """
        self._deal_leases()
        if look_at_deadlines:
            for name in [name for name, one in self.lease_requests.items() if now >= one.deadline]:
                self.end_lease_request(name)
            self._fleet_requests = [one for one in self._fleet_requests if not self._answer_fleet(one, now)]
        self._batch_requests = self._answer_queue(self._batch_requests, self._find_batch, now)
        self._probe_requests = self._answer_queue(self._probe_requests, self._find_probe, now)
        self._evaluation_requests = self._answer_queue(self._evaluation_requests, self._find_evaluations, now)
        self._watch_requests = [one for one in self._watch_requests if not self._answer_watcher(one, now)]

    def _answer_waiter(self, waiter: Waiter[Any], reply: m.Reply, payload: Sequence[bytes] = ()) -> None:
        """Answers a request. The caller takes it out of its queue."""
        self._count_out(waiter)
        self._outbox.add_answer(waiter.sender, waiter.number, reply, payload)

    def _answer_leases(self, waiter: Waiter[m.RequestLeases], leases: list[m.Lease]) -> None:
        self._answer_waiter(waiter, self._announcer.make_lease_grant(waiter.request.generator, leases))

    def _deal_leases(self) -> None:
        """Deals leases to all who wait for some. Those who get nothing wait on, in their order."""
        if self._buffer.stopping is not None:
            for name in list(self.lease_requests):
                self.end_lease_request(name)
        if not self.lease_requests or not (room := self._buffer.count_openings()):
            return
        # There may be a thousand who wait for weights, or for the next step: they are not tried one by one.
        oldest, evaluators = self._buffer.find_oldest_useful(), self._buffer.roles.evaluators

        def may_get_some(request: m.RequestLeases) -> bool:
            return request.version is None or request.version >= oldest or request.generator in evaluators

        def give_lease(request: m.RequestLeases, room: LeaseRoom) -> m.Lease | None:
            nonlocal oldest
            lease = self._buffer.lease_next(request.generator, room) if may_get_some(request) else None
            if lease is not None:
                oldest = self._buffer.find_oldest_useful()
            return lease

        waiters = [waiter for waiter in self.lease_requests.values() if may_get_some(waiter.request)]
        if not waiters:
            return
        requests = [waiter.request for waiter in waiters]
        hands = deal_leases(requests, room, self._buffer.samples_per_group, give_lease)
        for waiter, hand in zip(waiters, hands, strict=False):
            if hand:
                name, life = waiter.request.generator, waiter.request.life
                del self.lease_requests[name]
                self._answer_leases(waiter, hand)
                ids = [lease.id for lease in hand]
                self._given[name] = GivenLeases(waiter.sender, waiter.number, life, ids)
                self._given.move_to_end(name)
                while len(self._given) > MAX_WAITERS:
                    self._given.popitem(last=False)

    def _answer_queue(
        self, queue: list[Waiter[R]], find_answer: Callable[[R], Found | None], now: float
    ) -> list[Waiter[R]]:
        """Answers what can be answered, or says `NotReadyYet` at the deadline. Returns the requests that wait
        on."""
        left = []
        for waiter in queue:
            found = find_answer(waiter.request)
            if found is not None:
                self._answer_waiter(waiter, *found)
            elif now >= waiter.deadline:
                self._answer_waiter(waiter, m.NotReadyYet(waiting_for=self.describe_waits()))
            else:
                left.append(waiter)
        return left

    def _find_batch(self, request: m.RequestBatch) -> Found | None:
        try:
            handout = self._buffer.progress.hand_out(request.step)
        except (Refusal, IndexError) as refusal:
            return self._buffer.refuse_message("wrong step", str(refusal)), []
        # Ranks of another host may still fetch the step under way: all train it, or none does.
        is_begun = handout is not None and request.step == self._offered_step
        if self._buffer.stopping is not None and not is_begun:
            return m.RunStopped(reason=self._buffer.stopping), []
        if handout is None:
            return None
        self._offered_step = request.step
        offer = m.BatchOffer(
            step=request.step,
            groups=handout.groups,
            slices=self._buffer.progress.list_slices(handout),
            group_weights=handout.group_weights,
        )
        return offer, []

    def _find_probe(self, request: m.RequestParityProbe) -> Found | None:
        if self._buffer.stopping is not None:
            return m.RunStopped(reason=self._buffer.stopping), []
        rows = self._probes.find_rows(self._buffer.progress.manifest_locator)
        return None if rows is None else (m.ParityProbeRows(), [rows])

    def _find_evaluations(self, request: m.AwaitEvaluations) -> Found | None:
        is_done = self._buffer.stopping is not None or not self._buffer.evaluations.num_unanswered
        return (m.Acknowledged(), []) if is_done else None

    def _answer_watcher(self, waiter: Waiter[m.WatchRun], now: float) -> bool:
        """Sends the news if there are any or the deadline has come; returns whether it has."""
        progress, after = self._buffer.progress, waiter.request.after
        has_news = progress.step_records.count > after or now >= waiter.deadline
        if not has_news or self._outbox.is_full:
            return False
        records = progress.step_records.list_after(after, MAX_RECORDS_PER_NEWS)
        seen = waiter.request.after_evaluation
        evaluations = [one for one in self._buffer.evaluations.records if one.number > seen]
        news = m.RunNews(records=records, evaluations=evaluations, status=self.make_status())
        self._answer_waiter(waiter, news)
        return True

    def _answer_fleet(self, waiter: Waiter[m.WatchGenerators], now: float) -> bool:
        """Says how its generators are if the deadline has come or the run has ended; returns whether it
        has."""
        end = self._buffer.stopping
        if end is None and now < waiter.deadline:
            return False
        roles, names = self._buffer.roles, waiter.request.generators
        news = m.GeneratorNews(
            num_trained_steps=self._buffer.progress.next_step,
            end=end,
            versions=roles.find_versions(names),
            activities=roles.find_activities(names),
        )
        self._answer_waiter(waiter, news)
        return True

    # ---- words

    def make_status(self) -> RunStatus:
        return self._buffer.make_status(self.describe_waits())

    def describe_waits(self) -> str:
        """Says who waits for whom, in a sentence."""
        evaluators = self._buffer.roles.evaluators
        asking = [one.request for name, one in self.lease_requests.items() if name not in evaluators]
        return self._buffer.describe_waiting(
            learner_waits=bool(self._batch_requests or self._probe_requests),
            probes=bool(self._probe_requests),
            num_asking=sum(request.count > 0 for request in asking),
        )
