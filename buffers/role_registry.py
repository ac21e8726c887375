"""The roles of a run as their heartbeats describe them: who is heard of, what each does, and totals over all
generators."""

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec

from buffers import messages as m
from buffers.heartbeat import HEARTBEAT_S
from buffers.run_status import GeneratorReport, RoleState

SILENT_S = 3 * HEARTBEAT_S
"""The status names a role that has not been heard of for longer."""
LONG_S = 1.0
"""The status names an activity that goes on for longer, unless it is waiting or sampling."""
MAX_NAMED = 4
"""Roles that a sentence of the status names."""
GONE_S = 10.0
"""A role that has not been heard of for longer is not at work, whatever it said last."""
FORGOTTEN_S = 600.0
"""A generator that has left, or has not been heard of, for longer is in the status no more, because thousands
of hosts may come and go in a week. Its totals stay."""
ASLEEP = "asleep: the learner has the GPU"
"""Activity of a generator that shares its GPU with the learner, while it is the learner's turn."""
JOINED, STARTING = "joined", "starting the engine"
"""Activities of a generator that is not ready yet: it has sent nothing since it joined, or its engine
starts."""
AWAITING_START = f"{STARTING}: {ASLEEP}"
"""Activity of a generator whose engine starts as soon as the learner's turn is over."""
IDLE_ACTIVITIES = ("waiting", "sampling", ASLEEP, AWAITING_START)
"""Beginnings of activities that are no work of their own. Sampled tokens are counted instead."""
FETCHING = FETCHING_MODEL, FETCHING_ROWS = "fetching the model's files", "fetching rows"
"""Beginnings of activities before that, on a host that lacks them."""
UNREADY = (JOINED, STARTING, *FETCHING)
MAX_GENERATORS = 4000
"""Names kept. Beyond it, the generator that has been silent for longest counts as ended."""
MAX_ROLES = 2 * MAX_GENERATORS
"""Roles kept, the learner's ranks among them."""
MAX_SUM = 2**62
"""Sums stop here, because an answer holds 64 bits."""


@dataclass(frozen=True, slots=True)
class LastHeartbeat:
    """The last heartbeat of a role. Times are seconds on the buffer's clock."""

    at: float
    activity: str
    since: float
    """When the activity began."""
    moved_at: float
    """When the role last got on with it."""


class RoleRegistry:
    """Keeps the last heartbeat of each role, and the totals of each generator's life.

    A generator has one life after another under its name. The totals of lives that are over are kept as one
    sum, so that memory stays bounded however many generators come and go.
    """

    def __init__(self, num_expected: int = 0, milestones: dict[str, float] | None = None) -> None:
        """`num_expected`: how many generators the run starts itself. `milestones`: where to note when their
        engines run (`RunStatus.milestones`)."""
        self._num_expected, self._milestones = num_expected, {} if milestones is None else milestones
        self.num_wanted = num_expected
        """How many there are to be now: `scripts/scale.sh` changes the number."""
        self._ready: set[str] = set()
        """The first `num_expected` generators whose engines ran."""
        self.evaluators: set[str] = set()
        """Generators that evaluate alone, in their present or last life."""
        self._lives: OrderedDict[str, GeneratorReport] = OrderedDict()
        """Latest report of each generator's present life. The generator that reported last is last."""
        self._ended_totals = GeneratorReport()
        """Sum over all lives that are over."""
        self._presumed_ended: OrderedDict[str, GeneratorReport] = OrderedDict()
        """Parts of that sum whose generators were only silent for long. They are subtracted if a generator
        goes on."""
        self._heartbeats: OrderedDict[str, LastHeartbeat] = OrderedDict()
        """By role. The role that was heard last is last."""
        self._left: OrderedDict[str, float] = OrderedDict()
        """Generators that have left, and when. Their last heartbeats travel over another connection than
        their farewell and may come after it."""

    def begin_life(self, generator: str, now: float, *, evaluates: bool = False) -> None:
        """A generator has joined."""
        self._end_life(generator)
        if evaluates:
            self.evaluators.add(generator)
        self._presumed_ended.pop(generator, None)
        self._start_counting(generator)
        self._left.pop(generator, None)
        self.note_role(generator, m.RoleHeartbeat(role=generator, activity=JOINED), now)

    def note_generator(self, beat: m.GeneratorHeartbeat, now: float) -> bool:
        """Notes a generator's heartbeat; returns whether its engine has sampled since the one before."""
        generator = beat.generator
        self.note_role(generator, beat, now)
        if generator not in self._lives:
            self._start_counting(generator)
        if beat.evaluates:
            self.evaluators.add(generator)
        has_sampled = beat.report.decoded_tokens != self._lives[generator].decoded_tokens
        self._lives[generator] = beat.report
        self._lives.move_to_end(generator)
        is_ready = not beat.activity.startswith(UNREADY) and generator not in self._ready
        if is_ready and len(self._ready) < self._num_expected:
            self._ready.add(generator)
            self._milestones["engines"] = time.time()
        return has_sampled

    def note_role(self, role: str, beat: m.GeneratorHeartbeat | m.RoleHeartbeat, now: float) -> None:
        """Notes the heartbeat of any role, which has come at `now`."""
        if role in self._left:
            return
        self._heartbeats[role] = LastHeartbeat(
            now, beat.activity, now - beat.activity_s, now - beat.standstill_s
        )
        self._heartbeats.move_to_end(role)
        while len(self._heartbeats) > MAX_ROLES:
            self._heartbeats.popitem(last=False)

    def remove_generator(self, generator: str, now: float) -> None:
        """A generator has left. It is not heard of again before it joins again."""
        self.remove_role(generator)
        self._left.pop(generator, None)
        self._left[generator] = now
        while len(self._left) > MAX_GENERATORS:
            self._left.popitem(last=False)

    def forget_generators(self, now: float) -> None:
        """Forgets the generators that have left, or have not been heard of, for `FORGOTTEN_S`."""
        left = takewhile(lambda item: now - item[1] > FORGOTTEN_S, self._left.items())
        silent = takewhile(lambda item: now - item[1].at > FORGOTTEN_S, self._heartbeats.items())
        # A rank of the learner stays: the run waits for it.
        for name in [name for name, _ in (*left, *silent) if name in self._lives]:
            self._presume_ended(name)

    def readmit_generator(self, generator: str) -> None:
        """A generator says that it has not left: its life goes on."""
        self._left.pop(generator, None)

    def has_left(self, generator: str) -> bool:
        """True for a generator that has left, and has not joined again since."""
        return generator in self._left

    def remove_role(self, role: str) -> None:
        """A role has ended in good order."""
        self._heartbeats.pop(role, None)

    def make_role_states(self, now: float) -> dict[str, RoleState]:
        """Returns the state of each role that has not left, by name in alphabetical order."""
        return {
            role: RoleState(last_heard_s=now - beat.at, activity=beat.activity, activity_s=now - beat.since)
            for role, beat in sorted(self._heartbeats.items())
        }

    def find_versions(self, generators: Iterable[str]) -> dict[str, int]:
        """Returns the version that each of these generators holds; without those that are not known."""
        return {name: self._lives[name].version for name in generators if name in self._lives}

    def find_activities(self, generators: Iterable[str]) -> dict[str, str]:
        """Returns what each of these generators does; without those that have left."""
        return {name: self._heartbeats[name].activity for name in generators if name in self._heartbeats}

    def is_at_work(self, now: float, stalled_s: float) -> bool:
        """True when a role that is heard of does something that others wait for, and has got on with it
        within `stalled_s` seconds."""
        return any(
            now - beat.at <= GONE_S
            and now - beat.moved_at <= stalled_s
            and not beat.activity.startswith(IDLE_ACTIVITIES)
            for beat in self._heartbeats.values()
        )

    # ---- totals

    def _start_counting(self, generator: str) -> None:
        self._lives[generator] = GeneratorReport()
        if (counted := self._presumed_ended.pop(generator, None)) is not None:
            self._add_totals(counted, -1)  # it goes on, and its next report holds these totals again
        while len(self._lives) > MAX_GENERATORS:
            self._presume_ended(next(iter(self._lives)))

    def _presume_ended(self, generator: str) -> None:
        """A generator is forgotten. It is counted on if it goes on after all."""
        self._presumed_ended[generator] = self._lives[generator]
        self._end_life(generator)
        self._left.pop(generator, None)
        self._heartbeats.pop(generator, None)
        while len(self._presumed_ended) > 10 * MAX_GENERATORS:
            self._presumed_ended.popitem(last=False)

    def _end_life(self, generator: str) -> None:
        report = self._lives.pop(generator, None)
        if report is not None and generator in self.evaluators:
            # It was idle between evaluations, as it should be.
            report = msgspec.structs.replace(report, idle_s=0.0, alive_s=0.0)
        self.evaluators.discard(generator)
        if report is not None:
            self._add_totals(report, 1)

    def _add_totals(self, report: GeneratorReport, times: int) -> None:
        totals = msgspec.structs.asdict(self._ended_totals)
        del totals["version"]  # the only field that is no total
        sums = {name: total + times * getattr(report, name) for name, total in totals.items()}
        self._ended_totals = GeneratorReport(
            **{name: max(0, min(MAX_SUM, total)) for name, total in sums.items()}
        )

    def summarize(self, now: float) -> dict[str, Any]:
        """Returns those fields of `RunStatus` that describe the roles."""
        lives = [self._ended_totals, *self._lives.values()]
        training = [life for name, life in self._lives.items() if name not in self.evaluators]
        training.append(self._ended_totals)
        alive_s = sum(life.alive_s for life in training)
        num_updates = sum(life.updates for life in lives)
        return {
            "generators": dict(sorted(self._lives.items())),
            "roles": self.make_role_states(now),
            "evaluators": sorted(self.evaluators),
            "generator_idle_share": sum(life.idle_s for life in training) / alive_s if alive_s else 0.0,
            "weight_updates": num_updates,
            "weight_bytes": sum(life.update_bytes for life in lives),
            "fetched_bytes": sum(life.fetched_bytes for life in lives),
            "prepare_s_mean": sum(life.prepare_s for life in lives) / max(1, num_updates),
            "pause_s_mean": sum(life.pause_s for life in lives) / max(1, num_updates),
            "digest_checks": sum(life.digest_checks for life in lives),
            "digest_mismatches": sum(life.digest_mismatches for life in lives),
            "abandoned_scores": sum(life.abandoned_scores for life in lives),
            "discarded_tokens": sum(life.discarded_tokens for life in lives),
        }

    # ---- words

    def describe_starts(self, now: float) -> str:
        """Says how many generators are ready; empty once all that are here are."""
        states = [state for name, state in self.make_role_states(now).items() if name in self._lives]
        starting = [state for state in states if state.activity == STARTING]
        joined = [state for state in states if state.activity == JOINED]
        num_asleep = sum(state.activity == AWAITING_START for state in states)
        num_ready = sum(not state.activity.startswith(UNREADY) for state in states)
        if states and num_ready == len(states):
            return ""
        fetching = len(states) - num_ready - len(starting) - len(joined) - num_asleep
        num_total = max(self.num_wanted, len(states))
        words = [f"{num_ready} of {num_total} generators ready"]
        if starting:
            longest_s = max(state.activity_s for state in starting)
            words.append(f"{len(starting)} {STARTING} for {longest_s:.0f} s")
        if num_asleep:
            words.append(f"{num_asleep} {ASLEEP}")
        if fetching:
            words.append(f"{fetching} fetching files of the run")
        if joined:
            words.append(f"{len(joined)} {JOINED}")
        if num_total > len(states):
            words.append(f"{num_total - len(states)} not here yet")
        return ", ".join(words)

    def describe_lag(self, version: int) -> str:
        """Says that no generator has taken up a version yet, and which each holds; empty when one has."""
        held = {name: life.version for name, life in self._lives.items() if name not in self.evaluators}
        held = {name: version for name, version in held.items() if name in self._heartbeats}
        if not held or max(held.values()) >= version:
            return ""
        words = [f"{name} holds {number if number >= 0 else 'none'}" for name, number in sorted(held.items())]
        return f"no generator has taken up version {version}: {name_some(words)}"

    def describe_long_waits(self, now: float, told: str = "waiting") -> str:
        """As the function `describe_long_waits`, for all roles."""
        return describe_long_waits(self.make_role_states(now), told)


def describe_long_waits(states: dict[str, RoleState], told: str = "waiting") -> str:
    """Names the roles that have not been heard of and those that have been at one activity for long; empty
    for none.

    `told` is an activity that the reader has been told of already.
    """
    silent = {name: state for name, state in states.items() if state.last_heard_s > SILENT_S}
    busy = {
        name: state
        for name, state in states.items()
        if name not in silent
        and state.activity_s > LONG_S
        and not state.activity.startswith((*IDLE_ACTIVITIES, told))
    }
    words = [
        f"{name}: not heard of for {state.last_heard_s:.0f} s (then: {state.activity})"
        for name, state in sorted(silent.items(), key=lambda item: item[1].last_heard_s)
    ] + [
        f"{name}: {state.activity} for {state.activity_s:.0f} s"
        for name, state in sorted(busy.items(), key=lambda item: -item[1].activity_s)
    ]
    return name_some(words, "; ")


def name_some(names: Sequence[str], separator: str = ", ", most: int = MAX_NAMED) -> str:
    """Joins the first few names, and says how many more there are."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return separator.join([*names[:most], *more])
