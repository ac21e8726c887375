"""A taskset of verifiers 0.4 trains through the gateway, from an environment of its own."""

import os
import shutil
import subprocess
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


STAND_IN = """#!/bin/bash
echo "${*} index=$UV_DEFAULT_INDEX links=$UV_FIND_LINKS" >> "$LOG"
case "$*" in
  "-m pip config get global.index-url") echo http://mirror/simple ;;
  "-m uv venv"*) sleep 0.2; mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  "-m uv pip install"*) exit "$STATUS" ;;
esac
"""
"""Stands in for the interpreters of both environments, and notes what it is asked to do."""


def test_the_environment_is_made_once_through_pips_mirror_and_again_when_it_has_failed(
    tmp_path: Path,
) -> None:
    venv, folder, log = tmp_path / "venv", tmp_path / "verifiers", tmp_path / "log"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(STAND_IN)
    (venv / "bin" / "python").chmod(0o755)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))
    } | {"SLIPSTREAM_VENV": str(venv), "SLIPSTREAM_VERIFIERS": str(folder), "LOG": str(log)}
    stamp = ["bash", "-c", f'. "{ROOT}/scripts/env.sh" && touch "$(stamp_of $backend)"']
    subprocess.run(stamp, env=environment, check=True)

    def start(status: int, *words: str) -> "subprocess.Popen[bytes]":
        script = str(ROOT / "scripts" / "verifiers.sh")
        return subprocess.Popen([script, *words], env=environment | {"STATUS": str(status)})

    assert start(0, "agent.py").wait() == 3, "a program does not make it"
    assert not log.exists() and start(7).wait() == 7 and not list(folder.glob("*.ready"))
    log.unlink()
    assert [one.wait() for one in [start(0), start(0), start(0)]] == [0, 0, 0]
    asked = log.read_text().splitlines()
    [made] = [line for line in asked if line.startswith("-m uv venv")]
    [filled] = [line for line in asked if line.startswith("-m uv pip install")]
    assert "verifiers==0.4.0" in filled and filled.endswith("index=http://mirror/simple links=")
    assert made.split(" index=")[0].endswith(str(folder / "venv"))
    assert start(0, "agent.py", "word").wait() == 0
    assert log.read_text().splitlines()[-1].startswith("agent.py word")


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
