"""Generators that join a run which another command has started, on this host or another
(`role=generators`)."""

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, KeysRefused, RefusedByBuffer
from buffers.driver_messages import RUN_OVER
from buffers.role_registry import FETCHING
from configs.schema import Config
from slipstream.answers import FirstAnswers, check_this_node
from slipstream.buffer_silence import BufferSilence
from slipstream.cluster import run_cluster
from slipstream.farewell import say_farewell
from slipstream.ray_waits import wait_for_results
from slipstream.role_failures import RoleDied, RoleFailed, get_result
from slipstream.role_logs import show_stacks_of_driver
from slipstream.role_places import RolePlaces
from slipstream.run_network import NodeKeys
from slipstream.stop_signals import KILLED, Interrupted, StopSignals
from sync.folders import SHARED_MEMORY, sweep_folders

LOOK_EVERY_S = 1.0
"""Seconds after which a fleet looks again whether its generators live."""
SETTLE_S = 1.0
"""Seconds before generators are asked to leave. A signal to all processes of a job ends Ray's too, and a
question to Ray would wait for minutes then."""
ASK_EVERY_S = 5.0
"""Seconds after which a generator is asked to leave once more."""
MAX_WAIT_S = 60.0
"""Seconds for which the buffer lets a request wait at most."""
NEWS_EVERY_S = 3.0
"""Seconds after which the buffer tells its news again, unless the run ends before."""
TELL_EVERY_S = 10.0
"""Seconds between two lines about files that this host fetches."""
LEAVE_S = 3.0
"""Seconds that generators have to leave when the run is over, or their grace is; then they are killed with
the cluster."""


class FleetWatch:
    """Asks the buffer for news of a fleet over and over, and says when it does not answer."""

    def __init__(self, client: BufferClient, generators: Sequence[str], say: Callable[[str], None]) -> None:
        """Asks at once, so that an end of the run is known that comes before anybody waits for news. `say`
        prints a line."""
        self._client, self._generators = client, list(generators)
        self._silence = BufferSilence(client.address, say, "the generators keep their engines, and ask again")
        self._ask(MAX_WAIT_S)
        self._asked: int | None = None
        """Number of the last request that has no answer yet."""
        self._asked_at = 0.0

    def wait_for_news(self, wait_s: float) -> m.GeneratorNews | None:
        """Returns the next news, which come at once when the run ends; None when none have come within
        `wait_s`. Raises RefusedByBuffer, KeysRefused."""
        if self._asked is None:
            self._asked, self._asked_at = self._ask(NEWS_EVERY_S), time.monotonic()
        found = None
        for answer in self._client.receive_answers(wait_s):
            self._silence.note_answer()
            self._asked = None if answer.number == self._asked else self._asked
            if isinstance(answer.reply, m.RefusedRequest):
                raise RefusedByBuffer(answer.reply.reason)
            if isinstance(answer.reply, m.Acknowledged):  # a farewell has arrived
                continue
            assert isinstance(answer.reply, m.GeneratorNews), answer.reply
            found = answer.reply
        if found is None and self._silence.note_silence(time.monotonic() - self._asked_at):
            # Once more: a buffer that has taken this command's key back drops requests that wait, and refuses
            # further ones.
            self._asked = None
        return found

    def wait_for_end(self, wait_s: float) -> m.GeneratorNews | None:
        """Returns the news that say how the run has ended; None when none have come within `wait_s`. Raises
        as `wait_for_news`."""
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            if (news := self.wait_for_news(left_s)) is not None and news.end is not None:
                return news
        return None

    def say_left(self, generator: str) -> None:
        """Tells the buffer that a generator is gone: others may take its leases at once."""
        self._client.send_request(m.LeaveRun(generator=generator))

    def _ask(self, wait_s: float) -> int:
        return self._client.send_request(m.WatchGenerators(generators=self._generators, wait_s=wait_s))


class GeneratorFleet:
    """The generators of one command, from their start until they leave the run."""

    def __init__(self, config: Config, signals: StopSignals) -> None:
        self._config, self._signals = config, signals
        # Containers may share their host's name, and the numbers of their processes.
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._prefix = f"{name}-"
        self._names = [f"{self._prefix}{engine}" for engine in config.engine_names]
        self._logs = Path(config.run.outputs).resolve() / f"fleet-{name}" / "logs"
        self._say = partial(print, flush=True)
        self._answers = FirstAnswers(self._say, signals)
        self._joined: set[str] = set()
        self._told_at = float("-inf")
        """When the console last said how far the files of the run have come."""

    def drive(self) -> int:
        """Consumes the buffer's news; produces lines about generators that have joined.

        Waits for the generators. Ends when the run does, or when the user asks for it; returns the exit
        status. Raises ValueError when no buffer answers at `buffer.address`, and Interrupted.
        """
        address = self._config.buffer.address
        client = BufferClient(address, timeout_s=10.0, keys=self._config.buffer.keys)
        try:
            news = self._fetch_first_news(client)
        except (BufferGone, RefusedByBuffer) as error:
            raise ValueError(f"buffer.address must be a running buffer's, got {address}: {error}") from error
        if news.end is not None:
            return self._tell_end(news)
        self._say(f"{address} is at step {news.num_trained_steps}; starting {len(self._names)} generators")
        show_stacks_of_driver(self._logs)
        try:
            watch = FleetWatch(client, self._names, self._say)
            # The generators end with their cluster: others may take their leases at once then.
            with (
                say_farewell(address, self._config.buffer.keys, self._names),
                run_cluster(self._config),
            ):
                places = RolePlaces(self._config, self._logs, self._signals, self._say, self._prefix)
                try:
                    return self._watch_generators(watch, places, self._launch_generators(places))
                finally:
                    places.end_roles()
        except (RoleFailed, KeysRefused, RefusedByBuffer) as error:
            print(f"{error}\nLogs: {self._logs}", file=sys.stderr)
            return 1
        finally:
            client.close()
            # A generator that was killed while it fetched leaves its host's folder.
            sweep_folders(SHARED_MEMORY)

    def _fetch_first_news(self, client: BufferClient) -> m.GeneratorNews:
        with self._signals.interruptible():
            return client.call(m.WatchGenerators(generators=[], wait_s=0.0), m.GeneratorNews)

    def _launch_generators(self, places: RolePlaces) -> dict[Any, str]:
        """Returns the result of each generator's `run` -> its name."""
        ends = {}
        keys_of_nodes = NodeKeys(self._config.buffer.keys, self._logs.parent, places)
        for number, name in enumerate(self._names):
            seed, place = xxhash.xxh32_intdigest(name.encode()), places.find_place(name)
            role = places.start_generator(name)
            self._answers.expect_answer(name, role)
            evaluates = number >= self._config.generators.count
            address, keys = self._config.buffer.address, keys_of_nodes.find_folder(name)
            end = role.run.remote(address, name, seed, keys, place, evaluates)
            ends[end] = name
        return ends

    def _watch_generators(self, watch: FleetWatch, places: RolePlaces, ends: dict[Any, str]) -> int:
        """Returns the exit status once all generators have ended, the run has, or the user has asked to
        stop."""
        while ends and not self._signals.received:
            with self._signals.interruptible():
                news = watch.wait_for_news(LOOK_EVERY_S)
            is_over = news is not None and news.end is not None
            if is_over or self._collect_ended(watch, places, ends):
                if news is None or news.end is None:  # the generators have heard it first
                    news = watch.wait_for_end(LEAVE_S)
                # Those that have joined hear it too; those that still start an engine need not finish that.
                wait_for_results(list(ends), len(ends), LEAVE_S, self._signals)
                return self._tell_end(news)
            self._answers.check_silent_roles()
            if news is not None:
                self._note_joined(news.versions)
                self._tell_fetching(news.activities)
        if self._signals.received == signal.SIGTERM.name and self._config.generators.grace_s:
            self._drain_generators(places, ends)
        self._say(f"{self._signals.received or 'all told to leave'}: the generators have left")
        return KILLED

    def _collect_ended(self, watch: FleetWatch, places: RolePlaces, ends: dict[Any, str]) -> bool:
        """Forgets the generators that have left, or are lost with their nodes. Returns True once one has
        ended because the run has.

        Raises RoleFailed for one that has failed, and when the last one is lost.
        """
        spans_nodes, has_ended = self._config.cluster.address is not None, False
        # Ray would start them on the same node only, and a node that comes back is another one to Ray.
        lost = set(places.find_lost_engines()) if spans_nodes else set[str]()
        for end in wait_for_results(list(ends), 1, 0.0, self._signals):
            if (name := ends[end]) in lost:
                continue
            try:
                has_left = get_result(end, name, places.read_log_end)
            except RoleDied:  # one that has told an error was heard
                if not (spans_nodes and places.is_out_of_reach(name)):
                    raise
                lost.add(name)
                continue
            if has_left:
                self._say(f"{name} was told to leave (SIGTERM), and has left")
                places.end_generator(ends.pop(end))
            else:
                has_ended = True
        for end, name in [(end, name) for end, name in ends.items() if name in lost]:
            node = places.find_node(name)
            watch.say_left(name)
            places.end_generator(ends.pop(end))
            if not ends:
                raise RoleFailed(f"{name} is lost with {node}, and no generator is left")
            self._say(f"{name} is lost with {node}: the others go on")
        return has_ended

    def _drain_generators(self, places: RolePlaces, ends: Mapping[Any, str]) -> None:
        """Lets the generators hand in what they have begun, until a second signal."""
        grace_s = self._config.generators.grace_s
        self._say(
            f"SIGTERM: the generators hand in the groups that they have begun, within {grace_s:g} s "
            "(again: at once)"
        )
        deadline, left, wait_s = time.monotonic() + SETTLE_S + grace_s + LEAVE_S, dict(ends), SETTLE_S
        try:
            while wait_s > 0:
                for end in wait_for_results(list(left), len(left), wait_s, self._signals):
                    del left[end]
                check_this_node()
                for name in left.values():
                    places.ask_to_leave(name)  # again: Ray may have started it anew meanwhile
                wait_s = min(ASK_EVERY_S, deadline - time.monotonic()) if left else 0.0
        except Interrupted:
            self._say("a second signal: the generators leave at once")
        except RoleFailed as failed:
            self._say(f"{failed}: the generators leave at once")

    def _note_joined(self, versions: Mapping[str, int]) -> None:
        for name, version in versions.items():
            if name not in self._joined and version >= 0:
                self._joined.add(name)
                self._say(f"{name} generates with version {version}")

    def _tell_fetching(self, activities: Mapping[str, str]) -> None:
        """Says how far this host has come with files of the run that it lacks. One generator fetches for
        all."""
        fetching = [one for one in activities.values() if one.startswith(FETCHING)]
        if fetching and time.monotonic() - self._told_at > TELL_EVERY_S:
            self._told_at = time.monotonic()
            self._say(next((one for one in fetching if one.endswith("%")), fetching[0]))

    def _tell_end(self, news: m.GeneratorNews | None) -> int:
        """Says how the run has ended. Returns the exit status, by which whoever started this command knows
        whether the run may go on."""
        end = "its buffer is gone" if news is None else news.end
        if end == RUN_OVER:
            self._say(RUN_OVER)
            return 0
        self._say(f"the run has ended before its last step ({end}): start this again when it is resumed")
        return 1
