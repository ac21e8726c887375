"""The worked examples of docs/environments.md run as they stand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, CodeBlock, read_blocks, read_section
from runs import StartedRun

from generators.tasks import list_tasks, load_task
from generators.text_play import join_messages
from generators.user_code.task_host import TaskHost
from slipstream.nursery import FOLDER

PAGE = "docs/environments.md"


def write_files(section: str, folder: Path) -> list[CodeBlock]:
    """Writes the section's files into a folder; returns its commands."""
    blocks = read_blocks(read_section(PAGE, section))
    for block in blocks:
        if block.place is not None:
            (folder / block.place).write_text(block.code)
    return [block for block in blocks if block.place is None]


def test_the_tool_of_the_page_works(tmp_path: Path) -> None:
    (command,) = write_files("A tool", tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euc", command.code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_page_names_all_shipped_environments_and_their_arguments() -> None:
    text = (ROOT / PAGE).read_text()
    for name, place in list_tasks().items():
        if place.startswith("generators.environments."):
            (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
            for part in row.split("|")[3].split(","):
                argument, value = part.strip(" `)").split("` (")
                load_task(name, {argument: json.loads(value.partition(":")[0])})


def test_the_examples_of_the_memory_game_are_its_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files("Write an environment", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    host = TaskHost("memory:Memory", {})
    first = host.reset("train", 0, 0, 7)
    digits = first["messages"][0]["content"].removeprefix("Keep ").rstrip(":").split()
    (question,) = host.step({"role": "assistant", "content": "yes"})["messages"]
    place = ("First:", "Second:", "Third:").index(question["content"])
    assert host.step({"role": "assistant", "content": f" {digits[place]}"})["reward"] == 1.0
    examples = load_task("memory:Memory", {}).example_conversations("train", 0)
    texts = join_messages(next(examples))
    assert len(texts) == 4 and texts[1] == "yes" and texts[3] in texts[0]


@pytest.mark.whole_run
def test_the_environment_of_the_page_trains(tmp_path: Path) -> None:
    (command,) = write_files("Write an environment", tmp_path)
    assert "scripts/launch.sh task.name=memory:Memory run.name=memory" in command.code
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    # A nursery that other tests have started imports from their path.
    environment = {name: value for name, value in os.environ.items() if name != FOLDER} | {"PYTHONPATH": path}
    run = StartedRun(
        tmp_path / "outputs", "task.name=memory:Memory", "run.steps=3", "eval.prompts=16",
        environment=environment,
    )  # fmt: skip
    try:
        code, out = run.finish()
    finally:
        run.kill() if run.process.poll() is None else None
    assert code == 0 and "finished. Summary" in out, out
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == 3
