"""Prometheus finds the ledger, the staleness histogram and the refusals where `buffer.metrics_port` says."""

import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from buffer_harness import SMALL_RUN, BufferHarness
from prometheus_client.parser import text_string_to_metric_families

from buffers import messages as m
from buffers.client import RefusedByBuffer
from buffers.server import BufferServer
from configs.load import load_config


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[BufferHarness, int]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    harness = BufferHarness(load_config([*SMALL_RUN, f"buffer.metrics_port={port}"]), tmp_path)
    yield harness, port
    harness.close()


def scrape_metrics(port: int) -> dict[tuple[str, str], float]:
    """Returns the served values by (metric, label)."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_is_served_is_what_the_status_says(run: tuple[BufferHarness, int]) -> None:
    harness, port = run
    harness.publish(0)
    for lease in harness.ask():
        harness.submit(lease)
    harness.train(0)
    with pytest.raises(RefusedByBuffer):
        harness.client.call(
            m.ReportTrainedStep(step=3, num_trained=0, idle_s=0, alive_s=0, metrics={}), m.Acknowledged
        )
    refused, deadline = ("slipstream_refused_messages_total", "wrong step"), time.monotonic() + 30
    while refused not in (served := scrape_metrics(port)):
        assert time.monotonic() < deadline, served
        time.sleep(0.05)
    status = harness.status()
    assert served["slipstream_ledger_tokens", "trained"] == status.tokens.trained == 8
    assert served["slipstream_ledger_tokens", "in_flight"] == status.tokens.in_flight
    assert served["slipstream_ledger_groups", "trained"] == 2
    assert {k[1]: v for k, v in served.items() if k[0] == "slipstream_trained_tokens"} == {"0": 8.0}
    assert served[refused] == 1
    assert served["slipstream_version", ""] == 0 and served["slipstream_steps_trained", ""] == 1


def test_a_taken_port_is_named_and_no_port_serves_nothing(
    run: tuple[BufferHarness, int], tmp_path: Path
) -> None:
    _, port = run
    with pytest.raises(ValueError, match=re.escape(f"buffer.metrics_port must be free, got {port}")):
        BufferServer(load_config([*SMALL_RUN, f"buffer.metrics_port={port}"]), tmp_path / "other")
    BufferServer(load_config(SMALL_RUN), tmp_path / "quiet").close()
