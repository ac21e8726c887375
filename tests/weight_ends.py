"""The ends of transports, as tests look into them: the server of a publisher or of a relay, the fetcher of a
subscriber."""

from sync.announcement import parse_announcement
from sync.publisher import Publisher
from sync.subscriber import Subscriber
from sync.transports.fetcher import Fetcher
from sync.transports.server import SnapshotServer
from sync.transports.shared_memory import FolderEnd
from sync.transports.tcp import FetchingEnd


def server_of(publisher: Publisher) -> SnapshotServer:
    (server,) = (end for end in publisher.ends if isinstance(end, SnapshotServer))
    return server


def fetching_end(subscriber: Subscriber) -> FetchingEnd:
    assert isinstance(subscriber.end, FetchingEnd)
    return subscriber.end


def fetcher_of(subscriber: Subscriber) -> Fetcher:
    return fetching_end(subscriber).fetcher


def relay_server(subscriber: Subscriber) -> SnapshotServer | None:
    """Returns the server that hands on what the host fetches, if it runs in this process."""
    relay = fetching_end(subscriber).relay
    assert relay is not None
    return relay.server


def locate_manifest(subscriber: Subscriber, announced: str, *, again: bool = False) -> str:
    """Brings an announced version to the subscriber's host; returns its manifest there, whose snapshot is not
    verified."""
    assert isinstance(subscriber.end, FetchingEnd | FolderEnd)
    return str(subscriber.end.locate_manifest(parse_announcement(announced), again=again))
