"""The chains of relays: which host fetches which file from which other host."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from sync.transports.messages import FILE_NAME, EnlistRelay

log = logging.getLogger("slipstream.weights")

CHAIN_LENGTH = 8
"""Number of relays from which on the publisher sends a second copy. The relays that follow are divided
between two chains."""
KEEP_CHAINS = 16
"""Number of files whose chains are remembered."""
MAX_RELAYS = 4096
"""Most hosts in the chains of a file; a host that comes later fetches from the publisher."""
IN_VAIN, SHUNNED_S = 2, 600.0
"""A relay that so many hosts have asked in vain within so many seconds is in no chain: it may be alive, and
behind a firewall."""


class RelayChains:
    """Relays that have begun to fetch each file, in the order in which they have begun.

    Each host asks the one before it, so every link carries one copy, and the last host has the file little
    later than the first. A relay that died before a file was published is not in that file's chain.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._relays: OrderedDict[str, list[str]] = OrderedDict()
        self._asked_in_vain: OrderedDict[str, dict[str, float]] = OrderedDict()
        """By relay: the last hosts that have asked it in vain, and when."""

    def relays_of(self, name: str) -> list[str]:
        """Addresses of the relays of a file, in order."""
        return list(self._relays.get(name, []))

    def find_parent(self, request: EnlistRelay) -> str:
        """Appends a relay to the chain of a file; returns the address that it asks, or an empty text for this
        server.

        Raises ValueError when the name is none of a snapshot or patch.
        """
        if not FILE_NAME.fullmatch(request.name):
            raise ValueError(f"name must be that of a snapshot or patch, got {request.name[:80]!r}")
        relays = self._relays.setdefault(request.name, [])
        while len(self._relays) > KEEP_CHAINS:
            self._relays.popitem(last=False)
        if request.lost in relays:
            relays.remove(request.lost)
            # A relay that is ahead of a slow host is none the worse, nor is one behind another that stands
            # still.
            if request.is_at_fault:
                log.warning(
                    "the relay %s is passed over: %s has asked it in vain", request.lost, request.address
                )
                self._note_asked_in_vain(request.lost, request.address)
        if self._is_shunned(request.address):
            return ""
        if request.address not in relays:
            if len(relays) >= MAX_RELAYS:
                return ""
            relays.append(request.address)
        place = relays.index(request.address)
        if place in (0, CHAIN_LENGTH):
            return ""
        # Beyond the first chain, every second relay belongs to the same one of the two chains.
        return relays[place - 1 if place < CHAIN_LENGTH else place - 2]

    def _note_asked_in_vain(self, relay: str, host: str) -> None:
        hosts = self._asked_in_vain.pop(relay, {})
        hosts.pop(host, None)
        hosts[host] = self._clock()
        self._asked_in_vain[relay] = dict(list(hosts.items())[-IN_VAIN:])
        while len(self._asked_in_vain) > MAX_RELAYS:
            self._asked_in_vain.popitem(last=False)

    def _is_shunned(self, relay: str) -> bool:
        times = self._asked_in_vain.get(relay, {}).values()
        return sum(self._clock() - at < SHUNNED_S for at in times) >= IN_VAIN
