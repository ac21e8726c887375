"""The chains of relays: which host fetches which file from which other host."""

import logging
from collections import OrderedDict

from sync.transports.messages import FILE_NAME, EnlistRelay

log = logging.getLogger("slipstream.weights")

CHAIN_LENGTH = 8
"""Number of relays from which on the publisher sends a second copy. The relays that follow are divided
between two chains."""
KEEP_CHAINS = 16
"""Number of files whose chains are remembered."""
MAX_RELAYS = 4096
"""Most hosts in the chains of a file; a host that comes later fetches from the publisher."""


class RelayChains:
    """Relays that have begun to fetch each file, in the order in which they have begun.

    Each host asks the one before it, so every link carries one copy, and the last host has the file little
    later than the first. A relay that died before a file was published is not in that file's chain.
    """

    def __init__(self) -> None:
        self._relays: OrderedDict[str, list[str]] = OrderedDict()

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
            log.warning("the relay %s is passed over: %s has asked it in vain", request.lost, request.address)
            relays.remove(request.lost)
        if request.address not in relays:
            if len(relays) >= MAX_RELAYS:
                return ""
            relays.append(request.address)
        place = relays.index(request.address)
        if place in (0, CHAIN_LENGTH):
            return ""
        # Beyond the first chain, every second relay belongs to the same one of the two chains.
        return relays[place - 1 if place < CHAIN_LENGTH else place - 2]
