"""Leases are played without a buffer: each once, bounded side by side, and nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffers.messages import Lease
from buffers.trajectory import to_batch
from configs.load import load_config
from generators.episode import SimulatedEpisodes, SimulatedPrompt
from generators.group import PlayedEpisode, Player
from generators.simulated_engine import SimulatedEngine
from generators.solo_play import open_player
from generators.task import Score
from generators.task_episodes import TaskEpisodes
from slipstream_bench.byte_tokenizer import make_byte_tokenizer
from slipstream_bench.leftovers import FOLDER_MARK, list_workers


def make_engine(mean_tokens: int = 6, **clock: Callable[..., Any]) -> SimulatedEngine:
    """Returns an engine that holds version 3."""
    engine = SimulatedEngine(tokens_per_s=4000, slots=64, mean_tokens=mean_tokens, cv=0.5, **clock)
    engine.load_version(SimpleNamespace(manifest=SimpleNamespace(version=3)))  # type: ignore[arg-type]
    return engine


class CrowdedEpisodes(SimulatedEpisodes):
    """Counts the episodes side by side. None goes on before `crowd` of them have been there at a time."""

    def __init__(self, crowd: int) -> None:
        self._crowd, self._has_met = crowd, asyncio.Event()
        self.playing = self.most = 0

    async def play_episode(self, player: Player, beginning: SimulatedPrompt) -> PlayedEpisode:
        self.playing += 1
        self.most = max(self.most, self.playing)
        if self.playing == self._crowd:
            self._has_met.set()
        await self._has_met.wait()
        return await super().play_episode(player, beginning)

    async def score_tokens(self, prompt: SimulatedPrompt, tokens: list[int]) -> Score:
        self.playing -= 1
        return await super().score_tokens(prompt, tokens)


class ScriptedScores(SimulatedEpisodes):
    """Scores say what `score` says, which gets the prompt's index and how often it was scored before."""

    def __init__(self, score: Callable[[int, int], float]) -> None:
        self._score, self.scored = score, list[int]()

    async def score_tokens(self, prompt: SimulatedPrompt, tokens: list[int]) -> Score:
        self.scored.append(prompt.index)
        return Score(self._score(prompt.index, self.scored.count(prompt.index) - 1))


def make_leases(count: int, num_samples: int = 2) -> list[Lease]:
    return [
        Lease(
            id=index, split="eval", task="t", index=index, seed=0, group=index, due=3, min_version=3,
            num_samples=num_samples,
        )
        for index in range(count)
    ]  # fmt: skip


def test_each_lease_ends_once_with_its_rows_and_no_more_play_than_allowed() -> None:
    # Four groups of two: a fifth would make ten.
    episodes = CrowdedEpisodes(8)
    with open_player(make_engine(), episodes, max_tokens=20, max_episodes=9) as player:
        groups = list(player.play_leases(iter(make_leases(30)), generator="me"))
    assert sorted(group.lease.index for group in groups) == list(range(30))
    for group in groups:
        assert [row.sample for row in group.rows] == [0, 1] and len(group.episodes) == 2
        assert all(row.prompt_id == group.lease.index and row.generator == "me" for row in group.rows)
        assert all(version == 3 for row in group.rows for version in row.versions if version >= 0)
        assert to_batch(list(group.rows)).num_rows == 2
    assert 8 <= episodes.most <= 9  # a group begins where one of two samples is scored


def test_a_group_of_more_samples_than_may_play_is_played_alone() -> None:
    episodes = CrowdedEpisodes(5)
    with open_player(make_engine(), episodes, max_tokens=20, max_episodes=3) as player:
        assert len(list(player.play_leases(make_leases(4, num_samples=5)))) == 4
    assert episodes.most == 5


def test_samples_do_not_depend_on_how_many_play_side_by_side() -> None:
    lengths = []
    for most in (2, 40):
        with open_player(make_engine(), SimulatedEpisodes(), max_tokens=50, max_episodes=most) as player:
            played = {group.lease.index: group.rows for group in player.play_leases(make_leases(10))}
        lengths.append([[len(row.tokens) for row in played[index]] for index in range(10)])
    assert lengths[0] == lengths[1]


def test_a_group_that_fails_is_played_again_and_then_given_up_by_name() -> None:
    def score(index: int, attempt: int) -> float:
        if index == 4 or (index == 2 and attempt == 0):
            raise ValueError(f"no score for {index}")
        return float(index)

    episodes = ScriptedScores(score)
    with open_player(make_engine(), episodes, max_tokens=20, max_episodes=8, max_attempts=3) as player:
        groups = {group.lease.index: group for group in player.play_leases(make_leases(6))}
    assert sorted(groups) == list(range(6))
    assert [index for index, group in groups.items() if group.error] == [4]
    assert "no score for 4" in groups[4].error and not groups[4].rows
    assert groups[2].rows[0].reward == 2.0
    assert 3 <= episodes.scored.count(4) <= 6


@pytest.mark.parametrize("ends_by", ["break", "should_stop"])
def test_whoever_leaves_early_finds_an_idle_engine_that_plays_the_same_leases_again(ends_by: str) -> None:
    # Time passes in the engine's steps alone: samples end one after the other, however slow the machine is.
    now = [0.0]

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        now[0] += seconds

    engine, leases = make_engine(mean_tokens=40, clock=lambda: now[0], sleep=sleep), make_leases(20)
    with open_player(engine, SimulatedEpisodes(), max_tokens=200, max_episodes=16) as player:
        seen: list[int] = []
        stop = (lambda: len(seen) >= 3) if ends_by == "should_stop" else (lambda: False)
        for group in player.play_leases(leases, should_stop=stop):
            seen.append(group.lease.index)
            if ends_by == "break" and len(seen) == 3:
                break
        assert 3 <= len(seen) < 20
        # A loop that was left is closed when nobody holds it.
        assert engine.num_unfinished == 0
        assert sorted(group.lease.index for group in player.play_leases(leases)) == list(range(20))


def test_scores_that_wait_do_not_pile_up() -> None:
    class WaitingScores(SimulatedEpisodes):
        def __init__(self) -> None:
            self.waiting = self.most = 0

        async def score_tokens(self, prompt: SimulatedPrompt, tokens: list[int]) -> Score:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            await asyncio.sleep(0.05)
            self.waiting -= 1
            return Score(1.0)

    episodes = WaitingScores()
    with open_player(make_engine(mean_tokens=1), episodes, max_tokens=1, max_episodes=8) as player:
        assert len(list(player.play_leases(make_leases(60)))) == 60
    assert episodes.most <= 16


@pytest.fixture
def unruly(monkeypatch: pytest.MonkeyPatch) -> TaskEpisodes:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    )
    config = load_config(
        [
            "task=episode_tasks:UnrulyTask", "generators.max_model_len=512", "episodes.score_timeout_s=2",
            "generators.engine=simulated", "learner.engine=simulated",
        ]
    )  # fmt: skip
    return TaskEpisodes(config, make_byte_tokenizer())


def test_code_that_does_everything_wrong_fails_its_own_prompts(unruly: TaskEpisodes) -> None:
    with open_player(make_engine(), unruly, max_tokens=20, max_episodes=32) as player:
        groups = {group.lease.index: group for group in player.play_leases(make_leases(14, 1))}
    assert sorted(index for index, group in groups.items() if group.error) == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert "the judge is away" in groups[10].error
    assert groups[12].rows[0].reward == 0.0 and groups[13].rows[0].reward == 1.0


def test_a_task_that_cannot_be_made_is_refused_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        ["task=no_such_module:Task", "generators.engine=simulated", "learner.engine=simulated"]
    )
    episodes = TaskEpisodes(config, make_byte_tokenizer())
    with (
        pytest.raises(Exception, match="no_such_module"),
        open_player(make_engine(), episodes, max_tokens=20, max_episodes=4),
    ):
        pass


INTERRUPTED = """
import sys
sys.path[:0] = {paths}
from test_solo_play import *
config = load_config([
    "task=episode_tasks:SlowTask", "task.args={{seconds: 600}}", "generators.engine=simulated",
    "learner.engine=simulated", "generators.max_model_len=512", "episodes.score_timeout_s=900",
])
episodes = TaskEpisodes(config, make_byte_tokenizer())
with open_player(make_engine(), episodes, max_tokens=9, max_episodes=4) as player:
    list(player.play_leases(make_leases(9)))
"""


def test_a_user_who_presses_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    def list_processes() -> set[int]:
        return set(list_workers(tmp_path)) - {program.pid}

    code = INTERRUPTED.format(paths=[str(Path(__file__).parent), *sys.path])
    environment = os.environ | {FOLDER_MARK: str(tmp_path)}
    program = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        # Keeper, guard, template, and at least one worker.
        while len(list_processes()) < 4:
            assert program.poll() is None
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate()
        assert "KeyboardInterrupt" in errors
        while list_processes():
            time.sleep(0.05)
    finally:
        program.kill()
        program.wait()
