"""`sync`: how model weights come from the learner to the generators."""

from dataclasses import dataclass
from enum import StrEnum

from configs.addresses import TCP_ADDRESS, names_no_host
from configs.rules import POSITIVE
from configs.setting import Condition, Section, setting
from configs.transports import Transport


class KvCache(StrEnum):
    """Fate of the KV cache of running requests when an engine loads a version."""

    keep = "keep"
    """It stays: later tokens see keys and values of earlier versions."""
    recompute = "recompute"
    """It is computed again under the new weights."""


@dataclass(kw_only=True, slots=True)
class SyncConfig(Section):
    """The way of model weights from the learner to the generators."""

    transport: Transport = setting(Transport.auto)
    """How model weights come to the generators."""
    address: str | None = setting(None, TCP_ADDRESS)
    """Address at which the learner serves model weights to other hosts. They connect to it, so it names the
    host (port 0: any free one). Null: the host of `buffer.address`, any free port."""
    relays: bool = setting(True)
    """Hosts hand on the weights that they have fetched, so that the learner's own link carries a few copies
    only."""
    folder: str | None = setting(None)
    """The shared folder of `transport=disk`. Null: `<outputs>/<name>/weights`."""
    bucket_mb: int = setting(64, POSITIVE)
    """MB of weights that a rank casts, or exchanges with other ranks, at a time: the memory that publishing
    needs beside the rank's copy of its rows."""
    in_flight: bool = setting(True)
    """Load new weights between two engine steps, and keep the requests. False: an engine first finishes its
    requests."""
    kv_cache: KvCache = setting(KvCache.keep)
    """Fate of the KV cache of running requests at an update."""

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                self.folder is None or self.transport.row.shares_folder,
                "sync.folder",
                "be set only when sync.transport=disk",
                f"{self.folder!r} with {self.transport}",
            ),
            Condition(
                self.address is None or not names_no_host(self.address),
                "sync.address",
                "name a host (other hosts connect to it)",
                f"{self.address!r}",
            ),
        ]
