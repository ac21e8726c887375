"""A generator's side of the weights: brings what is announced to its host, and has it verified before an
engine takes it up.

Fetching and verification are the slow part, and need no engine: `prepare_version` does both beforehand, in a
thread, once per version for all processes of a host.
"""

from pathlib import Path

import xxhash

from configs.schema import Config
from sync.announcement import parse_announcement
from sync.folders import shared_memory_folder
from sync.merged_folder import MergedFolder
from sync.snapshot import Snapshot
from sync.transports.ends import GeneratorEnd, SocketGuards, load_transport
from sync.transports.shared_memory import FolderEnd
from sync.weight_source import WeightSource


class Subscriber:
    """Prepares announced versions for an engine. Not thread-safe."""

    def __init__(self, end: GeneratorEnd | None = None) -> None:
        """`end` brings the versions; None: they are read where the learner has written them."""
        self.end: GeneratorEnd = FolderEnd() if end is None else end
        self.merged: dict[Path, MergedFolder] = {}
        """The host's folder of whole models, by the folder that the adapters are in."""

    @property
    def fetched_bytes(self) -> int:
        """Bytes that have arrived from other hosts so far."""
        return self.end.fetched_bytes

    def prepare_version(self, announced: str, *, again: bool = False) -> WeightSource:
        """Brings an announced version to this host and verifies it, so that an engine takes it up with the
        least delay.

        `again`: the bytes that were brought before are not those that were published. Where adapters were
        published, the source is the whole model that this host has made of them. Raises as
        `GeneratorEnd.bring_version`, `Snapshot.attest` and `sync.adapters.merge_adapters`.
        """
        source = self.end.bring_version(parse_announcement(announced), again=again)
        source.attest()
        if source.manifest.adapter is None:
            return source
        assert isinstance(source, Snapshot), "adapters come as a snapshot"
        folder = Path(source.manifest.path).parent
        return self.merged.setdefault(folder, MergedFolder(folder)).merge_version(source, again=again)

    def refresh_spare(self) -> None:
        """Prepares for the next version, after an engine has taken one up."""
        self.end.refresh_spare()

    def close(self) -> None:
        self.end.close()
        for merged in self.merged.values():
            merged.close()


def open_subscriber(config: Config, buffer: str, guards: SocketGuards) -> Subscriber:
    """Opens a generator's side of the transport that the configuration names.

    `buffer`: address of the buffer. With the run's name it names the folder of what this host fetches, so
    that all generators of a run on this host share the folder.
    """
    run = xxhash.xxh32_hexdigest(f"{buffer} {config.run.name}".encode())
    folder = shared_memory_folder(f"fetched-{run}")
    return Subscriber(load_transport(config.sync.transport).open_generator_end(config, folder, guards))
