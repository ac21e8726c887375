"""A generator on another host, which has neither the model nor the rows of the run, generates for it."""

import json
from pathlib import Path

import pytest
from dataset_rows import write_lines
from host_runs import PORT

from buffers.keys import KeyRole, make_keys
from slipstream_bench.host_commands import CommandOnHost
from slipstream_bench.network_hosts import NetworkHosts, find_obstacle

pytestmark = [pytest.mark.whole_run, pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())]
REWARD = """
def score(row, reply):
    return float(row["answer"] in reply)
"""
SMALL = [
    "generators.count=0", "generators.max_sequences=8", "generators.max_model_len=64", "eval.prompts=0",
    "sampling.max_tokens=8", "learner.groups_per_step=2", "learner.samples_per_prompt=2", "run.steps=3",
]  # fmt: skip


def test_a_host_without_model_and_rows_joins_a_run_and_generates_all_of_it(
    tmp_path: Path, tiny_model: Path
) -> None:
    for folder in ("rows", "code"):
        (tmp_path / folder).mkdir()
    rows = [{"prompt": f"Say {i}.", "answer": str(i % 10)} for i in range(500)]
    rows_file = write_lines(tmp_path / "rows" / "rows.jsonl", rows)
    reward = tmp_path / "code" / "reward.py"
    reward.write_text(REWARD)
    make_keys(tmp_path / "keys", list(KeyRole))
    common = [f"buffer.keys={tmp_path / 'keys'}", f"buffer.address=tcp://10.77.0.1:{PORT}"]
    with NetworkHosts(2) as (here, there):
        for hidden in (tmp_path / "rows", tiny_model):
            there.run("mount", "-t", "tmpfs", "none", hidden)
            assert there.run("ls", "-A", hidden) == ""
        run = CommandOnHost(
            here, tmp_path, "run", "run.name=run", *common, *SMALL, f"model.path={tiny_model}",
            "task=dataset", f"data.train={rows_file}", f"reward.function={reward}:score",
            cache=tmp_path / "cache-here",
        )  # fmt: skip
        run.wait_for(lambda: "the buffer answers at" in run.said, "buffer")
        fleet = CommandOnHost(
            there, tmp_path, "fleet", *common, "role=generators", "generators.count=1",
            cache=tmp_path / "cache-there",
        )  # fmt: skip
        assert (run.finish(300), fleet.finish()) == (0, 0), run.said + fleet.said
    cache = tmp_path / "cache-there"
    (model,) = [one for one in (cache / "models").iterdir() if one.is_dir()]
    fetched = {one.name for one in model.iterdir()}
    assert {"config.json", "tokenizer.json"} <= fetched
    assert fetched == {one.name for one in (tmp_path / "run" / "model").iterdir()}
    assert not [name for name in fetched if name.endswith((".safetensors", ".py"))]
    assert len([one for one in (cache / "data").iterdir() if one.is_dir()]) == 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["groups"]["trained"] == 6
