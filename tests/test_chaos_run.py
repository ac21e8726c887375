"""A short run of `scripts/bench/chaos_run.py`: real roles over two hosts get over what is done to them, and
the audit can fail."""

import json
from pathlib import Path

import pytest

from chaos_run import ChaosOfRun
from configs.load import load_study_config
from slipstream_bench.audit import audit_whole_run
from slipstream_bench.network_hosts import find_obstacle
from slipstream_bench.run_faults import FAULTS_OF_FLEET, FAULTS_OF_RUN

pytestmark = [pytest.mark.whole_run, pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())]
OF_RUN = ["buffer: SIGKILL", "learner: SIGKILL", "run's driver: SIGKILL, then run.resume"]
OF_FLEET = ["generator: SIGKILL", "fleet's driver: SIGKILL, then started again"]


def test_a_run_whose_roles_are_killed_on_every_host_loses_nothing_and_is_what_its_journal_says(
    tmp_path: Path, tiny_model: Path
) -> None:
    of_run = {name: FAULTS_OF_RUN[name] for name in OF_RUN}
    of_fleet = {name: FAULTS_OF_FLEET[name] for name in OF_FLEET}
    said: list[str] = []
    chaos = ChaosOfRun(tmp_path / "chaos", 0, 1, 5, 1, of_run, of_fleet, False, said.append)
    chaos.disturb_and_audit()
    assert chaos.problems == []
    assert len(chaos.recoveries) == len(said) == 5
    assert int(chaos.figures["groups acknowledged to producers"]) > 10
    assert "bit for bit the same" in str(chaos.figures["replayed"])
    # What the generators were told and the journal must agree.
    (tmp_path / "chaos" / "another.acknowledged").write_text("123456789 999999\n")
    run = tmp_path / "chaos" / "kept" / "run"
    summary = json.loads((run / "summary.json").read_text())
    summary["groups"]["trained"] += 1
    found = audit_whole_run(run, tmp_path / "chaos", load_study_config(run, []), summary)
    assert [text.partition(":")[0] for text in found.problems] == [
        "acknowledged group 999999 (lease 123456789) is lost",
        "the summary does not add up",
    ]
