"""Gives each side of a run hardware of its own, on any machine: generators and learner take turns on the
processors.

While one side has its turn the other is stopped (SIGSTOP), so neither ever takes cores, caches or memory
bandwidth from the other. Each side behaves as if it had a machine that is as fast as its share of the time,
whether the other side works or waits. The buffer, Ray and the driver are never stopped.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Event, Thread
from types import TracebackType

import psutil

SIDES = ("ray::GeneratorRole", "ray::LearnerRole")
"""Titles that the processes of each side begin with: generators, then the learner."""
SEARCH_PERIOD_S = 2.0
"""Seconds between two searches for new processes."""


class Turns:
    """Context in which the roles of a run take turns.

    A process that is killed inside the context leaves one side stopped.
    """

    def __init__(self, driver: int, share: float, period_s: float) -> None:
        """Takes the driver's process id, the share of generators and the period.

        `driver` is the process that started the run. `share` in (0, 1) is the generators' share of the time;
        the learner has the rest. `period_s` is the seconds in which both sides have one turn.
        """
        self._driver, self._turns_s = driver, (share * period_s, (1 - share) * period_s)
        self._over = Event()
        self._thread = Thread(target=self._alternate, daemon=True, name="turns")
        self._had_s = [0.0, 0.0]
        self._seen: set[psutil.Process] = set()
        """Processes that may have been stopped; each of them must be resumed."""
        self._error: Exception | None = None

    @property
    def measured_share(self) -> float:
        """Share of the time that generators have had so far, in [0, 1]."""
        return self._had_s[0] / (sum(self._had_s) or 1.0)

    def __enter__(self) -> "Turns":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _alternate(self) -> None:
        sides = self._find_sides()
        looked = switched = time.monotonic()
        try:
            while not self._over.is_set():
                for side, turn_s in enumerate(self._turns_s):
                    _signal_each(psutil.Process.suspend, sides[1 - side])
                    _signal_each(psutil.Process.resume, sides[side])
                    time.sleep(turn_s)
                    if side == 1 and time.monotonic() - looked > SEARCH_PERIOD_S:
                        sides, looked = self._find_sides(), time.monotonic()
                    now = time.monotonic()
                    self._had_s[side] += now - switched
                    switched = now
        # __exit__ raises the error in the thread that holds the context.
        except Exception as error:
            self._error = error
        finally:
            _signal_each(psutil.Process.resume, self._seen)

    def _find_sides(self) -> list[list[psutil.Process]]:
        sides = find_sides(self._driver)
        found = {process for side in sides for process in side}
        # A process that has left its side takes no more turns and must not stay stopped.
        _signal_each(psutil.Process.resume, self._seen - found)
        self._seen |= found
        return sides


def find_sides(driver: int) -> list[list[psutil.Process]]:
    """Returns the living processes of the run's generators, and those of its learner."""
    found: list[list[psutil.Process]] = [[] for _ in SIDES]
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(driver).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                for side, name in zip(found, SIDES, strict=True):
                    if title.startswith(name):
                        side.append(process)
    return found


def _signal_each(signal: Callable[[psutil.Process], None], processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            signal(process)
