"""Links between hosts: who is measured with whom, and what a server answers to strangers."""

import os
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.links import LinkServer, listen_on_first, measure_link, pair_up, ping_server

COOKIE, OTHER = bytes(16), os.urandom(16)


@given(st.integers(0, 33))
def test_each_node_meets_each_other_once_and_has_one_link_at_a_time(count: int) -> None:
    names = [f"node-{number}" for number in range(count)]
    rounds = pair_up(names)
    assert sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs) == sorted(
        tuple(sorted(pair)) for pair in combinations(names, 2)
    )
    for pairs in rounds:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))


def test_a_link_has_a_latency_two_rates_and_the_offset_of_the_other_clock() -> None:
    server = LinkServer("127.0.0.1", COOKIE)
    try:
        link = measure_link(server.address, COOKIE)
        assert min(link.latency_s, link.sent_bytes_per_s, link.received_bytes_per_s) > 0
        _, offset_s = ping_server(server.address, COOKIE, lambda: 0.0)
        assert offset_s > 1e9, "the server's clock shows this century, the other's the year 1970"
        with pytest.raises(OSError):
            measure_link(server.address, OTHER)
        measure_link(server.address, COOKIE)
    finally:
        server.close()
    with pytest.raises(OSError):
        measure_link(server.address, COOKIE)


def test_a_server_takes_the_first_port_that_is_free() -> None:
    with listen_on_first("127.0.0.1", [0]) as first:
        taken = first.getsockname()[1]
        with listen_on_first("127.0.0.1", [taken, 0]) as second:
            assert second.getsockname()[1] != taken
        with pytest.raises(OSError):
            listen_on_first("127.0.0.1", [taken])
