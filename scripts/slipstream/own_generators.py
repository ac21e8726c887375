"""The generators and evaluators that the driver of a run has started itself.

    start ──▶ join the run ──▶ generate ──▶ the run ends
      ▲                           │ told to leave (SIGTERM): hand in what is begun, and end
      └─ more (`scaling.py`) ◀────┘

A generator's number is never given twice, so nothing that is said of one that has left is taken for
another's.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from buffers.run_status import RunStatus
from configs.schema import Config
from slipstream.answers import FirstAnswers
from slipstream.ray_waits import is_ready
from slipstream.role_failures import RoleDied, RoleFailed, get_result
from slipstream.role_places import RolePlaces
from slipstream.run_network import RunNetwork

STARTING = ("loading", "verifying")
"""First words of a learner's activities before its first step."""
LOOK_EVERY_S = 5.0
"""Seconds after which the driver looks again which generators are lost with their nodes, and whether there is
room for others."""
LEAVE_S = 3.0
"""Seconds that a generator may take to leave once its grace is over; then its process is killed."""


class OwnGenerators:
    """Those that the run has started with, and those that were added since."""

    def __init__(
        self,
        config: Config,
        places: RolePlaces,
        network: RunNetwork,
        answers: FirstAnswers,
        say: Callable[[str], None],
    ) -> None:
        """Starts the processes of those that the configuration asks for: they import what they need while
        the buffer binds."""
        self._config, self._places, self._network, self._say = config, places, network, say
        self._address = ""
        self._ends: dict[Any, str] = {}
        """Result of each generator's `run` -> its name."""
        self._starts_after_learner: list[Callable[[], None]] = []
        """Starts of those that share a GPU with a rank. The rank loads first: both would take memory at the
        same time."""
        self._deadlines: dict[str, float] = {}
        """Time of the clock at which each generator that is to leave is killed."""
        self._next_numbers = {"generator": config.generators.count, "evaluator": config.eval.generators}
        self._num_started = 0
        self.training: list[str] = []
        """Names of those that train and are not to leave, the newest last."""
        self.evaluating: list[str] = []
        self.newcomers: dict[str, float] = {}
        """Those that were added and have not loaded a version yet -> time of the clock at which they were
        started, or last heard of. If one fails, the run goes on."""
        self.failure = ""
        """Why a newcomer has failed last."""
        self._num_lost = {"generator": 0, "evaluator": 0}
        """By kind, those that were lost with their nodes, and in whose places none has started yet."""
        self._looked_at = float("-inf")
        """Time of the clock at which lost ones were looked for."""
        self._actors = {name: places.start_generator(name) for name in config.engine_names}
        for name, actor in self._actors.items():
            answers.expect_answer(name, actor)

    @property
    def ends(self) -> list[Any]:
        """Results of `run` of all that have not ended."""
        return list(self._ends)

    @property
    def leaving(self) -> list[str]:
        return list(self._deadlines)

    @property
    def waits_for_learner(self) -> bool:
        """True while generators that share its GPU are not started yet."""
        return bool(self._starts_after_learner)

    def join_run(self, address: str) -> None:
        """Starts those that the configuration asks for. `address` is the buffer's."""
        self._address = address
        for number, (name, actor) in enumerate(self._actors.items()):
            evaluates = number >= self._config.generators.count
            (self.evaluating if evaluates else self.training).append(name)
            start = partial(self._start, name, actor, evaluates)
            # Ranks name their GPUs once their processes are there, which may take long.
            if self._places.is_beside_rank(name):
                self._starts_after_learner.append(start)
            else:
                start()

    def _start(self, name: str, actor: Any, evaluates: bool) -> None:
        seed = self._config.run.seed + 1000 + self._num_started
        self._num_started += 1
        keys, place = self._network.keys.find_folder(name), self._places.find_place(name)
        address = self._network.reach_buffer(self._address)
        end = actor.run.remote(address, name, seed, keys, place, evaluates)
        self._ends[end] = name

    def start_beside_learner(self, status: RunStatus) -> None:
        """Starts those that share its GPU, once the learner has loaded; until its first batch it waits for no
        generator."""
        if self._starts_after_learner and has_learner_begun(status):
            self._say("the learner has loaded: the generators that share its GPU start")
            while self._starts_after_learner:
                self._starts_after_learner.pop(0)()

    # ---- more and fewer

    def add(self, number: int) -> None:
        """Starts so many more for training. Raises ValueError, with the arithmetic, or
        RoleFailed where they have no room, and Interrupted."""
        for name in self._start_more("generator", number):
            self.newcomers[name] = time.monotonic()

    def _start_more(self, kind: str, number: int) -> list[str]:
        """Starts so many more of a kind, `generator` or `evaluator`, as `add` does; returns their names."""
        names = [f"{kind}-{self._next_numbers[kind] + more}" for more in range(number)]
        self._places.add_seats(names, on_all_nodes=self._network.reaches_all_nodes)
        self._next_numbers[kind] += number
        try:
            for name in names:
                self._network.keys.find_folder(name)  # a node that does not answer is found now
        except RoleFailed:
            for name in names:
                self._places.give_back_seat(name)
            raise
        for name in names:
            self._start(name, self._places.start_generator(name), evaluates=kind == "evaluator")
        (self.evaluating if kind == "evaluator" else self.training).extend(names)
        return names

    def let_newest_leave(self, number: int) -> None:
        """Asks so many of those that train to leave, the newest first."""
        for name in self.training[::-1][:number]:
            self.training.remove(name)
            self._deadlines[name] = time.monotonic() + self._config.generators.grace_s + LEAVE_S
            self._places.ask_to_leave(name)

    def note_versions(self, status: RunStatus) -> None:
        """Learns which newcomers generate, and when the others were heard of."""
        for name in list(self.newcomers):
            if (report := status.generators.get(name)) is not None and report.version >= 0:
                del self.newcomers[name]
            elif (role := status.roles.get(name)) is not None:
                self.newcomers[name] = time.monotonic() - role.last_heard_s

    def collect_ended(self, is_stopping: bool) -> list[str]:
        """Forgets the generators that have ended, and ends those that were to leave and have not. Returns all
        of them: one that was interrupted may not have said so itself.

        Raises RoleFailed for one that has ended otherwise. A newcomer that fails is given up instead.
        """
        now, ended = time.monotonic(), []
        if now - self._looked_at > LOOK_EVERY_S and not is_stopping:
            self._looked_at = now
            ended = self._lose_with_nodes()
            self._replace_lost()
            for name in self.leaving:
                self._places.ask_to_leave(name)  # again: Ray may have started it anew meanwhile
        for end, name in list(self._ends.items()):
            has_ended, is_late = is_ready(end), now > self._deadlines.get(name, now)
            if has_ended:
                self._check_end(end, name, is_stopping)
            if has_ended or is_late:
                self._drop(end, name)
                ended.append(name)
        return ended

    def _check_end(self, end: Any, name: str, is_stopping: bool) -> None:
        """Raises RoleFailed for a generator that has ended and may not."""
        try:
            has_left = get_result(end, name, self._places.read_log_end)
        except RoleFailed as error:
            if name in self.newcomers:
                self.failure = str(error)
            elif (
                isinstance(error, RoleDied)  # who has told an error was heard
                and name in [*self.training, *self.evaluating]
                and self._places.is_out_of_reach(name)
            ):
                self._note_lost(name)
            elif name not in self._deadlines:
                raise
            return
        if not has_left and not is_stopping:
            raise RoleFailed(f"{name} ended before the learner did")
        if has_left and name in self.evaluating and not is_stopping:
            self._num_lost["evaluator"] += 1
            self._say(f"{name} was told to leave (SIGTERM): another starts in its place")
        elif has_left and name not in self._deadlines:
            self._say(f"{name} was told to leave (SIGTERM): the run goes on without it")

    # ---- lost with their nodes

    def _lose_with_nodes(self) -> list[str]:
        """Gives up the generators whose nodes Ray has given up, and returns their names. Ray would start them
        on the same node only, and a node that comes back is another one to Ray."""
        gone = set(self._places.find_lost_engines()).intersection([*self.training, *self.evaluating])
        ends = [(end, name) for end, name in self._ends.items() if name in gone]
        for end, name in ends:
            self._note_lost(name)
            self._drop(end, name)
        return [name for _, name in ends]

    def _note_lost(self, name: str) -> None:
        self._num_lost["evaluator" if name in self.evaluating else "generator"] += 1
        node = self._places.find_node(name)
        self._say(f"{name} is lost with {node}: another starts as soon as a node has room")

    def _replace_lost(self) -> None:
        """Starts others in the places of those that are lost, as far as there is room now. Raises
        Interrupted."""
        for kind in self._num_lost:
            while self._num_lost[kind]:
                try:
                    (name,) = self._start_more(kind, 1)
                except (ValueError, RoleFailed):
                    return
                self._num_lost[kind] -= 1
                self._say(f"{name} starts on {self._places.find_node(name)}")

    def forget_lost(self) -> None:
        """Starts no others in the places of those that train and are lost: an order says how many there are
        to be."""
        self._num_lost["generator"] = 0

    def _drop(self, end: Any, name: str) -> None:
        """Forgets a generator that has ended, or is given up."""
        del self._ends[end]
        self._deadlines.pop(name, None)
        self.newcomers.pop(name, None)
        for names in (self.training, self.evaluating):
            if name in names:
                names.remove(name)
        self._places.end_generator(name)

    def give_up(self, name: str, why: str) -> None:
        """Ends a newcomer that does not come up."""
        (end,) = [end for end, named in self._ends.items() if named == name]
        self.failure = why
        self._drop(end, name)


def has_learner_begun(status: RunStatus) -> bool:
    """True when the learner of this life is past its start, and may hold steps that are in no checkpoint."""
    learner = status.roles.get("learner-0")
    return status.version >= 0 and learner is not None and not learner.activity.startswith(STARTING)
