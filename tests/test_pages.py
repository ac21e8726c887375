"""The pages say what is true: their commands run, their links lead somewhere, their keys and files exist."""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pages import (
    LINK,
    PAGES,
    ROOT,
    CodeBlock,
    apply_diff,
    list_anchors,
    list_commands,
    read_blocks,
    read_section,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.load import load_config
from generators.rewards.composition import PARTS, make_parts
from generators.rewards.judge import JudgePart
from slipstream.nursery import FOLDER

SHORT = "run.steps=3 eval.prompts=16"
"""Ends the runs of a page early where the page itself does not say how long they are."""
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "outputs", "__pycache__", ".*_cache", ".hypothesis")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if not link.startswith(("http://", "https://")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{named(page)} links to {link}"
            assert not anchor or anchor in list_anchors(target), f"{named(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    made_by_the_page = {block.place for block in read_blocks(text)}
    folders = "algos|buffers|configs|generators|learners|sync|scripts|tests|docs"
    for path in (
        set(re.findall(rf"\b((?:{folders})/[\w/]+\.(?:py|sh|md|png|svg|yaml))\b", text)) - made_by_the_page
    ):
        assert (ROOT / path).exists(), f"{named(page)} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_of_a_page_has_keys_that_exist(page: Path) -> None:
    blocks = read_blocks(page.read_text())
    diffs = "".join(one.code for one in blocks if one.language == "diff")
    added = re.findall(r"^\+ +(\w+)(?:: \w+)? =", diffs, re.M)
    for words in list_commands(page):
        if any(re.search(rf"\b{key}\b", word) for key in added for word in words):
            # The page adds the key or value of this command. The test of the page's section runs it.
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words and words[0].startswith("scripts/"):
            assert (ROOT / words[0]).exists(), f"{named(page)}: {words}"
        if words and words[0] in ("scripts/launch.sh", "slipstream"):
            overrides = [word for word in words[1:] if "=" in word and not word.startswith("-")]
            asks_for_files = any(one.startswith(("run.resume", "buffer.keys")) for one in overrides)
            if not asks_for_files:
                load_config([one.replace(":PORT", ":5555").replace("HOST", "127.0.0.1") for one in overrides])


def test_the_design_page_lists_every_file_of_the_product() -> None:
    listed = read_section("docs/design.md", "The files")
    for folder in ("algos", "buffers", "configs", "generators", "learners", "sync", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            assert path.name == "__init__.py" or f"`{place}`" in listed, (
                f"docs/design.md does not list {place}"
            )


def run_blocks(blocks: list[CodeBlock], folder: Path, environment: dict[str, str]) -> str:
    """Writes and changes the files and runs the commands of a page in `folder`, in its order.

    Returns all that was printed.
    """
    printed = ""
    for block in blocks:
        if block.language == "diff":
            assert block.place is not None
            apply_diff(folder / block.place, block.code)
        elif block.place is not None:
            path = folder / block.place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
        elif block.language == "bash":
            code = re.sub(
                r"(scripts/launch\.sh (?!.*run\.steps).*)", rf"\1 {SHORT}", block.code.replace("\\\n", "")
            )
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", code], cwd=folder, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600,
            )  # fmt: skip
            printed += f"$ {code}{done.stdout}"
            assert done.returncode == 0, printed
    return printed


@pytest.mark.whole_run
@pytest.mark.timeout(1800)  # five runs
def test_the_tutorial_works_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    printed = run_blocks(read_blocks((ROOT / "docs/tutorial.md").read_text()), tmp_path, environment)
    assert "trajectories, mean reward 0." in printed
    assert printed.count("finished. Summary") == 5, printed
    assert (tmp_path / "models/largest/model.safetensors").exists()


def copy_project(folder: Path) -> tuple[Path, dict[str, str]]:
    """Copies the project into a folder; its environment is the one of these tests. Returns the copy and the
    variables for its commands."""
    project, place = folder / "slipstream", folder / "environment"
    shutil.copytree(ROOT, project, ignore=NOT_COPIED)
    place.mkdir()
    for part in ("bin", "lib", "pyvenv.cfg"):
        (place / part).symlink_to(Path(sys.prefix) / part)
    path = os.pathsep.join(str(project / part) for part in (".", "scripts", "scripts/bench"))
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    environment |= {"SLIPSTREAM_VENV": str(place), "PYTHONPATH": path}
    prepared = '. scripts/env.sh; touch "$(stamp_of "$backend")" "$(stamp_of "$backend,test")"'
    subprocess.run(["bash", "-c", prepared], cwd=project, env=environment, check=True)
    return project, environment


@pytest.mark.whole_run
@pytest.mark.parametrize("section", ["Add a task", "Add a loss", "Add a transport"])
def test_what_contributing_tells_to_do_works(section: str, tmp_path: Path) -> None:
    project, environment = copy_project(tmp_path)
    printed = run_blocks(read_blocks(read_section("CONTRIBUTING.md", section)), project, environment)
    assert " passed" in printed and "finished. Summary" in printed, printed


@pytest.mark.whole_run
def test_a_reward_made_of_parts_is_trained_and_its_parts_are_figures(tmp_path: Path) -> None:
    project, environment = copy_project(tmp_path)
    text = read_section("docs/rewards.md", "Functions").partition("\n### ")[0]
    printed = run_blocks(read_blocks(text), project, environment)
    assert "finished. Summary" in printed, printed
    (folder,) = (project / "outputs").glob("*/tensorboard")
    events = EventAccumulator(str(folder))
    events.Reload()
    figures = [f"reward/{name}" for name in ("right", "brief", "seconds/right", "seconds/brief")]
    assert all(len(events.Scalars(name)) == 3 for name in figures)
    right, brief, mean = (events.Scalars(f"reward/{name}")[-1].value for name in ("right", "brief", "mean"))
    assert mean == pytest.approx(right + 0.1 * brief, abs=1e-3)


@pytest.mark.whole_run
def test_the_agent_of_the_page_is_trained_through_the_gateway(tmp_path: Path) -> None:
    project, environment = copy_project(tmp_path)
    text = read_section("docs/environments.md", "An agent").partition("\n### ")[0]
    printed = run_blocks(read_blocks(text), project, environment)
    assert "finished. Summary" in printed, printed


def test_the_judge_of_the_page_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    text = read_section("docs/rewards.md", "Judge")
    (block,) = [block for block in read_blocks(text) if block.language == "yaml"]
    with pytest.raises(
        ValueError, match="key_env must name an environment variable that is set, got 'JUDGE_KEY'"
    ):
        make_parts(yaml.safe_load(block.code)["reward"]["parts"])
    monkeypatch.setenv("JUDGE_KEY", "sk")
    (part,) = make_parts(yaml.safe_load(block.code)["reward"]["parts"]).parts
    assert part.weight == 0.1 and isinstance(part.part, JudgePart)
    assert part.part.read_grade("Half of it is right. Grade: 5") == 5.0


def test_the_page_lists_all_parts_and_their_arguments() -> None:
    text = read_section("docs/rewards.md", "Parts").partition("\n**only_if")[0]
    rows = {row.split("|")[1].strip(" `"): row for row in text.splitlines() if row.startswith("| `")}
    for name, place in PARTS.items():
        module, _, class_name = place.partition(":")
        given = set(inspect.signature(getattr(importlib.import_module(module), class_name)).parameters)
        assert set(re.findall(r"`(\w+)`", rows[name].split("|")[3])) == given
