"""A safety measure for every process that serves a socket."""

import ctypes
import secrets


def randomize_peer_names() -> None:
    """Makes the names that ZeroMQ gives to peers hard to guess. Call it before a ROUTER socket is made.

    ZeroMQ names peers that show no name of their own by counting on from a number of `rand()`, which nobody
    has seeded: from the same number in every process. A peer that shows the next one as its own name aborts
    the process as soon as another connects (libzmq 4.3.5, `add_out_pipe`). From now on it would have to guess
    among 2^31.
    """
    ctypes.CDLL(None).srand(secrets.randbits(32))
