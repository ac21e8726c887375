"""A taskset of verifiers 0.4 trains through the gateway, from an environment of its own."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from template_families import family_tokenizer
from test_episodes import EpisodeRun, RecordingEngine, make_config

from generators.engine import Completion

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("SLIPSTREAM_CACHE") or Path.home() / ".cache" / "slipstream")
FOLDER = Path(os.environ.get("SLIPSTREAM_VERIFIERS") or CACHE / "verifiers")
IS_THERE = (FOLDER / "verifiers-0.4.0.ready").exists()


class LetterEngine(RecordingEngine):
    """Writes all letters that the tasks ask for."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._reply = [*tokenizer.encode("ABCDEFGH"), tokenizer.eos_token_id]

    def step(self) -> list[Completion]:
        n = len(self._reply)
        ended = [
            replace(
                one,
                tokens=self._reply,
                logprobs=[-0.5] * n,
                versions=[self.version] * n,
                finish_reason="stop",
            )
            for one in super().step()
        ]
        self.answered |= {one.id: one for one in ended}
        return ended


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Iterator[Path]:
    family_tokenizer("qwen3").save_pretrained(tmp_path / "tokenizer")
    yield tmp_path / "tokenizer"


@pytest.mark.skipif(
    not IS_THERE, reason="there is no environment of verifiers here (scripts/verifiers.sh makes it)"
)
def test_a_taskset_of_verifiers_trains_in_an_environment_of_its_own(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shutil.which("bash")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = make_config(
        "X", "task.name=agent_tasks:VerifiersAgent", f"task.args={{tokenizer: {tokenizer_folder}}}",
        "learner.groups_per_step=1", "episodes.worker_memory_mb=65536", "episodes.max_concurrent=2",
        "sampling.max_tokens=32", "episodes.renderer=auto",
    )  # fmt: skip
    tokenizer = family_tokenizer("qwen3")
    engine = LetterEngine(tokenizer)
    run = EpisodeRun(config, tmp_path, engine, tokenizer)
    run.publish_version(0)
    run.wait_for(lambda status: len(engine.answered) >= 2 or bool(status.quarantined), timeout_s=300)
    run.take_step(0)
    run.close()
    rows = run.list_rows()
    assert [row["reward"] for row in rows] == [1.0, 1.0] and {row["branch"] for row in rows} == {0}
    for row in rows:
        text = tokenizer.decode(row["tokens"])
        assert text == "<|im_start|>user\nWrite A.<|im_end|>\n<|im_start|>assistant\nABCDEFGH<|im_end|>"
        assert sum(row["sampled"]) == len(tokenizer.encode("ABCDEFGH")) + 1
