"""Changes the number of generators that a run has started itself, up or down, while it goes on.

    scripts/scale.sh outputs/NAME 4                              four generators for training from now on
    scripts/scale.sh tcp://HOST:5555 4 buffer.keys=FOLDER        from another host, with an operator's key

More are started where the run's nodes have room; fewer means that the newest hand in what they have begun,
and leave. Generators of other commands (`role=generators`) do not count. Ctrl-C leaves the change under way.
"""

import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import zmq

from buffers import messages as m
from buffers.announcements import read_run_name
from buffers.client import BufferClient, BufferGone, KeysRefused, RefusedByBuffer
from buffers.keys import KeyRole
from buffers.message_fields import MAX_GENERATORS, MAX_INT63, WireRecord
from buffers.run_status import RunStatus
from configs.addresses import is_tcp_address
from slipstream.run_address import RunAddress, read_address

LOOK_EVERY_S = 0.5
ANSWER_S, PATIENCE_S = 2.0, 20.0
"""Seconds after which the buffer is asked again, and after which the run is given up: a buffer that has died
is started again meanwhile."""
KEYS = "buffer.keys="
R = TypeVar("R", bound=WireRecord)


class Gone(RuntimeError):
    """Raised when the run has ended, or is out of reach, or follows another order."""


def main(arguments: Sequence[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0 if arguments else 2
    try:
        run, count, keys = read_arguments(arguments)
        door = RunDoor(run, keys)
    except ValueError as error:
        print(f"Slipstream cannot scale:\n{error}", file=sys.stderr)
        return 2
    try:
        return follow_order(door, count)
    except (Gone, RefusedByBuffer, KeysRefused) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("the run goes on with the change, if it has heard of it", file=sys.stderr)
        return 130
    finally:
        door.client.close()


class RunDoor:
    """A run that goes on, as a command reaches it: by its folder, or by its buffer's address."""

    def __init__(self, run: str, keys: str | None) -> None:
        """Raises ValueError where the folder holds no run that goes on, nobody can have the address, or keys
        are missing."""
        self._folder = None if is_tcp_address(run) or run.startswith("ipc://") else Path(run)
        found = RunAddress(run, None) if self._folder is None else read_address(self._folder)
        keys = keys or found.keys
        try:
            self.client = BufferClient(found.buffer, timeout_s=ANSWER_S, keys=keys, role=KeyRole.operator)
        except zmq.ZMQError as error:
            raise ValueError(f"RUN must be an address that can be reached, got {run}: {error}") from None

    def ask(self, request: m.Request, expect: type[R]) -> R:
        """Returns the buffer's answer, whichever life of the buffer gives it. Raises Gone, RefusedByBuffer,
        KeysRefused."""
        began = time.monotonic()
        while True:
            try:
                return self.client.call(request, expect)
            except BufferGone as error:
                self._check_driver()
                if time.monotonic() - began > PATIENCE_S:
                    raise Gone(f"no run answers at {self.client.address}: {error}") from None

    def read_name(self) -> str:
        """Returns the run's random name, which its folder holds; empty where only an address is known."""
        return "" if self._folder is None else read_run_name(self._folder / "journal")

    def fetch_status(self) -> RunStatus:
        """Raises as `ask` does."""
        return self.ask(m.WatchRun(after=MAX_INT63, wait_s=0.0), m.RunNews).status

    def _check_driver(self) -> None:
        if self._folder is not None:
            try:
                read_address(self._folder)
            except ValueError as error:
                raise Gone(str(error)) from None


def read_arguments(arguments: Sequence[str]) -> tuple[str, int, str | None]:
    """Returns RUN, the number, and the folder of keys. Raises ValueError."""
    keys = [one.removeprefix(KEYS) for one in arguments if one.startswith(KEYS)]
    words = [one for one in arguments if not one.startswith(KEYS)]
    if len(words) != 2:
        raise ValueError(f"the arguments must be RUN and a number, got {' '.join(arguments)}")
    run, number = words
    if not number.isdecimal() or int(number) > MAX_GENERATORS:
        raise ValueError(f"the number must be a whole number from 0 to {MAX_GENERATORS}, got {number}")
    return run, int(number), keys[-1] if keys else None


def follow_order(run: RunDoor, count: int) -> int:
    """Orders the number, and prints what becomes of that. Returns the exit status. Raises Gone,
    RefusedByBuffer, KeysRefused."""
    order = m.ScaleGenerators(order=secrets.token_hex(8), count=count, run=run.read_name())
    shown = ""
    last = run.fetch_status().scaling
    run.ask(order, m.Acknowledged)
    while True:
        status = run.fetch_status()
        scaling = status.scaling
        if status.ended:
            raise Gone("the run ends, and the change with it")
        if scaling is None or (last is not None and scaling.order == last.order):
            # The buffer was started again before the driver had heard of the order.
            run.ask(order, m.Acknowledged)
            continue
        if scaling.order != order.order:
            raise Gone(f"another change, to {scaling.count} generators, has taken the place of this one")
        if scaling.progress not in ("", shown):
            shown = scaling.progress
            print(shown, flush=True, file=sys.stderr if scaling.failed else sys.stdout)
        if scaling.ended:
            return int(scaling.failed)
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
