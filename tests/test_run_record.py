"""The summary and the curves of a run that goes on."""

import json
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from configs.load import load_config
from slipstream import curves
from slipstream.run_record import RunRecord
from slipstream.tracking.tensorboard_files import TensorBoardFiles, read_scalars


def make_news(num_steps: int) -> Any:
    """Returns the status of a run, as far as the summary reads it."""
    account = SimpleNamespace(total=1, trained=1, masked=0, rejected={}, in_flight=0)
    zeros = dict.fromkeys(
        (
            *("skipped_evaluations", "trained_twice", "learner_idle_share", "generator_idle_share"),
            *("weight_updates", "weight_bytes", "fetched_bytes", "prepare_s_mean", "pause_s_mean"),
            *("digest_checks", "digest_mismatches", "admission_lag"),
        ),
        0,
    )
    steps = {"num_trained_steps": num_steps, "version": num_steps, "elapsed_s": 1.0}
    empty = {name: {} for name in ("sources", "staleness_histogram", "milestones", "generators")}
    return SimpleNamespace(tokens=account, groups=account, evaluators=[], **steps, **empty, **zeros)


@pytest.mark.parametrize(
    ("before", "resumed_at", "first"),
    [
        ({"steps": 50, "reward": {"first": 0.0, "last": 0.4}}, 50, 0.0),
        ({"steps": 2, "reward": {"first": 0.5, "last": 0.5}}, 2, (2 * 0.5 + 3 * 1.0) / 5),
        ({"steps": 4, "reward": {"first": 0.5, "last": 0.5}}, 2, (4 * 0.5 + 1.0) / 5),
        ({"steps": 0, "reward": {"first": None, "last": None}}, 0, 1.0),
        ({}, 0, 1.0),
    ],
)
def test_the_first_reward_of_a_resumed_run_is_that_of_its_first_five_steps(
    tmp_path: Path, before: dict[str, Any], resumed_at: int, first: float
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(before))
    record = RunRecord(load_config([]), tmp_path, resumed_at)
    record._rewards = {step: 1.0 for step in range(resumed_at, resumed_at + 9)}
    reward = record.make_summary(make_news(resumed_at + 9), "finished")["reward"]
    assert reward == {"first": pytest.approx(first), "last": 1.0}


@pytest.mark.parametrize(("resumed_at", "rates"), [(None, (450.0, 350.0)), (3, (50.0, 40.0))])
def test_tokens_a_second_are_those_of_this_command(
    tmp_path: Path, resumed_at: int | None, rates: tuple[float, float]
) -> None:
    record = RunRecord(load_config([]), tmp_path, resumed_at)

    def tell(total: int, trained: int, elapsed_s: float) -> Any:
        status = make_news(3)
        account = SimpleNamespace(total=total, trained=trained, masked=0, rejected={}, in_flight=0)
        status.tokens, status.elapsed_s = account, elapsed_s
        record.record_news(SimpleNamespace(status=status, records=[], evaluations=[]))
        return status

    tell(800, 620, 0.0)  # version 0 of this command is not published yet
    throughput = record.make_summary(tell(900, 700, 2.0), "running")["throughput"]
    assert (throughput["generated_tokens_per_s"], throughput["trained_tokens_per_s"]) == rates


def test_curves_are_those_that_tensorboard_shows_after_restarts_and_a_record_that_was_cut_short(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tensorboard"
    files = TensorBoardFiles(folder, 0, {"config": "a text"})
    for life, (first, last) in enumerate([(0, 10), (7, 12), (12, 15)]):
        files.rewind_to_step(first)
        files.log_samples(first, [])
        for step in range(first, last):
            files.log_metrics(step, {"reward/mean": step + life / 4, "policy/entropy": 1.0, "other": 5.0})
    files.close()
    newest = max(folder.iterdir())
    newest.write_bytes(newest.read_bytes()[:-9])
    found = read_scalars(folder, {"reward/mean", "missing"}, 1000)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    (text,) = {event.tensor_proto.string_val[0] for event in events.Tensors("config")}
    assert text == b"a text"
    shown = {event.step: event.value for event in events.Scalars("reward/mean")}
    assert found == {"reward/mean": shown, "missing": {}} and sorted(shown) == list(range(14))
    assert curves.draw_curves(tmp_path, []).read_bytes()[:4] == b"\x89PNG"


def test_curves_of_a_long_run_with_many_metrics_take_little_memory(tmp_path: Path) -> None:
    """The files hold 20 MB; 4,000 steps of 200 metrics would be 800,000 values."""
    tags = [*(f"group/{number}" for number in range(199)), "mean"]
    values = [Summary.Value(tag=tag, simple_value=0.5) for tag in tags]
    event = Event(wall_time=1.0, summary=Summary(value=values))
    with open(tmp_path / "events.out.tfevents.1", "wb") as file:
        for step in range(4000):
            event.step = step
            data = event.SerializeToString()
            file.write(struct.pack("<Qxxxx", len(data)) + data + bytes(4))
    tracemalloc.start()
    found = read_scalars(tmp_path, {"mean"}, 1000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 700 < len(found["mean"]) < 1300 and most < 2 << 20
