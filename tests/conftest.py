"""Fixtures that several test files share: models, batches that look like a generator's, and whole runs."""

import atexit
import contextlib
import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings

# Set before torch is imported, and as in the generators, whose bits are compared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from nests import ROWS, nursery_for_all
from runs import StartedRun
from tiny_models import find_tiny_model

from buffers.trajectory import Trajectory
from slipstream.nursery import FOLDER

if TYPE_CHECKING:
    from buffer_harness import BufferHarness

ROOT = Path(__file__).parents[1]


settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

making: list[subprocess.Popen[bytes]] = []
"""The process that makes the tiny model, if it was started."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that start runs as a user does; these may take longer."""
    for item in items:
        used = {"start", "main_job", "lost"} & set(getattr(item, "fixturenames", ()))
        # A file's own fixture `start` is another one.
        if used and not hasattr(item.module, "start"):
            item.add_marker(pytest.mark.whole_run)
        if item.get_closest_marker("whole_run"):
            assert may_start_runs(item.path), (
                f"{item.path} must import `runs` or name whole_run, or `-m whole_run` misses it"
            )
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(900))


def may_start_runs(path: Path) -> bool:
    text = path.read_text()
    return "from runs import" in text or "whole_run" in text


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files without whole runs where only whole runs are wanted, because importing a file takes
    long."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return (
        True
        if is_test and config.option.markexpr == "whole_run" and not may_start_runs(collection_path)
        else None
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts work that takes long and is needed later, beside the tests that come first."""
    if session.config.option.collectonly:
        return
    gc.collect()
    # Without it nanobind reports as leaks what the end of the interpreter does not collect.
    atexit.register(gc.unfreeze)
    # Libraries hold half a million objects, which no collection need look at again.
    gc.freeze()
    if "ranks" in sys.modules and session.config.option.markexpr != "whole_run":
        sys.modules["ranks"].warm_up()
    if ROWS not in os.environ and any(
        "tiny_model" in getattr(item, "fixturenames", ()) for item in session.items
    ):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        making.append(subprocess.Popen([sys.executable, "-m", "tests.tiny_models"], cwd=ROOT, **quiet))


def pytest_unconfigure() -> None:
    for process in making:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def seed_randomness() -> None:
    """Lets a test draw the same numbers whatever ran before it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny model (made once, then cached), for whole runs.

    Its weights differ from machine to machine, so nothing that a test asserts may follow from them.
    `fixed_model` is for that.
    """
    for process in making:
        # If it has failed, so will this process, and say why.
        process.wait()
    return find_tiny_model()


@pytest.fixture(scope="session")
def fixed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen3 of the tiny model's size whose weights are drawn, not trained.

    The weights are the same on every machine, and large enough that the next token's distribution differs
    from place to place.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rng, folder = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("models") / "fixed"
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=rng)
        parameter.data = 1 + 0.1 * drawn if parameter.dim() == 1 else 1.5 * drawn / parameter.shape[1] ** 0.5
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def trajectories() -> list[Trajectory]:
    """Six groups of two trajectories, of many lengths, over the tiny model's vocabulary."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(6):
        for sample in range(2):
            prompt, response = rng.integers(3, 9), rng.integers(1, 12)
            length = int(prompt + response)
            sampled = [i >= prompt for i in range(length)]
            rows.append(
                Trajectory(
                    group=group,
                    sample=sample,
                    due=0,
                    prompt_id=group,
                    task="t",
                    sampled=sampled,
                    finish_reason="stop",
                    tokens=rng.integers(0, 300, length).tolist(),
                    versions=[0 if s else -1 for s in sampled],
                    logprobs=[float(-rng.exponential()) if s else 0.0 for s in sampled],
                    generator="g",
                    reward=float(rng.random()),
                    started_at=0.0,
                    finished_at=1.0,
                )
            )
    return rows


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo group of this process alone."""
    import torch.distributed as dist

    rendezvous = tmp_path_factory.mktemp("gloo") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def shared_nursery() -> Iterator[None]:
    """Lets runs that are started while it lasts fork their workers from one nursery: from tests/rows.py's, or
    from one made here."""
    with contextlib.nullcontext() if FOLDER in os.environ else nursery_for_all():
        yield


@pytest.fixture
def start(tmp_path: Path, shared_nursery: None) -> Iterator[Callable[..., StartedRun]]:
    runs: list[StartedRun] = []

    def begin(*overrides: str, outputs: Path = tmp_path) -> StartedRun:
        runs.append(StartedRun(outputs, *overrides))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.kill()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Folder of a file system of 1.5 MB, which can be made larger."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "none", place]).returncode
    ):
        pytest.skip("mounting a small file system needs more rights than this user has")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Callable[..., "BufferHarness"]]:
    """Starts buffers of a small run, with overrides, and closes them."""
    from buffer_harness import SMALL_RUN, BufferHarness

    from configs.load import load_config

    running: list[BufferHarness] = []

    def start(*overrides: str) -> BufferHarness:
        running.append(BufferHarness(load_config([*SMALL_RUN, *overrides]), tmp_path / "journal"))
        return running[-1]

    yield start
    for one in running:
        one.close()
