"""New versions on their way into a generator's engine.

    announced ──▶ fetched and verified, in a thread, while the engine samples
                    └─▶ loaded between two steps of the engine ──▶ the thread prepares for the next version

A version that cannot be had leaves the one before in service. A version that is not what was published is
fetched again once, and the one before serves meanwhile, unless the engine has lost it; a second mismatch
ends the generator.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from buffers.heartbeat import HEARTBEAT_S, HeartbeatThread
from buffers.run_status import GeneratorReport
from buffers.timeline import Track
from configs.schema import Config
from generators.engine import Engine
from sync.manifest import DigestMismatch, EngineMismatch, Manifest
from sync.subscriber import Subscriber
from sync.weight_source import WeightSource

log = logging.getLogger("slipstream.generator")

WAIT_S = 0.05
"""Seconds that an idle engine's loop waits for weights before it looks at anything else."""
RETRY_S, MAX_RETRY_S = 0.5, 10.0
"""Seconds until a version that could not be had is asked for again: at first, and at most. Each failure
doubles them."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """A version that the preparing thread fetches and verifies."""

    version: int
    manifest_locator: str
    source: "Future[WeightSource]"
    is_again: bool = False
    """True when what came at first was not what was published."""


class WeightUpdates:
    """Follows the announced versions, and loads the newest one into the engine.

    All methods belong to the generator's loop. The subscriber belongs to the preparing thread.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        subscriber: Subscriber,
        heart: HeartbeatThread,
        totals: GeneratorReport,
        clock: Callable[[], float],
    ) -> None:
        """`totals` is where updates, bytes, seconds and digests are counted."""
        self._in_flight, self._engine, self._subscriber = config.sync.in_flight, engine, subscriber
        self._heart, self._totals, self._clock = heart, totals, clock
        self._newest_version, self._newest_locator = -1, ""
        self._newest_number = 0
        """Number of the publication or rewind that announced the newest version."""
        self._missing_locator, self._num_failures, self._retry_at = "", 0, 0.0
        """The version that could not be had, how often, and when it is asked for again."""
        self._preparing_thread = ThreadPoolExecutor(1, "weights")
        self._preparation: Preparation | None = None
        self._seen_bytes = 0
        """Bytes that had been fetched when `describe_fetching` was last called."""
        self._lost_version = -1
        """Version whose weights the engine has lost in its sleep."""
        self.held_locator = ""
        """Manifest locator of the version that the engine holds; empty before the first."""

    @property
    def held_version(self) -> int:
        """Version that the engine holds, or has held until it slept; -1 before the first."""
        return self._lost_version if self._engine.version is None else self._engine.version

    @property
    def held_life(self) -> str:
        return parse_life(self.held_locator)

    @property
    def is_fetching(self) -> bool:
        return self._preparation is not None and not self.is_current

    @property
    def waits_for_idle_engine(self) -> bool:
        """True when a newer version is here that may only be loaded once the engine has finished all samples.
        One that is still on its way keeps nobody waiting, however slow the link is."""
        preparation = self._preparation
        is_here = preparation is not None and preparation.source.done()
        return is_here and not self._in_flight and not self.is_current

    @property
    def _is_missing(self) -> bool:
        """True while the announced version could not be had, and is not asked for again yet."""
        return self._newest_locator == self._missing_locator and self._clock() < self._retry_at

    @property
    def is_current(self) -> bool:
        """True when the engine holds the version that the buffer has announced."""
        return self._newest_locator == self.held_locator

    def note_announcement(self, version: int, manifest_locator: str, number: int) -> None:
        """Notes what the buffer says is newest. `number` counts publications and rewinds.

        The buffer answers over two connections, so an older answer may be read after a newer one: it is
        passed over. A version alone does not tell which answer is newer, because a rewind makes it a lower
        one.
        """
        if version >= 0 and number >= self._newest_number:
            self._newest_version, self._newest_locator = version, manifest_locator
            self._newest_number = number

    def describe_fetching(self) -> tuple[str, bool]:
        """Returns what is fetched, and whether bytes have come in since the last call."""
        before, self._seen_bytes = self._seen_bytes, self._subscriber.fetched_bytes
        version = self._newest_version if self._preparation is None else self._preparation.version
        return f"fetching version {version}", before != self._seen_bytes

    def note_lost_weights(self, version: int) -> None:
        """The engine has lost the weights of this version in its sleep: it needs a version, were it the same.
        To the buffer it still is one that holds it: it follows the learner."""
        self.held_locator, self._lost_version = "", version

    def update_engine(self, *, may_load: bool = True) -> int | None:
        """Loads the newest version if it is prepared; returns its number, or None when nothing was loaded.
        `may_load=False`: the engine sleeps, and the version is only fetched.

        With `sync.in_flight=false` it waits until the engine has finished all samples. Raises DigestMismatch
        when a version mismatches twice, and whatever else preparing or loading raises.
        """
        is_busy = self._engine.num_unfinished > 0
        if self.is_current or self._is_missing:
            return None
        self._preparation = preparation = self._choose_preparation(self._newest_locator)
        if not may_load:
            return None
        if not preparation.source.done() and not is_busy:
            wait([preparation.source], WAIT_S)
        if not preparation.source.done():
            return None
        if is_busy and not self._in_flight and preparation.source.exception() is None:
            return None
        self._preparation = None
        try:
            manifest = self._load_or_fetch_again(preparation)
            if manifest is None:
                return None
        except FileNotFoundError as error:
            # A newer version has replaced it, or it cannot be had for now.
            self._note_missing(preparation.manifest_locator, error)
            return None
        self.held_locator = preparation.manifest_locator
        self._totals.updates += 1
        self._totals.update_bytes += manifest.num_bytes
        self._preparing_thread.submit(self._prepare_for_next_version)
        return manifest.version

    def _note_missing(self, manifest_locator: str, error: FileNotFoundError) -> None:
        """Notes that a version could not be had. The log says so the 1st, 2nd, 4th, 8th time."""
        is_again = manifest_locator == self._missing_locator
        self._num_failures = self._num_failures + 1 if is_again else 1
        self._missing_locator = manifest_locator
        wait_s = min(MAX_RETRY_S, RETRY_S * 2 ** min(self._num_failures - 1, 10))
        self._retry_at = self._clock() + wait_s
        if self._num_failures & (self._num_failures - 1) == 0:
            log.warning(
                "%s cannot be taken up (%d times by now): %s", manifest_locator, self._num_failures, error
            )

    def close(self) -> None:
        self._preparing_thread.shutdown(cancel_futures=True)
        self._subscriber.close()

    def _choose_preparation(self, manifest_locator: str) -> Preparation:
        """Returns the preparation to wait for: the one under way, else a new one of `manifest_locator`.

        A preparation of an older version that has begun goes on and is loaded first. Where versions come
        faster than they can be fetched, no version would ever be loaded otherwise. A preparation of a life of
        the learner before a rewind is dropped.
        """
        preparation = self._preparation
        if preparation is not None and preparation.manifest_locator != manifest_locator:
            was_waiting = preparation.source.cancel()
            if was_waiting or parse_life(preparation.manifest_locator) != parse_life(manifest_locator):
                preparation = None
        if preparation is not None:
            return preparation
        return self._start_preparation(self._newest_version, manifest_locator)

    def _start_preparation(self, version: int, manifest_locator: str, *, again: bool = False) -> Preparation:
        fetching = self._heart.timeline.span(Track.weights, f"fetching and verifying version {version}")
        source = self._preparing_thread.submit(fetching(self._fetch_and_verify), manifest_locator, again)
        return Preparation(version, manifest_locator, source, again)

    def _fetch_and_verify(self, manifest_locator: str, again: bool) -> WeightSource:
        """Runs in the preparing thread."""
        began = self._clock()
        try:
            source = self._subscriber.prepare_version(manifest_locator, again=again)
        finally:
            self._totals.prepare_s += self._clock() - began
            self._totals.fetched_bytes = self._subscriber.fetched_bytes
        self._totals.digest_checks += source.checks
        return source

    def _prepare_for_next_version(self) -> None:
        """Runs in the preparing thread. An error here only makes the next version slower, so it is logged and
        not raised."""
        try:
            self._subscriber.refresh_spare()
        except Exception:
            log.exception("could not prepare for the next version")

    def _load_or_fetch_again(self, preparation: Preparation) -> Manifest | None:
        """Loads what was prepared. At a mismatch it fetches everything again; a second mismatch is raised.

        Returns None while the engine goes on with the version that it holds.
        """
        try:
            return self._load_into_engine(preparation.source.result())
        except DigestMismatch as error:
            if preparation.is_again:
                raise
            self._totals.digest_mismatches += 1
            log.error("%s; pulling it again", error)
            is_lost = isinstance(error, EngineMismatch)
        self._preparation = again = self._start_preparation(
            preparation.version, preparation.manifest_locator, again=True
        )
        if not is_lost:
            return None
        # The loop waits here: the engine may hold what nobody published, so nothing may be sampled meanwhile.
        while not again.source.done():
            self._heart.set_activity(*self.describe_fetching())
            wait([again.source], HEARTBEAT_S)
        self._preparation = None
        return self._load_into_engine(again.source.result())

    def _load_into_engine(self, source: WeightSource) -> Manifest:
        began = self._clock()
        self._totals.digest_checks += 1
        self._heart.set_activity(f"loading version {source.manifest.version}")
        with self._heart.timeline.span(Track.weights, f"loading version {source.manifest.version}"):
            self._engine.load_version(source)
        self._totals.pause_s += self._clock() - began
        return source.manifest


def parse_life(manifest_locator: str) -> str:
    """Returns the life of the learner that announced a version: the end of its manifest's name."""
    return manifest_locator.rpartition("-")[2]
