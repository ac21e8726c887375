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

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, KeysRefused, RefusedByBuffer
from buffers.keys import KeyRole
from buffers.message_fields import MAX_GENERATORS, MAX_INT63
from buffers.run_status import Scaling
from configs.addresses import is_tcp_address
from slipstream.run_address import RunAddress, read_address

LOOK_EVERY_S = 0.5
ANSWER_S = 10.0
"""Seconds that the buffer may take for an answer: one that has died is started again meanwhile."""
KEYS = "buffer.keys="


class Gone(RuntimeError):
    """Raised when the run has ended, or is out of reach."""


def main(arguments: Sequence[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0 if arguments else 2
    try:
        address, count = read_arguments(arguments)
        client = BufferClient(address.buffer, timeout_s=ANSWER_S, keys=address.keys, role=KeyRole.operator)
    except ValueError as error:
        print(f"Slipstream cannot scale:\n{error}", file=sys.stderr)
        return 2
    try:
        return follow_order(client, count)
    except (Gone, RefusedByBuffer, KeysRefused) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("the run goes on with the change, if it has heard of it", file=sys.stderr)
        return 130
    finally:
        client.close()


def read_arguments(arguments: Sequence[str]) -> tuple[RunAddress, int]:
    """Returns where the run answers, and the number. Raises ValueError."""
    keys = [one.removeprefix(KEYS) for one in arguments if one.startswith(KEYS)]
    words = [one for one in arguments if not one.startswith(KEYS)]
    if len(words) != 2:
        raise ValueError(f"the arguments must be RUN and a number, got {' '.join(arguments)}")
    run, number = words
    if not number.isdecimal() or int(number) > MAX_GENERATORS:
        raise ValueError(f"the number must be a whole number from 0 to {MAX_GENERATORS}, got {number}")
    is_address = is_tcp_address(run) or run.startswith("ipc://")
    address = RunAddress(run, None) if is_address else read_address(Path(run))
    return address._replace(keys=keys[-1] if keys else address.keys), int(number)


def follow_order(client: BufferClient, count: int) -> int:
    """Orders the number, and prints what becomes of that. Returns the exit status. Raises Gone,
    RefusedByBuffer, KeysRefused."""
    order, shown = secrets.token_hex(8), ""
    send_order(client, order, count)
    while True:
        scaling = fetch_scaling(client)
        if scaling is None or scaling.order != order:
            # The buffer was started again before the driver had heard of the order.
            send_order(client, order, count)
        elif scaling.progress != shown:
            shown = scaling.progress
            print(shown, flush=True, file=sys.stderr if scaling.failed else sys.stdout)
        if scaling is not None and scaling.order == order and scaling.ended:
            return int(scaling.failed)
        time.sleep(LOOK_EVERY_S)


def send_order(client: BufferClient, order: str, count: int) -> None:
    try:
        client.call(m.ScaleGenerators(order=order, count=count), m.Acknowledged)
    except BufferGone as error:
        raise Gone(f"no run answers at {client.address}: {error}") from None


def fetch_scaling(client: BufferClient) -> Scaling | None:
    try:
        status = client.call(m.WatchRun(after=MAX_INT63, wait_s=0.0), m.RunNews).status
    except BufferGone as error:
        raise Gone(f"the run has ended, or is out of reach: {error}") from None
    if status.ended:
        raise Gone("the run ends, and the change with it")
    return status.scaling


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
