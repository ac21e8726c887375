"""A learner that loses a rank goes on from its newest checkpoint, and nobody else notices more than a longer
step."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import zmq
from buffer_harness import SMALL_RUN, BufferHarness
from runs import SIMULATED, StartedRun, assert_accounts_close, is_alive
from safetensors.torch import load_file
from scripted import ScriptedRole
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_publication import publish

from buffers import messages as m
from buffers.client import BufferClient, RefusedByBuffer
from buffers.run_status import GeneratorReport
from configs.load import load_config
from learners import checkpoint
from learners.publication import Publication
from learners.startup import open_announcements
from slipstream.cluster import run_cluster
from slipstream.nursery import FOLDER, Stage, run_nursery
from slipstream.role_failures import RoleFailed
from slipstream.role_logs import read_log_end
from slipstream.stop_signals import StopSignals
from slipstream.supervisor import LearnerRanks, LostRank
from sync.publisher import Publisher

SYNCHRONOUS = [
    "mode=on_policy", "learner.ranks=2", "generators.count=1", "learner.groups_per_step=8",
    "learner.samples_per_prompt=4", "eval.prompts=0", "learner.lr=1e-3", "learner.warmup_steps=0",
    "learner.checkpoint_every=2", "run.steps=10",
    "algo=ppo", "learner.minibatches=2",
]  # fmt: skip
"""With a critic and a reference: whatever a learner holds is lost with it."""


def assert_every_step_is_recorded_once(run: StartedRun, steps: int, *tags: str) -> None:
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    for tag in ("reward/mean", "ledger/trained", *tags):
        recorded = [event.step for event in events.Scalars(tag)]
        assert sorted(set(recorded)) == recorded, f"{tag} has a step twice: {recorded}"
        missing = set() if tag == "ledger/trained" else set(range(steps)) - set(recorded)
        assert len(missing) <= 2, (
            f"a driver that is killed has recorded all but the last steps, and lost {missing} of {tag}"
        )


def test_a_run_that_lost_its_buffer_a_rank_and_then_its_driver_ends_with_the_bits_of_one_that_was_left_alone(
    start: Callable[..., StartedRun], tmp_path: Path, tiny_model: Path
) -> None:
    left_alone, run = start(*SYNCHRONOUS, outputs=tmp_path / "alone"), start(*SYNCHRONOUS)
    run.wait_for(lambda: checkpoint.find_latest(run.folder / "checkpoints") is not None, "checkpoint")
    run.wait_for(lambda: run.steps() >= 3, "third step")
    generators = run.roles("GeneratorRole")
    run.lose_buffer()
    run.lose_a_rank(1)
    run.wait_for(lambda: run.rewinds(), "rewind")
    run.lose_buffer()
    run.wait_for(lambda: run.steps() >= 6, "sixth step")
    assert run.roles("GeneratorRole") == generators, "the same processes throughout"
    run.process.kill()
    again = start(f"run.resume={run.folder}")
    code, out = again.finish()
    assert code == 0, out
    code, out = left_alone.finish()
    assert code == 0, out
    for started in (left_alone, run, again):
        started.assert_nothing_left()
    printed = run.process.stdout.read()  # type: ignore[union-attr]
    assert re.search(
        r"learner-1 has died: the learner goes on from step [246] \(restart 1 of 3\)", printed
    ), printed
    summary = again.summary()
    assert (summary["status"], summary["steps"]) == ("finished", 10)
    assert summary["restarts"] == {"learner": 1, "buffer": 2}
    assert summary["groups"]["trained"] == 10 * 8
    assert_accounts_close(summary)
    assert_every_step_is_recorded_once(
        again,
        10,
        "critic/loss",
        "critic/explained_variance",
        "policy/kl_reference",
        "staleness_0/clip_fraction",
    )
    assert {path.name for path in (run.folder / "checkpoints" / "step_10").iterdir()} == {
        "manifest.json",
        "engine",
        "critic",
    }
    expected, found = (last_tensors(started.folder) for started in (left_alone, again))
    assert len(expected) > 40 and expected.keys() == found.keys()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, f"{len(different)} of {len(expected)} tensors differ: {different[:3]}"
    # Two ranks train the journal again to the bits of two ranks.
    replay = [sys.executable, "-P", "-m", "slipstream.replay", str(run.folder)]
    done = subprocess.run(replay, capture_output=True, text=True, check=False)
    same = "bit for bit the same as the run in its checkpoints of steps"
    assert done.returncode == 0 and same in done.stdout, done.stdout + done.stderr


def last_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Weights, optimizer and generators of random numbers in the newest checkpoint, of all ranks."""
    newest = checkpoint.find_latest(run / "checkpoints")
    assert newest is not None and newest.manifest.step == 10
    files = newest.folder.rglob("*.safetensors")
    return {
        f"{file.relative_to(run)} {name}": tensor
        for file in files
        for name, tensor in load_file(file).items()
    }


def test_the_learner_begins_again_where_there_is_no_checkpoint_and_goes_on_from_one_where_there_is(
    start: Callable[..., StartedRun],
) -> None:
    # Nearly a second a step: ranks are lost where they are meant to be.
    slow = "generators.simulated.train_tokens_per_s=400"
    run = start(*SIMULATED, slow, "run.steps=24", "learner.checkpoint_every=8")
    run.wait_for(lambda: run.steps() >= 2, "second step")
    generators = run.roles("GeneratorRole")
    run.lose_a_rank(0)
    run.wait_for(lambda: run.rewinds() == [0], "rewind")
    run.wait_for(lambda: run.steps() >= 10, "tenth step")
    run.lose_a_rank(0)
    run.wait_for(lambda: run.rewinds() == [0, 8], "second rewind")
    assert run.roles("GeneratorRole") == generators
    code, out = run.finish()
    assert code == 0, out
    assert (
        "learner-0 has died: the learner goes on from the beginning: there is no checkpoint yet (restart 1 "
        "of 3)" in out
    )
    assert "learner-0 has died: the learner goes on from step 8 (restart 2 of 3)" in out
    assert "finished after 2 restarts of the learner" in out
    summary = run.summary()
    assert (summary["status"], summary["steps"]) == ("finished", 24)
    assert summary["restarts"] == {"learner": 2, "buffer": 0}
    assert summary["groups"]["trained"] == 24 * 4
    assert_accounts_close(summary)
    assert_every_step_is_recorded_once(run, 24)
    run.assert_nothing_left()


# ---- which rank is to blame


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # so that workers find this file
        patch.delenv(FOLDER, raising=False)
        imports = ["ray._private.workers.default_worker", "slipstream.roles", "scripted"]
        with run_nursery({"buffer": Stage([], imports)}), run_cluster(load_config([])):
            yield


class Play:
    """Ranks that follow a script each."""

    def __init__(self, folder: Path, *scripts: str, max_restarts: int = 1) -> None:
        for rank, script in enumerate(scripts):
            (folder / f"learner-{rank}").write_text(script)
        config = load_config([f"learner.ranks={len(scripts)}", f"learner.max_restarts={max_restarts}"])
        places: Any = SimpleNamespace(
            start_rank=lambda rank: ray.remote(ScriptedRole).remote(f"learner-{rank}"),
            is_on_driver_node=lambda name: True,
            spans_nodes=False,
            read_log_end=lambda name: read_log_end(name, folder / "logs"),
        )
        network: Any = SimpleNamespace(
            place_learner=lambda config: (config, "tcp://127.0.0.1:1"),
            configure_rank=lambda config, rank: config,
        )
        self.ranks = LearnerRanks(config, folder, "nowhere", places, network, StopSignals())
        self.ranks.start(None)

    def find_lost_rank(self) -> LostRank:
        deadline = time.monotonic() + 120
        while (lost := self.ranks.find_lost_rank()) is None:
            assert time.monotonic() < deadline, "no lost rank was seen"
            time.sleep(0.05)
        return lost

    def end(self) -> None:
        processes = [rank.process for rank in self.ranks._ranks if rank.process is not None]
        self.ranks.kill()
        assert not any(is_alive(process) for process in processes)


@pytest.mark.parametrize(
    ("scripts", "blamed"),
    [
        (("notice", "die"), "learner-1 has died"),
        (("die", "notice"), "learner-0 has died"),
        (("train", "die"), "learner-1 has died"),
        (("notice", "raise"), "learner-1 has failed (RuntimeError: out of memory)"),
        (("raise", "train"), "learner-0 has failed (RuntimeError: out of memory)"),
    ],
)
def test_the_rank_that_was_lost_first_is_named_and_not_the_one_that_noticed(
    cluster: None, tmp_path: Path, scripts: tuple[str, ...], blamed: str
) -> None:
    play = Play(tmp_path, *scripts)
    assert str(play.find_lost_rank()) == blamed
    play.end()


def test_what_the_user_has_caused_is_not_tried_again_and_the_last_restart_is_the_last(
    cluster: None, tmp_path: Path
) -> None:
    play = Play(tmp_path, "notice", "refuse")
    with pytest.raises(RoleFailed, match="^learner-1: the task is wrong$"):
        play.find_lost_rank()
    play.end()
    play = Play(tmp_path, "train", "die", max_restarts=1)
    assert play.find_lost_rank().name == "learner-1"
    play.end()
    play.ranks.start(None)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner-1.log").write_text("its last words\n")
    with pytest.raises(RoleFailed, match="^learner-1 has died. The end of its log:\nits last words"):
        play.find_lost_rank()
    play.end()


def test_a_rank_that_does_not_listen_is_killed_all_the_same(cluster: None, tmp_path: Path) -> None:
    play = Play(tmp_path, "stop", "die")
    assert play.find_lost_rank().name == "learner-1"
    play.end()


# ---- the buffer


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[BufferHarness]:
    harness = BufferHarness(load_config([*SMALL_RUN, "eval.prompts=2"]), tmp_path / "journal")
    yield harness
    harness.close()


def test_what_a_dead_learner_has_sent_does_not_reach_the_life_after_it(harness: BufferHarness) -> None:
    dead, driver, learner = (
        harness.client,
        BufferClient(harness.server.address),
        BufferClient(harness.server.address),
    )
    harness.publish(0)
    announcer = open_announcements(dead)
    waiting = dead.send_request(m.RequestBatch(step=0, wait_s=30.0))
    driver.call(m.RewindToStep(step=0), m.Acknowledged)
    for client in (dead, announcer):
        with pytest.raises(RefusedByBuffer, match="PublishVersion of a life before the rewind"):
            client.call(m.PublishVersion(version=1, manifest_locator="late"), m.Acknowledged)
    announcer.close()
    learner.call(m.PublishVersion(version=0, manifest_locator="anew"), m.PublishedVersion)
    assert driver.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status.version == 0
    leases = harness.client.call(m.RequestLeases(generator="g", count=100, wait_s=0.2), m.LeaseGrant).leases
    assert [harness.submit(lease) for lease in leases if lease.split == "train"]
    assert isinstance(learner.take_batch(0, wait_s=5.0), object)
    assert not [answer for answer in dead.receive_answers(0.3) if answer.number == waiting], (
        "nobody waits for it any more"
    )
    learner.close()
    driver.close()


def test_a_dead_learners_announcement_is_late_for_a_buffer_that_was_started_again_too(
    harness: BufferHarness, tmp_path: Path
) -> None:
    announcer = open_announcements(harness.client)
    publication = Publication(publisher=Publisher(tmp_path / "w", "life"), buffer=announcer)
    publish(publication, 0, {"w": torch.zeros(3)})
    harness.server.stop()
    harness.thread.join()
    settings = [*SMALL_RUN, "eval.prompts=2", f"buffer.address={harness.server.address}"]
    restarted = BufferHarness(load_config(settings), tmp_path / "journal")
    call = announcer.call

    def call_late(request: m.Request, expect: type[Any]) -> Any:
        if isinstance(request, m.PublishVersion):
            restarted.client.call(m.RewindToStep(step=0), m.Acknowledged)
        return call(request, expect)

    announcer.call = call_late  # type: ignore[method-assign]
    with pytest.raises(RefusedByBuffer, match="PublishVersion of a life before the rewind"):
        publish(publication, 1, {"w": torch.zeros(3)})
    assert restarted.status().version == -1
    publication.close()
    restarted.close()


def test_an_idle_client_of_a_buffer_that_is_away_for_long_holds_up_no_other_client(
    harness: BufferHarness,
) -> None:
    idle = BufferClient("tcp://127.0.0.1:9")  # nobody listens there
    idle._socket.disconnect(idle.address)
    idle._socket.setsockopt(zmq.RECONNECT_IVL, 1)
    idle._socket.connect(idle.address)
    time.sleep(4.0)  # a few thousand tries
    assert harness.client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews).status.version == -1
    idle.close()


def test_evaluations_of_a_version_that_was_undone_are_asked_again_and_stay_off_the_ledger(
    harness: BufferHarness,
) -> None:
    harness.publish(0)
    before = [lease for lease in harness.ask(4) if lease.split == "eval"]
    assert len(before) == 2, "two of the two prompts"
    harness.client.call(m.RewindToStep(step=0), m.Acknowledged)
    harness.client.call(m.PublishVersion(version=0, manifest_locator="anew"), m.Acknowledged)
    beat = m.GeneratorHeartbeat(
        generator="g", progress={lease.id: 5 for lease in before}, report=GeneratorReport()
    )
    assert harness.client.call(beat, m.GeneratorStanding).revoked == [lease.id for lease in before], (
        "or a generator would wait for a version that may never come"
    )
    assert [harness.answer(lease, 0.0) for lease in before] == ["duplicate"] * 2
    news = harness.client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
    assert news.evaluations == [] and news.status.tokens.total == 0
    for lease in [lease for lease in harness.ask(4) if lease.split == "eval"]:
        harness.answer(lease, 1.0)
    (score,) = harness.evaluations()
    assert (score.version, score.avg, score.prompts) == (0, 1.0, 2)
