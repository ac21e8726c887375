"""Trackers: several at once, each in a process of its own, and none of them can stop a run."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from buffer_harness import SMALL_RUN, BufferHarness, make_group
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked_folders import TrackedFolder, wait_until

from buffers import messages as m
from buffers.message_fields import GroupSlice
from buffers.trajectory import encode_batch, to_batch
from configs.disk import DiskFull
from configs.load import load_config
from configs.schema import Config
from slipstream.preparation import prepare_run
from slipstream.run_record import RunRecord
from slipstream.stop_signals import STOP_SIGNALS, StopSignals
from slipstream.tracking import keeper, orders, remote, trackers
from slipstream.tracking.tensorboard_files import EventFileWriter
from slipstream.tracking.trackers import Trackers, make_opening
from slipstream_bench.byte_tokenizer import make_byte_tokenizer

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of trackers find `odd_trackers`."""
    paths = [str(ROOT / "tests"), str(ROOT), str(ROOT / "scripts")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def tracked(tmp_path: Path) -> Callable[..., TrackedFolder]:
    def make(*overrides: str, tracker: str = "odd_trackers:WritingTracker") -> TrackedFolder:
        own = [f"tracking.trackers=[{tracker}]", f"tracking.args.file={tmp_path / 'calls.jsonl'}"]
        return TrackedFolder(tmp_path / "run", *own, *overrides)

    return make


def make_odd(tracked: Callable[..., TrackedFolder], deed: str, at: str, *overrides: str) -> TrackedFolder:
    arguments = [f"tracking.args.deed={deed}", f"tracking.args.at={at}"]
    return tracked(*arguments, *overrides, tracker="odd_trackers:OddTracker")


def describe_only(trackers: Trackers) -> dict[str, Any]:
    (one,) = trackers.describe_each().values()
    return one


def wait_for_drops(trackers: Trackers, names: list[str]) -> None:
    wait_until(lambda: {trackers.describe_each()[name]["status"] for name in names} == {"dropped"}, "drops")


# ---- the protocol


def test_an_own_tracker_gets_every_record_in_order_and_is_closed_with_how_the_run_ended(
    tracked: Callable[..., TrackedFolder],
) -> None:
    run = tracked(tracker="tensorboard,'odd_trackers:WritingTracker'")
    (run.folder / "summary.json").write_text('{"steps": 3}')
    (run.folder / "curves.png").write_text("")
    trackers = run.start()
    for step in range(3):
        trackers.log_metrics(step, {"loss": step / 2, "nan": float("nan")})
    trackers.log_metrics(0, {"eval/reward": 0.5}, is_evaluation=True)
    trackers.finish("finished", StopSignals())
    first, *rest, last = run.calls()
    assert first == {"call": "open", "id": None, "num_records": 0, "name": "run", "steps": 7}
    assert [(one["step"], one.get("loss")) for one in rest] == [(0, 0.0), (1, 0.5), (2, 1.0), (0, None)]
    assert last == {
        "call": "close",
        "status": "finished",
        "steps": 3,
        "files": ["summary.json", "curves.png"],
    }
    trackers.close_files()
    whole = {"status": "ok", "reason": None, "logged": 4, "lost": 0}
    assert list(trackers.describe_each().values()) == [whole, whole]
    assert "odd_trackers:WritingTracker: a page" in run.said and not trackers.describe_losses()


def test_a_tracker_is_not_told_what_another_one_needs_to_log_in(tmp_path: Path) -> None:
    config = load_config(
        [
            "tracking.args.key=secret",
            "tracking.mlflow.uri=http://me:secret@host",
            "task.args.judge={url: 'http://me:secret@judge', API_KEY: secret, max_tokens: 5}",
            "task.args.list=[{token: secret}]",
        ]
    )
    for name in ("wandb", "trackio"):
        assert "secret" not in repr(make_opening(config, tmp_path, 0, name))
    args = make_opening(config, tmp_path, 0, "wandb").run.config["task"]["args"]
    assert args["judge"] == {"url": "http://judge", "API_KEY": "(hidden)", "max_tokens": 5}
    assert "secret" in repr(make_opening(config, tmp_path, 0, "a:B").args)
    assert "secret" not in repr(make_opening(config, tmp_path, 0, "mlflow").run)


def test_several_trackers_get_the_same_and_one_that_fails_takes_nothing_from_the_others(
    tmp_path: Path, tracked: Callable[..., TrackedFolder]
) -> None:
    file = tmp_path / "my tracker.py"
    file.write_text(
        "from odd_trackers import *\nclass Mine(WritingTracker):\n    def log_metrics(self, step, metrics):\n"
        "        raise KeyError('mine')\n"
    )
    names = f"'{file}:Mine',tensorboard,'odd_trackers:WritingTracker'"
    run = tracked(tracker=names)
    trackers = run.start()
    for step in range(5):
        trackers.log_metrics(step, {"loss": 1.0})
    trackers.close_files()
    trackers.finish("finished", StopSignals())
    assert [one["step"] for one in run.find("metrics")] == list(range(5))
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(5))
    mine, *others = trackers.describe_each().values()
    assert mine["status"] == "dropped" and "KeyError: 'mine', in the metrics of step 0" in mine["reason"]
    assert [one["status"] for one in others] == ["ok", "ok"] and mine["logged"] == 0
    (told,) = [line for line in run.said if "is dropped" in line]
    (lost,) = trackers.describe_losses()
    assert "Mine" in told and "lacks" in lost


@pytest.mark.parametrize("status", ["finished", "killed"])
def test_a_resumed_run_goes_on_under_the_same_id_and_repeats_no_step_and_no_evaluation(
    tracked: Callable[..., TrackedFolder], status: str
) -> None:
    run = tracked()
    trackers = run.start()
    for step in range(4):
        trackers.log_metrics(step, {"loss": 0.0})
    trackers.log_metrics(2, {"eval/a": 1.0}, is_evaluation=True)
    trackers.finish(status, StopSignals())
    ledger = next((run.folder / "trackers").iterdir())
    with open(ledger, "a") as file:
        file.write('{"step": 9, "ki')  # a line that a crash has cut short
    again = run.start(first_step=2)
    for step in range(2, 6):
        again.log_metrics(step, {"loss": 1.0})
    again.log_metrics(2, {"eval/a": 1.0}, is_evaluation=True)
    again.log_metrics(2, {"eval/b": 1.0}, is_evaluation=True)
    again.finish("finished", StopSignals())
    assert [(one["id"], one["num_records"]) for one in run.find("open")] == [(None, 0), ("first", 5)]
    steps = [(one["step"], one["loss"]) for one in run.find("metrics") if "loss" in one]
    assert steps == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0), (5, 1.0)]
    assert len([one for one in run.find("metrics") if "eval/a" in one or "eval/b" in one]) == 2
    assert describe_only(again)["logged"] == 3


# ---- trackers that misbehave


def test_trackers_that_fail_are_dropped_and_counted(tracked: Callable[..., TrackedFolder]) -> None:
    deeds = [f"raise_at_{at}" for at in ("open", "metrics", "close")]
    deeds += [f"{deed}_at_metrics" for deed in ("exit", "crash", "garble")]
    run = tracked(tracker=",".join(f"'odd_trackers:{deed}'" for deed in deeds))
    trackers = run.start()
    for step in range(20):
        trackers.log_metrics(step, {"loss": 1.0})
    early = [f"odd_trackers:{deed}" for deed in deeds if deed != "raise_at_close"]
    wait_for_drops(trackers, early)
    trackers.log_metrics(20, {"loss": 1.0})
    trackers.finish("finished", StopSignals())
    for name, one in trackers.describe_each().items():
        counts = (0, 21) if name in early else (21, 0)
        assert (one["status"], one["logged"], one["lost"]) == ("dropped", *counts), name
        assert ("SystemExit: enough" in one["reason"]) == ("raise" in name), one
    run.assert_no_process_is_left()


def test_trackers_that_fork_ignore_signals_and_hang_are_dropped_with_all_that_they_have_started(
    tracked: Callable[..., TrackedFolder],
) -> None:
    deeds = [f"fork_at_{at}" for at in ("open", "metrics", "close")]
    # On a slow machine the time must be longer for the deeds to be done at all.
    for timeout_s in (2, 10, 60):
        run = tracked(
            f"tracking.timeout_s={timeout_s}", tracker=",".join(f"'odd_trackers:{deed}'" for deed in deeds)
        )
        trackers = run.start()
        for step in range(20):
            trackers.log_metrics(step, {"loss": 1.0})
        wait_for_drops(trackers, [f"odd_trackers:{deed}" for deed in deeds[:2]])
        trackers.finish("finished", StopSignals())
        run.assert_no_process_is_left()
        for one in trackers.describe_each().values():
            assert one["status"] == "dropped" and "took longer than" in one["reason"]
        if len(run.find("process")) == 4 * len(deeds):
            return
        shutil.rmtree(run.folder)
        for file in run.file.parent.glob(f"{run.file.name}*"):
            file.unlink()
    raise AssertionError("the deeds were never done")


def test_a_tracker_that_prints_a_gigabyte_goes_on_and_its_log_stays_small(
    tracked: Callable[..., TrackedFolder],
) -> None:
    run = make_odd(tracked, "print", "metrics", "tracking.timeout_s=120")
    trackers = run.start()
    trackers.log_metrics(0, {"loss": 1.0})
    trackers.finish("finished", StopSignals())
    assert describe_only(trackers)["status"] == "ok"
    (log,) = (run.folder / "logs").iterdir()
    assert keeper.MAX_LOG_BYTES <= log.stat().st_size < keeper.MAX_LOG_BYTES + 100
    assert log.read_bytes().endswith(b"the rest of the output is left out\n")


def test_records_that_a_slow_tracker_has_no_room_for_are_lost_and_counted_and_said_once(
    tracked: Callable[..., TrackedFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_WAITING", 5)
    monkeypatch.setattr(trackers, "HURRIED_S", 0.1)
    run = make_odd(tracked, "hang", "open", "tracking.timeout_s=500")
    started = run.start()
    for step in range(100):
        started.log_metrics(step, {"loss": 1.0})
    assert describe_only(started)["lost"] == 95
    assert len([line for line in run.said if "too slow" in line]) == 1
    signals = StopSignals()
    signals.was_hurried = True
    started.finish("interrupted", signals)
    assert describe_only(started)["lost"] == 100
    assert describe_only(started)["reason"] == "it took longer than 0.1 s to end"


@pytest.mark.parametrize("deed", ["none", "hang"])
def test_a_tracker_closes_the_run_of_a_driver_that_was_killed_and_the_next_life_waits_for_that(
    tracked: Callable[..., TrackedFolder], deed: str
) -> None:
    run = make_odd(tracked, deed, "close")
    leave_s = 120.0 if deed == "none" else 1.0
    driver = run.start_driver("trackers.log_metrics(0, {'loss': 1.0})", leave_s)
    wait_until(lambda: run.find("metrics"), "metrics")
    driver.kill()
    driver.wait()
    if deed == "none":
        trackers = run.start()
        trackers.log_metrics(0, {"loss": 2.0})
        trackers.log_metrics(1, {"loss": 2.0})
        trackers.finish("finished", StopSignals())
        told = [(one["call"], one.get("status", one.get("step"))) for one in run.calls()]
        first_life = [("open", None), ("metrics", 0), ("close", "killed")]
        second_life = [("open", None), ("metrics", 1), ("close", "finished")]
        assert [one for one in told if one[0] != "process"] == first_life + second_life
    run.assert_no_process_is_left()


def test_a_tracker_whose_keeper_is_killed_dies_with_it(tracked: Callable[..., TrackedFolder]) -> None:
    run = make_odd(tracked, "hang", "metrics", "tracking.timeout_s=120")
    trackers = run.start()
    trackers.log_metrics(0, {"loss": 1.0})
    wait_until(lambda: run.find("metrics"), "metrics")
    (process,) = run.find("process")
    psutil.Process(process["pid"]).parent().kill()
    wait_until(lambda: describe_only(trackers)["status"] == "dropped", "drop")
    trackers.finish("finished", StopSignals())
    run.assert_no_process_is_left()


def test_a_second_signal_ends_the_wait_for_trackers(tracked: Callable[..., TrackedFolder]) -> None:
    run = make_odd(tracked, "hang", "close", "tracking.timeout_s=500")
    trackers = run.start()
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    signals = StopSignals()
    signals.install_handlers()

    def press_twice() -> None:
        wait_until(lambda: run.find("close"), "close")
        for _ in range(2):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press_twice)
    presses.start()
    began = time.monotonic()
    trackers.finish("finished", signals)
    assert time.monotonic() - began < 300
    presses.join()
    for number, handler in zip(STOP_SIGNALS, before, strict=True):
        signal.signal(number, handler)
    assert describe_only(trackers)["reason"] == "the run was told to end at once"
    run.assert_no_process_is_left()


def test_a_run_that_fails_before_its_trackers_are_started_ends_as_it_would_without(
    tracked: Callable[..., TrackedFolder],
) -> None:
    run = tracked()
    trackers = Trackers(run.config, run.folder, 0, run.said.append, before={})
    trackers.finish("failed", StopSignals())
    assert describe_only(trackers)["lost"] == 0 and not run.said and not run.calls()


@pytest.mark.parametrize(
    ("text", "times"), [("half a pair \ud800", 1), ("x", orders.MAX_BYTES)], ids=["surrogate", "long"]
)
def test_a_record_that_no_message_can_hold_costs_the_tracker_and_is_told(
    tracked: Callable[..., TrackedFolder], text: str, times: int
) -> None:
    run = tracked()
    trackers = run.start()
    trackers.log_metrics(0, {text * times: 1.0})
    trackers.finish("finished", StopSignals())
    one = describe_only(trackers)
    assert (one["status"], one["logged"], one["lost"]) == ("dropped", 0, 1)
    assert one["reason"].startswith("the metrics of step 0 must fit into a message: ")


# ---- TensorBoard


def test_tensorboard_that_cannot_write_is_dropped_unless_the_disk_is_full(
    tracked: Callable[..., TrackedFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked(tracker="tensorboard")
    (run.folder / "tensorboard").write_text("a file where a folder should be")
    trackers = run.start()
    for step in range(3):
        trackers.log_metrics(step, {"loss": 1.0})
    one = describe_only(trackers)
    assert (one["status"], one["logged"], one["lost"]) == ("dropped", 0, 3)
    trackers.close_files()
    (run.folder / "tensorboard").unlink()

    def find_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    trackers = run.start()
    trackers.log_metrics(0, {"loss": 1.0})
    monkeypatch.setattr(EventFileWriter, "add_event", find_disk_full)
    with pytest.raises(DiskFull, match="the disk of .*/tensorboard must have room"):
        trackers.log_metrics(1, {"loss": 1.0})


# ---- samples


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Callable[..., BufferHarness]]:
    made = []

    def make(config: Config) -> BufferHarness:
        made.append(BufferHarness(config, tmp_path / "run" / "journal"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_samples_of_some_steps_come_as_tables_with_texts_sources_rewards_and_staleness(
    tracked: Callable[..., TrackedFolder], harness: Callable[[Config], BufferHarness], tmp_path: Path
) -> None:
    make_byte_tokenizer().save_pretrained(tmp_path / "model")
    run = tracked(
        *SMALL_RUN,
        "tracking.samples.count=3",
        "tracking.samples.every=2",
        "generators.max_model_len=10000",
        f"model.path={tmp_path / 'model'}",
        tracker="'odd_trackers:WritingTracker',tensorboard",
    )
    run.config.task.sources = [{"name": name, "size": None, "weight": 1.0} for name in ("even", "odd")]
    buffer = harness(run.config)
    record = RunRecord(run.config, run.folder, None, run.said.append)
    record.start_trackers()
    tokenizer = trackers.SampleReader(run.config, run.folder / "journal")._tokenizer
    prompt, reply = tokenizer.encode("Sort 1 2").ids, tokenizer.encode(" 2 1").ids * 2000
    assert len(reply) == 8000
    leases = {}
    for step in range(3):
        buffer.publish(step)
        for lease in buffer.ask():
            tokens = prompt + (reply if lease.group == 0 else reply[:4])
            changes = {
                "tokens": tokens,
                "sampled": [False] * len(prompt) + [True] * (len(tokens) - len(prompt)),
                "logprobs": [0.0] * len(tokens),
                "versions": [-1] * len(prompt) + [0] * (len(tokens) - len(prompt)),
                "reward": lease.index / 2,
            }
            leases[lease.group] = lease
            rows = encode_batch(to_batch(make_group(lease, **changes)))
            assert buffer.submit(lease, rows) == "accepted"
        taken = buffer.client.take_batch(step, wait_s=5.0)
        num = sum(map(sum, taken.table.column("sampled").to_pylist()))
        done = m.ReportTrainedStep(
            step=step, num_trained=num, idle_s=0, alive_s=1, metrics={"reward/mean": 1.0}
        )
        buffer.client.call(done, m.Acknowledged)
        record.record_news(buffer.client.call(m.WatchRun(after=step, wait_s=5.0), m.RunNews))
    record.close("finished")
    record.close_trackers("finished", StopSignals())
    first, second = run.find("samples")
    assert (first["step"], second["step"]) == (0, 2) and len(first["prompts"]) == 3
    assert set(first["prompts"]) == {"Sort 1 2"}
    events = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    tables = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables[1].splitlines()]
    assert cells[0][:6] == ["source", "prompt", "reply", "reward", "components", "staleness"]
    groups = {int(row[-1]): row for row in cells[2:]}
    for number, row in groups.items():
        index = leases[number].index
        assert row[0] == ("even", "odd")[index % 2] and float(row[3]) == index / 2
        assert row[4] == "correct 1" and row[5] == "2"
    assert all(len(line) < 10_000 for table in tables for line in table.splitlines())
    summary = json.loads((run.folder / "summary.json").read_text())["trackers"]
    assert {one["logged"] for one in summary.values()} == {5}, "three steps and two tables each"


def test_a_model_without_a_tokenizer_costs_the_tables_and_nothing_else(
    tracked: Callable[..., TrackedFolder],
) -> None:
    run = tracked("model.path=there/is/none", tracker="tensorboard")
    trackers = run.start()
    where = GroupSlice(segment=0, offset=0, size=9, xxh3=0, row=0, rows=1)
    trackers.log_samples(0, [where])
    trackers.log_samples(10, [where])
    assert len(run.said) == 1 and run.said[0].startswith("trackers get no samples:")


# ---- the start


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("no_such_module:Tracker", "tracking.trackers must name a class that can be imported, got"),
        ("odd_trackers:Missing", "tracking.trackers must name a class that can be imported, got"),
        ("odd_trackers:IncompleteTracker", "without log_metrics"),
        ("odd_trackers:WritingTracker", "tracking.args must suit odd_trackers:WritingTracker, got {}"),
        ("odd_trackers:SlowToMake", "took longer than 0.5 s for the beginning of the run"),
        ("there/is/none.py:Tracker", "there is no file"),
    ],
)
def test_an_own_tracker_that_cannot_be_made_is_refused_before_anything_else(
    tmp_path: Path, name: str, rule: str
) -> None:
    timeout_s = 0.5 if "Slow" in name else 60
    config = load_config(
        [f"run.outputs={tmp_path}", f"tracking.trackers=['{name}']", f"tracking.timeout_s={timeout_s}"]
    )
    with pytest.raises(ValueError, match="^tracking.") as refused:
        prepare_run(config)
    assert rule in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("names", ["[tensorboard,tensorboard]", "[weights]", "['a:b c']", "[':Class']"])
def test_unknown_trackers_and_those_named_twice_are_refused(names: str) -> None:
    with pytest.raises(ValueError, match="tracking.trackers must be a list of tensorboard, wandb, mlflow"):
        load_config([f"tracking.trackers={names}"])
