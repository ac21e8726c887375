"""Every recipe of `configs/experiment/` composes, fits into the memory of its GPUs, and runs.

A recipe is found by its file. It runs for two steps with a model of the tiny model's size and, where it reads
rows, with ten made-up ones in the columns of its data set (`LAYOUTS`).
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pages import ROOT, list_commands, read_blocks
from recipe_run import LONGEST, RecipeEngine, make_speaking_model

from configs.checks import find_warnings
from configs.load import FOLDER, load_config
from configs.schema import Config
from configs.sizes import count_sizes
from learners.memory import GIB, plan_memory
from slipstream.preparation import prepare_run

RECIPES = sorted(path.stem for path in (FOLDER / "experiment").glob("*.yaml"))
PUBLISHED = [name for name in RECIPES if load_config([f"+experiment={name}"]).model.path != "tiny"]
"""Recipes for pretrained models: somebody else's runs."""
PAGE = ROOT / "docs/recipes.md"
FACTS = ("Source", "Hardware", "Published", "Run", "Model")
GPU_GIB = 79.0
"""Memory that CUDA shows of a GPU of 80 GB."""
ENGINE_SHARE = 0.9
"""Share of a GPU's memory that an engine and a rank may take together."""


def describe_model(kind: str, *sizes: int) -> dict[str, Any]:
    """Returns the sizes of a public model, as its config.json has them."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "model_type": kind,
        **dict(zip((*names, "intermediate_size"), sizes, strict=True)),
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }


MODELS = {
    "Qwen2.5-0.5B": (describe_model("qwen2", 896, 24, 14, 2, 64, 4864), 0.494e9),
    "Qwen2.5-1.5B": (describe_model("qwen2", 1536, 28, 12, 2, 128, 8960), 1.544e9),
    "Qwen2.5-3B": (describe_model("qwen2", 2048, 36, 16, 2, 128, 11008), 3.086e9),
    "Qwen3-0.6B": (describe_model("qwen3", 1024, 28, 16, 8, 128, 3072), 0.596e9),
    "Qwen3-1.7B": (describe_model("qwen3", 2048, 28, 16, 8, 128, 6144), 1.721e9),
    "Qwen3-4B": (describe_model("qwen3", 2560, 36, 32, 8, 128, 9728), 4.022e9),
}
"""Sizes of public models, and how many parameters their pages name."""


def ask(number: int) -> str:
    return f"What is {number} + {number}?"


def make_chat_row(number: int) -> dict[str, Any]:
    """verl's columns."""
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": ask(number)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"split": "train", "index": number},
    }


def make_gsm8k_row(number: int) -> dict[str, Any]:
    return {"question": ask(number), "answer": f"Twice {number}.\n#### {2 * number}"}


LAYOUTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "hf:openai/gsm8k:main": make_gsm8k_row,
    "hf:openai/gsm8k:main@test": make_gsm8k_row,
    "hf:MathArena/aime_2025@train": lambda number: {"problem": ask(number), "answer": 2 * number},
    "hf:PrimeIntellect/Reverse-Text-RL": lambda number: {"prompt": f"Text {number}"},
    "hf:PrimeIntellect/Reverse-Text-RL@train": lambda number: {"prompt": f"Text {number}"},
    "hf:hamishivi/DAPO-Math-17k-Processed_filtered": lambda number: {
        "source_prompt": [{"role": "user", "content": ask(number)}],
        "ground_truth": str(2 * number),
    },
    "~/data/dapo/dapo-math-17k-cleaned.parquet": make_chat_row,
    "~/data/dapo/aime-2024-cleaned.parquet": make_chat_row,
    "~/data/gsm8k/train.parquet": make_chat_row,
    "rows/backwards.parquet": make_chat_row,
    "~/data/gsm8k/test.parquet": make_chat_row,
}
"""A made-up row in the columns of each data set that a recipe names, by its number."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps prepared rows out of the user's cache."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecipeEngine]:
    folder = tmp_path_factory.mktemp("model")
    make_speaking_model(folder)
    with RecipeEngine(folder) as engine:
        yield engine


def write_rows(named: Any, folder: Path, first: int) -> Any:
    """Writes ten rows for each data set that the recipe names; returns the same with the files in its
    place."""
    if isinstance(named, list):
        return [write_rows(one, folder, first) for one in named]
    if isinstance(named, dict):
        return named | {"path": write_rows(named["path"], folder, first)} if "path" in named else named
    if named is None:
        return None
    assert named in LAYOUTS, f"LAYOUTS must have a row of {named}"
    path = folder / f"{first}-{re.sub('[^a-zA-Z0-9]', '-', named)}.parquet"
    pq.write_table(
        pa.Table.from_pylist([LAYOUTS[named](number) for number in range(first, first + 10)]), path
    )
    return str(path)


def write_reward(function: str | None, folder: Path) -> str | None:
    """Writes the file of a reward function that docs/recipes.md shows."""
    place, _, name = (function or "").rpartition(":")
    if not place.endswith(".py"):
        return function
    (code,) = [block.code for block in read_blocks(PAGE.read_text()) if block.place == place]
    (folder / place).write_text(code)
    return f"{folder / place}:{name}"


def shorten_run(overrides: list[str], engine: RecipeEngine, folder: Path) -> Config:
    """Returns the run of these overrides with few groups, two steps and the engine's model."""
    named = load_config(overrides)
    small = [
        f"model.path={engine.model}",
        "model.dtype=float32",
        "run.steps=2",
        f"run.outputs={folder}",
        "run.name=short",
        "learner.ranks=1",
        "learner.groups_per_step=2",
        f"learner.samples_per_prompt={min(2, named.learner.samples_per_prompt)}",
        f"learner.minibatches={min(2, named.learner.minibatches)}",
        "learner.parity_every=0",
        "generators.count=1",
        "sampling.max_tokens=8",
        f"generators.max_model_len={LONGEST}",
        # A recipe's own may be as long as the small model.
        "data.max_prompt_tokens=null",
        f"eval.prompts={min(2, named.eval.prompts)}",
        *[
            f"eval.sets.{name}.{key}={min(2, getattr(one, key))}"
            for name, one in named.eval.sets.items()
            for key in ("prompts", "samples")
            if getattr(one, key) is not None
        ],
        *[f"eval.sets.{name}.max_tokens=8" for name in named.eval.sets],
        # The model's rewards may all be equal, and then no group would be left.
        "algo.dynamic_sampling=false",
    ]
    return load_config([*overrides, *small])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_two_steps(name: str, engine: RecipeEngine, tmp_path: Path) -> None:
    config = shorten_run([f"+experiment={name}"], engine, tmp_path)
    rows = {
        "train": write_rows(config.data.train, tmp_path, 0),
        "eval": write_rows(config.data.eval, tmp_path, 10),
    }
    reward = replace(config.reward, function=write_reward(config.reward.function, tmp_path))
    sets = {
        set_name: replace(one, data=write_rows(one.data, tmp_path, 10))
        for set_name, one in config.eval.sets.items()
    }
    config = replace(
        config,
        data=replace(config.data, **rows),
        eval=replace(config.eval, sets=sets),
        reward=reward,
    )
    train_two_steps(config, engine)


def train_two_steps(config: Config, engine: RecipeEngine) -> None:
    config, folder, _ = prepare_run(config)
    news = engine.run_recipe(config, folder.resolve())
    status = news.status
    assert (status.num_trained_steps, status.version) == (2, 2)
    assert status.groups.trained == 4 and status.num_quarantined == 0
    assert status.tokens.trained > 0 and not any(status.groups.rejected.values())
    # Of a version between, an evaluation may be given up.
    scored = {
        (one.evaluation_set, one.version): one.samples
        for one in (record.result for record in news.evaluations)
        if one.version in (0, 2)
    }
    asked = {name: one.num_prompts * one.samples for name, one in config.eval.sets.items()}
    if config.eval.prompts:
        asked["held_out"] = config.eval.prompts
    assert scored == {(name, version): num for name, num in asked.items() for version in (0, 2)}


MIGRATED = [words[1:] for words in list_commands(ROOT / "docs/migrate.md") if words[0] == "scripts/launch.sh"]
"""The commands that docs/migrate.md sets beside those of verl and TRL."""


@pytest.mark.parametrize("overrides", MIGRATED, ids=["verl", "TRL"])
def test_the_commands_beside_those_of_verl_and_trl_train(
    overrides: list[str], engine: RecipeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for page in ("recipes.md", "migrate.md"):
        for block in read_blocks((ROOT / "docs" / page).read_text()):
            if block.place is not None:
                (tmp_path / block.place).write_text(block.code)
    for script in ("make_rows.py", "make_text_rows.py"):
        subprocess.run([sys.executable, script], check=True)
    train_two_steps(shorten_run(overrides, engine, tmp_path), engine)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_and_warns_of_nothing_but_what_its_source_does(name: str) -> None:
    config = load_config([f"+experiment={name}"])
    known = ("learner.minibatches=1: the clip", "algo.accept_uncorrected=true: tokens")
    assert not [one for one in find_warnings(config) if not one.startswith(known)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_says_where_it_is_from_and_whether_it_was_run(name: str) -> None:
    text = (FOLDER / "experiment" / f"{name}.yaml").read_text()
    header = text.partition("\ndefaults:")[0]
    for fact in FACTS:
        assert re.search(rf"^# {fact}: \S", header, re.MULTILINE), fact
    folder = load_config([f"+experiment={name}"]).model.path
    assert f"--local-dir {folder}\n" in header
    assert "# Run: not by this project." in header


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_evaluates_as_its_source_does(name: str) -> None:
    """It says how often and how each prompt is asked, in a set beside which no other one stands."""
    evaluation = load_config([f"+experiment={name}"]).eval
    (one,) = evaluation.sets.values()
    assert evaluation.prompts == 0 and one.max_tokens is not None


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_fits_into_gpus_of_80_gb(name: str, tmp_path: Path) -> None:
    config = load_config([f"+experiment={name}"])
    (model,) = [one for one in MODELS if config.model.path.startswith(f"models/{one}-")
                or config.model.path == f"models/{one}"]  # fmt: skip
    sizes, num_parameters = MODELS[model]
    assert count_sizes(sizes).parameters == pytest.approx(num_parameters, rel=2e-3)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    local = replace(config, model=replace(config.model, path=str(tmp_path)))
    plan = plan_memory(local, cuda=True)
    assert plan is not None and plan.ranks == config.num_learner_ranks
    text = (FOLDER / "experiment" / f"{name}.yaml").read_text()
    (num_gpus,) = map(int, re.findall(r"# Hardware: (\d+) ", text))
    if num_gpus >= config.generators.count + config.num_learner_ranks:
        assert plan.total_bytes / GIB < GPU_GIB
    else:
        # One GPU for both: the engine holds the model in two bytes a parameter, and needs room for its KV.
        assert config.generators.count == config.num_learner_ranks == num_gpus == 1
        assert plan.total_bytes / GIB + 2 * num_parameters / GIB + 4 < ENGINE_SHARE * GPU_GIB
