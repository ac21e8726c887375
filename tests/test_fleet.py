"""The benchmark of many generators on one buffer, with few."""

import json
from pathlib import Path

import pytest

from slipstream_bench import fleet_figures
from slipstream_bench.fleet import FleetRow
from slipstream_bench.fleet_figures import list_rows, measure_changes, measure_row, print_fleet_rows


@pytest.mark.parametrize(("has_keys", "offered"), [(False, 10_000.0), (True, None)])
def test_a_fleet_hands_in_groups_that_a_consumer_trains(
    has_keys: bool, offered: float | None, tmp_path: Path
) -> None:
    """Also where a group takes a second, and a step more: then it waits for the steady rate first."""
    row = FleetRow(num_generators=20, num_tokens=64, groups_per_step=4, has_keys=has_keys, offered=offered)
    found = measure_row(row, 1.0, tmp_path / "row")
    assert found.groups_per_s > 0 and found.num_steps > 0 and not found.refused
    assert found.tokens_per_s == pytest.approx(8 * 64 * found.groups_per_s)
    assert len(found.rss_mb) == 3 and found.cpu_shares["serving"] > 0
    assert all(0 < median <= p99 for median, p99 in found.latencies_ms.values()), found.latencies_ms
    assert not (tmp_path / "row").exists()


def test_a_fleet_joins_dies_and_leaves_and_the_buffer_too(tmp_path: Path) -> None:
    """The measurement waits until the buffer knows of each change, and looks whether the ledger closes."""
    found = measure_changes(20, tmp_path / "changes", lease_s=4.0, settle_s=0.5)
    assert all(seconds >= 0 for seconds in found.values())
    assert found["leases of theirs that have expired"] > 0


def test_the_report_of_a_fleet_has_a_row_for_each_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {(row.num_generators, row.num_tokens) for row in list_rows(1000)}
    assert sizes == {(1, 8192), (100, 8192), (1000, 8192), (100, 100_000)}
    monkeypatch.setattr(fleet_figures, "list_rows", lambda number: [FleetRow(num_generators=number)])
    monkeypatch.setattr(fleet_figures, "measure_changes", lambda *_: {"all have joined, s": 0.5})
    print_fleet_rows(2, 0.3, tmp_path, tmp_path / "found.json")
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["rows"][0]["row"]["num_generators"] == 2 and written["changes"]
    assert set(written["limits_mb_per_s"]) == {"memcpy", "write and sync"}
    assert "2 × 8,192 tokens, os: all it takes" in capsys.readouterr().out
