"""Hosts behind slow links get weights too, however fast versions come."""

import time
from pathlib import Path

import pytest
import torch

from sync.publisher import Publisher
from sync.stream import whole_parts
from sync.transports.fetcher import Fetcher
from sync.transports.messages import Chunk, FileGone, GetChunk, Reply
from sync.transports.puller import Puller
from sync.transports.served_files import KEEP_GONE, SNAPSHOT
from sync.transports.server import SnapshotServer

PIECE = 1 << 12
NUM_PIECES = 8


class ServedVersions:
    """A publisher whose files are asked for piece by piece."""

    def __init__(self, folder: Path) -> None:
        self.server = SnapshotServer(folder)
        self.publisher = Publisher(folder, "life", ends=[self.server])
        self.puller = Puller()
        self.version = -1

    def publish_version(self, num_pieces: int = NUM_PIECES) -> None:
        """Publishes one more version, which a fast host fetches at once: its manifest, and all its pieces."""
        self.version += 1
        weights = {"w": torch.full((num_pieces * PIECE // 4,), float(self.version))}
        num_bytes = self.publisher.publish_version(self.version, whole_parts(weights)).num_bytes
        assert isinstance(self.ask_piece(self.version, 0, ".json"), Chunk)
        for offset in range(0, num_bytes, PIECE):
            assert isinstance(self.ask_piece(self.version, offset), Chunk)

    def ask_piece(self, version: int, offset: int, suffix: str = ".safetensors") -> Reply:
        request = GetChunk(f"v{version}-life{suffix}", offset, PIECE)
        return self.puller.ask_server(self.server.address, request, 60.0)

    def close(self) -> None:
        self.puller.close()
        self.publisher.close()


@pytest.mark.parametrize("num_slow", [KEEP_GONE, KEEP_GONE + 3])
def test_slow_hosts_finish_the_versions_that_they_have_begun_however_many_newer_ones_others_fetch(
    tmp_path: Path, num_slow: int
) -> None:
    """Each slow host begins another version, and asks for a piece in the time of a publication. Where they
    are more than there is room for, those that began last begin anew."""
    served = ServedVersions(tmp_path / "weights")
    finished, anew = set[int](), set[int]()
    under_way = dict[int, int]()
    """Pieces that have come, by version."""
    try:
        while len(finished) < KEEP_GONE and served.version < 40:
            served.publish_version()
            if len(under_way) + len(finished) + len(anew) < num_slow:
                under_way[served.version] = 0
            for version, num_come in list(under_way.items()):
                reply = served.ask_piece(version, num_come * PIECE)
                if isinstance(reply, FileGone):
                    anew.add(version)
                else:
                    assert isinstance(reply, Chunk) and reply.offset == num_come * PIECE
                    under_way[version] += 1
                if version in anew or under_way[version] == NUM_PIECES:
                    del under_way[version]
                    finished |= {version} - anew
    finally:
        served.close()
    assert finished == set(range(KEEP_GONE)) and len(anew) <= num_slow - KEEP_GONE
    mapped = served.server.files._mapped
    gone = [name for name, file in mapped.items() if name.endswith(SNAPSHOT) and file.is_gone()]
    assert len(gone) <= KEEP_GONE + 3, "what was deleted takes memory"


class SlowestServer(SnapshotServer):
    """A server behind a link of 80 kbit/s."""

    def _make_reply(self, request: object) -> tuple[object, list[memoryview]]:  # type: ignore[override]
        reply, payload = super()._make_reply(request)  # type: ignore[arg-type]
        time.sleep(sum(map(len, payload)) / 10_000)
        return reply, payload


def test_a_relay_over_the_slowest_link_that_serves_is_not_taken_for_silent(tmp_path: Path) -> None:
    served = ServedVersions(tmp_path / "weights")
    relay, child = (Fetcher(tmp_path / name, timeout_s=60.0) for name in ("relay", "child"))
    narrow = SlowestServer(relay.open_folder())
    relay.serve_at, child.serve_at = narrow.address, "tcp://127.0.0.1:9"
    try:
        served.publish_version(num_pieces=15)
        relay.fetch_version(served.server.address, "v0-life.json")
        child.fetch_version(served.server.address, "v0-life.json")
        assert not child.silent_relays and narrow.bytes_sent == child.bytes_received
    finally:
        for one in (relay, child, narrow, served):
            one.close()
