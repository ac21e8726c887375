"""A judge that is slower than the engine slows the run, and fails no group."""

import asyncio
from pathlib import Path

import pytest
from test_episodes import EpisodeRun, assert_ledger_closes, make_config

from generators.user_code.errors import TaskRefused
from generators.user_code.pool import UserCodePool, WorkerLimits
from slipstream_bench.slow_judge import serve_judge


def test_replies_wait_for_a_slow_judge_without_a_deadline_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen replies at a time, four a second: the last waits longer than the judge's own deadline."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "question {index}"}}\n' for index in range(64)))
    with serve_judge(0.25) as url:
        judge = (
            f"{{use: judge, url: '{url}', model: m, prompt: '{{response}}', max_concurrent: 1, timeout_s: 2"
        )
        config = make_config(
            "", "task=dataset", f"data.train={rows}", f"reward.parts=[{judge}, attempt_timeout_s: 2}}]"
        )
        run = EpisodeRun(config, tmp_path)
        trained = run.train_steps(2)
        status = run.close()
    assert len(trained) == 8 and not status.quarantined
    assert all(row["reward"] == 1.0 for row in run.list_rows())
    assert_ledger_closes(status)


def test_a_bound_on_scores_that_is_no_count_is_refused() -> None:
    with pytest.raises(TaskRefused, match="task.name must name a class that describes itself.*max_scores"):
        asyncio.run(UserCodePool.open("misbehaving:Unbounded", {}, WorkerLimits()))
