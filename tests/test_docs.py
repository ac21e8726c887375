"""The examples of the documentation run as they stand."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from buffers import messages as m
from buffers.buffer import Buffer
from buffers.journal import read_groups
from buffers.trajectory import SCHEMA_VERSION, Trajectory, encode_batch, to_batch
from configs.load import load_config

DOCS = Path(__file__).parents[1] / "docs"


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "example", "exec"), {})
    return out.getvalue()


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a small run, in which a group failed and others were rejected for equal rewards."""
    folder = tmp_path_factory.mktemp("run") / "journal"
    small = [
        "learner.groups_per_step=3",
        "learner.samples_per_prompt=2",
        "run.steps=4",
        "eval.prompts=0",
        "algo=dapo",
        "learner.minibatches=1",
    ]
    buffer = Buffer(load_config(small), folder)
    for step in range(2):
        buffer.progress.publish_version(step, f"w{step}")
        while (lease := buffer.lease_next("g")) is not None:
            if lease.group == 5:
                buffer.fail_lease(lease.id, 7, "KeyError: 'x'")
                continue
            rows = [
                Trajectory(
                    group=lease.group,
                    sample=i,
                    due=lease.due,
                    prompt_id=lease.index,
                    task="t",
                    finish_reason="stop",
                    tokens=[1] * (5 + 4 * i + lease.group),
                    sampled=[False] + [True] * (4 + 4 * i + lease.group),
                    logprobs=[0.0] + [-0.5] * (4 + 4 * i + lease.group),
                    versions=[-1] + [step] * (4 + 4 * i + lease.group),
                    reward=float(i and lease.group % 4 != 1),
                    generator="g",
                    started_at=0.0,
                    finished_at=1.0,
                )
                for i in range(2)
            ]
            buffer.intake.submit_groups(
                "g", [lease.id], [lease.num_samples], SCHEMA_VERSION, memoryview(encode_batch(to_batch(rows)))
            )
        handout = buffer.progress.hand_out(step)
        assert handout is not None
        tokens = sum(buffer.book.pool.get_content(group).tokens for group in handout.groups)
        buffer.progress.finish_step(
            m.ReportTrainedStep(step=step, num_trained=tokens, idle_s=0.0, alive_s=1.0, metrics={})
        )
    buffer.close()
    return folder


@pytest.mark.parametrize(
    ("number", "columns", "cells"),
    [
        (0, ["prompt_id", "from_version", "reward", "samples"], ["0.5"]),
        (1, ["tokens_from", "youngest_token", "oldest_token", "trajectories"], ["8", "16"]),
        (2, ["reason", "error", "tokens"], ["zero_variance", "KeyError: 'x'"]),
    ],
)
def test_the_questions_to_a_journal_are_answered(
    journal: Path, number: int, columns: list[str], cells: list[str]
) -> None:
    answer = run(examples("journal.md")[number].replace("outputs/run/journal", str(journal)))
    assert all(word in answer for word in columns + cells), answer


def test_the_buffer_works_alone_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = examples("buffer.md")
    assert run(code) == "0 [0, 1, 2, 3] 8 rows\n1 [4, 5, 6, 7] 8 rows\n2 [8, 9, 10, 11] 8 rows\n"
    assert len(list(read_groups(tmp_path / "journal"))) == 12
