"""Samples of an evaluation on disk: complete after any kill, readable by stock Arrow, counted as they are."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.evaluated_samples import EvaluatedSamples
from buffers.evaluation_statistics import PromptSamples, summarize_samples
from buffers.segments import is_closed
from buffers.trajectory import SCHEMA, Trajectory


def make_row(
    prompt: int, sample: int, reward: float = 1.0, branch: int = 0, stop: str = "completed"
) -> Trajectory:
    return Trajectory(
        group=prompt, sample=sample, branch=branch, due=7, prompt_id=prompt, task="t", tokens=[1, 2, 3, 4],
        sampled=[False, True, True, branch == 0], logprobs=[0.0, -1.0, -1.0, -1.0], versions=[-1, 7, 7, 8],
        reward=reward, finish_reason="stop", stop=stop, generator="g", started_at=1.0, finished_at=2.0,
    )  # fmt: skip


def make_group(prompt: int, rewards: Sequence[float] = (1.0, 0.0)) -> list[Trajectory]:
    return [make_row(prompt, sample, reward) for sample, reward in enumerate(rewards)]


def write_groups(folder: Path, prompts: Sequence[int]) -> None:
    samples = EvaluatedSamples(folder)
    for prompt in prompts:
        samples.append_group(make_group(prompt))
    samples.close()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    samples = EvaluatedSamples(tmp_path)
    # Two branches of one episode, of which the second has one sampled token less: one reward, one end.
    rows = [
        make_row(5, 0, 0.5),
        make_row(5, 1, 0.25, stop="max_tokens"),
        make_row(5, 1, 0.25, 1, "max_tokens"),
    ]
    told = samples.append_group(rows)
    assert told == PromptSamples(rewards=[0.5, 0.25], num_tokens=8, num_truncated=1, versions=(7, 8))
    samples.append_group(make_group(2))
    samples.close()
    again = EvaluatedSamples(tmp_path)
    assert again.prompts == samples.prompts and list(again.prompts) == [5, 2]
    again.close()
    assert len(list(tmp_path.iterdir())) == 1  # a process without new samples writes nothing


def test_figures_from_disk_are_those_of_the_rewards_in_memory(tmp_path: Path) -> None:
    """0.9 and 0.7 have no exact float32; a threshold of that value counts them all the same."""
    samples = EvaluatedSamples(tmp_path)
    on_disk = samples.append_group(make_group(0, [0.9, 0.7, 0.1]))
    samples.close()
    in_memory = PromptSamples(rewards=[0.9, 0.7, 0.1], num_tokens=6, versions=(7, 7))
    for threshold, passed in ((0.9, 1), (0.7, 2), (0.1, 3), (0.91, 0)):
        both = [
            summarize_samples("s", [prompt], num_failed=0, k=[1, 3], passes_at=threshold)
            for prompt in (on_disk, in_memory)
        ]
        assert both[0].passes == both[1].passes and both[0].passes["1"] == pytest.approx(passed / 3)
        assert both[0].avg == both[1].avg


def test_any_arrow_reader_opens_the_samples(tmp_path: Path) -> None:
    import duckdb
    import polars

    write_groups(tmp_path, [3, 1])
    path = tmp_path / "000000.arrow"
    assert pa.ipc.open_file(path).read_all().schema == SCHEMA
    frame = polars.read_ipc(path)
    assert frame["prompt_id"].to_list() == [3, 3, 1, 1] and frame["reward"].to_list() == [1.0, 0.0, 1.0, 0.0]
    rows = pa.ipc.open_file(path).read_all()
    assert duckdb.from_arrow(rows).aggregate("avg(reward)").fetchall() == [(0.5,)]


@given(cut=st.integers(0, 4000), garbage=st.binary(max_size=20))
@settings(max_examples=60, deadline=None)
def test_a_killed_process_loses_no_whole_prompt(
    tmp_path_factory: pytest.TempPathFactory, cut: int, garbage: bytes
) -> None:
    folder = tmp_path_factory.mktemp("samples")
    write_groups(folder, [0, 1, 2])
    path = folder / "000000.arrow"
    whole = path.read_bytes()
    reader = pa.ipc.open_file(path)
    assert reader.num_record_batches == 3
    cut = len(whole) - 1 - cut % len(whole)
    path.write_bytes(whole[:cut] + garbage.replace(b"ARROW1", b""))
    samples = EvaluatedSamples(folder)
    # Each prompt that the file still holds whole is there, in order, and no other.
    known = list(samples.prompts)
    assert known == [0, 1, 2][: len(known)]
    for prompt in range(3):
        if prompt not in samples.prompts:
            samples.append_group(make_group(prompt))
    samples.close()
    assert all(is_closed(one) for one in folder.glob("*.arrow"))
    again = EvaluatedSamples(folder)
    assert sorted(again.prompts) == [0, 1, 2]
    assert all(one == again.prompts[0] for one in again.prompts.values())


def test_a_process_that_is_killed_before_its_footer_keeps_all_its_prompts(tmp_path: Path) -> None:
    killed = EvaluatedSamples(tmp_path)
    for prompt in range(4):
        killed.append_group(make_group(prompt))
    # No close: as after SIGKILL.
    assert sorted(EvaluatedSamples(tmp_path).prompts) == [0, 1, 2, 3]
