"""Optional packages: what a configuration needs, however it is said, and that the scripts bring it."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from configs.extras import list_needs
from configs.load import load_config, load_resumed_config, to_yaml
from slipstream import evaluate, extras
from slipstream.evaluated_model import Target

ROOT = Path(__file__).parents[1]
ROWS = "task=dataset"
ROOM = "generators.max_model_len=32768"
GSM8K = "hf:openai/gsm8k:main"
NEEDS = {
    "lora": ["learner.lora.rank=8"],
    "megatron": ["learner.engine=megatron"],
    "liger": ["learner.fsdp.liger=true"],
    "wandb": ["tracking.trackers=['wandb', tensorboard]"],
    "mlflow": ['tracking.trackers=["mlflow"]'],
    "trackio": ["tracking.trackers=[trackio]"],
    "hub": [ROWS, f"data.train='{GSM8K}'"],
}
HUB_FORMS = [
    [ROWS, "data.train=rows.parquet", f"data.eval='{GSM8K}'"],
    [ROWS, f"data.train=[rows.parquet,'{GSM8K}']"],
    [ROWS, f"data.train=[{{name: mine, path: [rows.parquet, '{GSM8K}']}}]"],
    ["eval.benchmarks=[gsm8k]", ROOM],
    ["eval.sets.hard.benchmark=aime24", ROOM],
    [f"eval.sets.mine.data='{GSM8K}'"],
]
NOTHING = [
    [],
    ["tracking.trackers=[tensorboard,my_wandb.py:Mine]"],
    [ROWS, "data.train=hf/rows.parquet"],
    [f"data.train='{GSM8K}'"],
    ["eval.sets.gsm8k.data=test.parquet", ROOM],
    [ROWS, f"data.train='{GSM8K}'", "generators.engine=simulated", "learner.engine=simulated"],
]
RECIPES = {
    "alphabet_sort": {"lora"}, "countdown": set(), "dapo_1p7b": set(), "dapo_math_4b": {"hub"},
    "gsm8k_ppo_0p5b": set(), "gsm8k_qwen2p5_1p5b": {"hub"}, "guess_number": set(), "local_parquet": set(),
    "mixture": set(), "reverse_text": {"hub"}, "smoke": set(), "wordle": set(),
}  # fmt: skip
RECIPE = f"""
task: {{name: dataset}}
data: {{train: [{{name: mine, path: "{GSM8K}"}}]}}
learner: {{lora: {{rank: 8}}, fsdp: {{liger: true}}}}
tracking: {{trackers: [wandb, trackio]}}
"""
FAKE_PYTHON = """#!/bin/bash
case "$*" in *slipstream.*) echo "$*" >> "$SLIPSTREAM_VENV/started"; exec {python} "$@" ;; esac
"""
FAKE_UV = """#!/bin/bash
echo "${@: -1}" >> "$SLIPSTREAM_VENV/installed"
[ -e "$SLIPSTREAM_VENV/in vain" ] && exit
case "${@: -1}" in *liger*) touch "$SLIPSTREAM_VENV/packages/liger_kernel.py" ;; esac
"""


def list_extras(overrides: Sequence[str]) -> set[str]:
    return {need.extra for need in list_needs(load_config(overrides))}


@pytest.mark.parametrize("extra", NEEDS)
def test_a_setting_needs_its_extra(extra: str) -> None:
    assert list_extras(NEEDS[extra]) == {extra}


def test_a_recipe_of_ones_own_and_a_resumed_run_need_what_they_name(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE)
    config = load_config([f"+experiment={recipe}"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    resumed = load_resumed_config(tmp_path, [])
    for one in (config, resumed):
        assert {need.extra for need in list_needs(one)} == {"hub", "liger", "lora", "trackio", "wandb"}


@pytest.mark.parametrize("overrides", HUB_FORMS, ids=str)
def test_rows_of_the_hub_are_found_in_each_form_in_which_they_are_named(overrides: list[str]) -> None:
    assert list_extras(overrides) == {"hub"}


@pytest.mark.parametrize("overrides", NOTHING, ids=str)
def test_what_no_setting_uses_is_not_needed(overrides: list[str]) -> None:
    assert list_extras(overrides) == set()


def test_each_recipe_needs_what_its_file_names() -> None:
    names = {path.stem for path in (ROOT / "configs/experiment").glob("*.yaml")}
    assert {name: list_extras([f"+experiment={name}"]) for name in names} == RECIPES


def test_each_extra_of_the_project_is_needed_by_a_setting_or_by_choice() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    by_choice = {"cpu", "cuda", "test", "peers", "flash", "renderers"}
    assert set(project["optional-dependencies"]) == set(NEEDS) | by_choice


@pytest.mark.parametrize(
    ("words", "run", "expected"),
    [
        ([ROWS, f"data.train='{GSM8K}'", "eval.sets.mine.data=test.parquet", "eval.prompts=0"], True, set()),
        ([ROWS, f"data.train='{GSM8K}'", "data.eval=test.parquet", "eval.prompts=8"], True, set()),
        ([ROWS, f"data.train='{GSM8K}'", "eval.prompts=8"], True, {"hub"}),
        (["learner.lora.rank=8", "tracking.trackers=[wandb]"], True, {"lora"}),
        (["learner.lora.rank=8", "learner.fsdp.liger=true"], False, set()),
        (["eval.benchmarks=[gsm8k]", ROOM], False, {"hub"}),
    ],
)
def test_an_evaluation_needs_no_more_than_it_uses(words: list[str], run: bool, expected: set[str]) -> None:
    target = Target(text="models/mine", run=Path("outputs/mine") if run else None)
    used = evaluate.keep_used(load_config(words), target)
    assert {need.extra for need in list_needs(used)} == expected


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    monkeypatch.delenv(extras.SCRIPT, raising=False)
    monkeypatch.delenv(extras.EXTRAS, raising=False)


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize("extra", NEEDS)
def test_without_a_script_the_setting_the_package_and_the_way_to_it_are_named(extra: str) -> None:
    config = load_config(NEEDS[extra])
    (need,) = list_needs(config)
    with pytest.raises(ValueError) as refused:
        extras.require_extras(config)
    words = f"{need.setting} needs the package {need.package} (pip install 'slipstream[{extra}]' brings it)"
    assert str(refused.value) == f"{words}, got none"


@pytest.mark.usefixtures("lacking")
def test_a_script_is_asked_once_for_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([*NEEDS["lora"], *NEEDS["hub"], *NEEDS["wandb"]])
    monkeypatch.setenv(extras.SCRIPT, "scripts/launch.sh")
    monkeypatch.setenv(extras.EXTRAS, "flash wandb")
    with pytest.raises(extras.ExtrasMissing) as missing:
        extras.require_extras(config)
    assert missing.value.extras == {"flash", "hub", "lora", "wandb"}
    assert extras.SCRIPT not in os.environ, "a program that this one starts must not start the script anew"
    monkeypatch.setenv(extras.SCRIPT, "scripts/launch.sh")
    monkeypatch.setenv(extras.EXTRAS, " ".join(missing.value.extras))
    with pytest.raises(ValueError, match="learner.lora.rank needs the package peft"):
        extras.require_extras(config)
    monkeypatch.setenv(extras.SCRIPT, "scripts/launch.sh")
    extras.require_extras(load_config([]))


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="the package is here already")
@pytest.mark.parametrize("in_vain", [False, True])
def test_the_script_installs_what_a_recipe_needs_and_starts_again_once(tmp_path: Path, in_vain: bool) -> None:
    venv, recipe = tmp_path / "venv", tmp_path / "mine.yaml"
    for name, text in (("python", FAKE_PYTHON.format(python=sys.executable)), ("uv", FAKE_UV)):
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / name).write_text(text)
        (venv / "bin" / name).chmod(0o755)
    (venv / "packages").mkdir()
    if in_vain:
        (venv / "in vain").touch()
    recipe.write_text("learner: {fsdp: {liger: true}}\nmodel: {path: no model}\n")
    paths = os.pathsep.join(map(str, [venv / "packages", ROOT, ROOT / "scripts"]))
    environment = os.environ | {"SLIPSTREAM_VENV": str(venv), "PYTHONPATH": paths}
    words = [f"+experiment={recipe}", f"run.outputs={tmp_path / 'a b'}", "run.name=odd"]
    done = subprocess.run(
        [ROOT / "scripts/launch.sh", *words], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    first, second = (line.rpartition("[")[2] for line in (venv / "installed").read_text().splitlines())
    assert second == first.replace("]", ",liger]"), "the environment as it was, and the extra"
    first, second = (venv / "started").read_text().splitlines()
    assert first == second == f"-P -m slipstream.train {' '.join(words)}"
    assert done.stderr.count("Slipstream cannot start") == 1
    expected = "learner.fsdp.liger needs the package" if in_vain else "model.path must be"
    assert expected in done.stderr and "Traceback" not in done.stderr


def test_a_folder_with_the_name_of_a_package_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rows").mkdir()
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    names = ["my_rows", "my_rows.core", "my_package", "no_such.core", "pytest"]
    assert [extras.is_installed(name) for name in names] == [False, False, True, False, True]
