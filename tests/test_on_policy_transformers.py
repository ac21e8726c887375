"""The pipeline at S = 0 is the synchronous algorithm, bit for bit, with transformers' engine too."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_on_policy import ROOT, SAME, STEPS, process_group, train_synchronously

from configs.load import load_config
from learners.fsdp import FsdpEngine
from sync.stream import collect_tensors


@pytest.mark.whole_run
@pytest.mark.timeout(900)
def test_the_pipeline_with_transformers_engine_is_the_synchronous_loop_bit_for_bit(
    tiny_model: Path, tmp_path: Path
) -> None:
    same = [*SAME, "generators.engine=transformers"]
    command = [
        sys.executable,
        "-P",
        "-m",
        "slipstream.train",
        f"run.outputs={tmp_path}",
        "run.name=run",
        *same,
    ]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    torch.set_num_threads(1)
    try:
        with process_group(tmp_path / "loop"):  # beside the run
            config = load_config([*same, f"model.path={tiny_model}"])
            expected = train_synchronously(config, tmp_path / "weights")
        said, _ = run.communicate(timeout=400)
        assert run.returncode == 0, said
    finally:
        run.terminate()
    with process_group(tmp_path / "pipeline"):
        pipeline = FsdpEngine(tiny_model)
        start = collect_tensors(pipeline.stream_weights())
        pipeline.load_state(tmp_path / "run" / "checkpoints" / f"step_{STEPS}" / "engine")
        found = collect_tensors(pipeline.stream_weights())
    assert any(not torch.equal(start[name], found[name]) for name in found), "nothing was learned"
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, f"{len(different)} of {len(expected)} tensors differ: {different[:3]}"
