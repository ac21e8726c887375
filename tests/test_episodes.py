"""Episodes beside the engine: a task's code fails its own groups only, and every token is the engine's."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from generator_run import OVERRIDES, GeneratorRun, make_fast_engine
from template_families import family_tokenizer

from buffers import messages as m
from buffers.client import TakenBatch
from buffers.run_status import RunStatus
from configs.load import load_config
from configs.schema import Config
from generators.branches import EpisodeBranches
from generators.engine import Completion, Sample
from generators.group import PlayedEpisode
from generators.simulated_engine import SimulatedEngine
from generators.task import Score
from generators.task_episodes import TaskEpisodes
from slipstream_bench.byte_tokenizer import make_byte_tokenizer

TASKS = "episode_tasks"


def make_config(task: str, *overrides: str) -> Config:
    return load_config(
        [
            *OVERRIDES,
            f"task.name={TASKS}:{task}",
            "generators.max_model_len=512",
            "episodes.renderer=plain",
            "buffer.max_attempts=1",
            *overrides,
        ]
    )


class RecordingEngine(SimulatedEngine):
    """A simulated engine that samples different tokens, and keeps what it was asked and what it answered."""

    def __init__(self) -> None:
        super().__init__(tokens_per_s=2000, slots=16, mean_tokens=6, cv=0.5)
        self.prompts: dict[str, list[int]] = {}
        self.answered: dict[str, Completion] = {}
        self.stops: set[frozenset[int]] = set()

    def add_sample(self, sample: Sample) -> None:
        self.prompts[sample.id] = sample.prompt
        self.stops.add(sample.stop_tokens)
        super().add_sample(sample)

    def step(self) -> list[Completion]:
        ended = []
        for completion in super().step():
            number = len(self.answered)
            tokens = [65 + (number + place) % 26 for place in range(len(completion.tokens))]
            logprobs = [-(1 + number + place) / 100 for place in range(len(tokens))]
            ended.append(
                Completion(
                    id=completion.id,
                    tokens=tokens,
                    logprobs=logprobs,
                    versions=completion.versions,
                    finish_reason=completion.finish_reason,
                )
            )
            self.answered[completion.id] = ended[-1]
        return ended


class EpisodeRun(GeneratorRun):
    """A run whose one generator plays a task's episodes with a simulated engine."""

    def __init__(
        self, config: Config, folder: Path, engine: SimulatedEngine | None = None, tokenizer: Any = None
    ) -> None:
        """`tokenizer` is of bytes where it is None."""
        self.engine = engine or make_fast_engine()
        episodes = TaskEpisodes(config, tokenizer or make_byte_tokenizer())
        super().__init__(config, folder, episodes, engine=self.engine)
        self.tables: list[pa.Table] = []

    def train_steps(self, count: int = 3) -> list[int]:
        """Trains some steps; returns the numbers of the groups."""
        trained: list[int] = []
        for step in range(count):
            self.publish_version(step)
            trained += self.take_step(step)
        return trained

    def take_step(self, step: int) -> list[int]:
        """Trains a step whose version is published."""
        deadline = time.monotonic() + 240.0
        while not isinstance(taken := self.client.take_batch(step, wait_s=30.0), TakenBatch):
            assert time.monotonic() < deadline, taken
        self.tables.append(taken.table)
        sampled = np.concatenate([np.array(row) for row in taken.table.column("sampled").to_pylist()])
        done = m.ReportTrainedStep(
            step=step, num_trained=int(sampled.sum()), idle_s=0.0, alive_s=1.0, metrics={}
        )
        self.client.call(done, m.Acknowledged)
        return taken.groups

    def list_rows(self) -> list[dict[str, Any]]:
        return [row for table in self.tables for row in table.to_pylist()]


def assert_ledger_closes(status: RunStatus) -> None:
    tokens = status.tokens
    assert tokens.total == tokens.trained + sum(tokens.rejected.values()) + tokens.in_flight


@pytest.fixture(autouse=True)
def tasks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield


def test_a_task_that_hangs_crashes_and_scores_nonsense_costs_its_groups_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    config = make_config("UnrulyTask", "episodes.score_timeout_s=5", "episodes.worker_memory_mb=2048")
    run = EpisodeRun(config, tmp_path)
    trained = run.train_steps()
    bad = {1, 2, 3, 5, 6, 7, 8, 9, 10, 11}
    status = run.wait_for(lambda status: len(status.quarantined) == len(bad))
    status = run.close()
    assert len(trained) == len(set(trained)) == 12 and not bad & set(trained)
    errors = dict(status.quarantined)
    for group, part in {
        1: "SystemExit: no prompt",
        2: "episodes.score_timeout_s",
        3: "SystemExit: 1",
        5: "reward must be within ± 3.4e38 (it is kept in float32), got 1e+39",
        6: "components['judge'] must be a number, got None",
        7: "SIGSEGV",
        8: "MemoryError",
        9: "episodes.worker_output_mb",
        10: "ValueError: the judge is away",
        11: "reward must be finite, got nan",
    }.items():
        assert part in errors[group], (group, errors[group])
    assert status.generators["g0"].abandoned_scores == 4, "2, 7, 8 and 9 have cost their workers"
    assert_ledger_closes(status)


def test_an_engine_that_has_nothing_to_do_while_scores_are_under_way_is_idle(tmp_path: Path) -> None:
    config = make_config("SlowTask", "task.args={seconds: 0.3}", "staleness.max_versions=0")
    run = EpisodeRun(config, tmp_path)
    assert len(run.train_steps()) == 12
    run.wait_for(lambda status: status.generator_idle_share > 0.5)
    run.close()


def test_every_token_of_an_episode_is_the_engines_and_rewards_stand_at_their_turns(tmp_path: Path) -> None:
    engine, log = RecordingEngine(), tmp_path / "log"
    config = make_config(
        "CountingEnvironment",
        "task.args={turns: 3, log: " + str(log) + "}",
        "sampling.max_tokens=32",
        "generators.max_model_len=400",
    )
    run = EpisodeRun(config, tmp_path, engine)
    trained = run.train_steps()
    status = run.close()
    rows = run.list_rows()
    assert len(rows) == 2 * len(trained) == 24
    asked = dict(engine.prompts)
    for row in rows:
        assert (row["branch"], row["stop"], row["reward"]) == (0, "completed", 6.0)
        assert dict(row["rewards"]) == {"steps": 3.0} and row["renderer"]
        turns = np.array(row["turn"])
        assert sorted(set(turns.tolist())) == [-1, 0, 1, 2]
        for turn in range(3):
            places = np.flatnonzero(turns == turn)
            prompt = row["tokens"][: places[0]]
            [sample_id] = [
                id
                for id, one in asked.items()
                if one == prompt and engine.answered[id].tokens == [row["tokens"][place] for place in places]
                and engine.answered[id].logprobs == pytest.approx([row["logprobs"][p] for p in places])
            ]  # fmt: skip
            assert engine.answered[sample_id].versions == [row["versions"][place] for place in places]
            assert row["token_rewards"][places[-1]] == turn + 1
        assert [bool(sampled) for sampled in row["sampled"]] == (turns >= 0).tolist()
    noted = Counter(line.split()[0] for line in log.read_text().splitlines())
    assert noted["close"] == noted["reset"] + 1, (
        "each is closed once, and so is the one that was made at the start"
    )
    assert_ledger_closes(status)


def test_an_environment_that_fails_in_the_middle_costs_its_group(tmp_path: Path) -> None:
    run = EpisodeRun(make_config("FaultyEnvironment"), tmp_path)
    trained = run.train_steps()
    run.wait_for(lambda status: len(status.quarantined) == 4)
    status = run.close()
    assert not {1, 3, 4, 5} & set(trained)
    errors = dict(status.quarantined)
    for group, part in {
        1: "role must not be assistant",
        3: "exited with code 3",
        4: "RuntimeError: the sandbox is gone",
        5: "reward must be finite",
    }.items():
        assert part in errors[group], (group, errors[group])
    assert_ledger_closes(status)


def test_an_environment_that_hangs_in_the_middle_costs_its_group(tmp_path: Path) -> None:
    config = make_config("FaultyEnvironment", "task.args={hangs: true}", "episodes.turn_timeout_s=1")
    run = EpisodeRun(config, tmp_path)
    # On a busy machine others take too long as well: fresh groups take their places.
    assert 2 not in run.train_steps(1)
    status = run.close()
    assert "episodes.turn_timeout_s" in dict(status.quarantined)[2]
    assert_ledger_closes(status)


def test_an_episode_that_takes_too_long_as_a_whole_fails_by_name(tmp_path: Path) -> None:
    config = make_config(
        "CountingEnvironment", "task.args={turns: 9, wait_s: 0.4}", "episodes.timeout_s=1",
        "episodes.turn_timeout_s=1", "episodes.reset_timeout_s=1", "episodes.score_timeout_s=1",
    )  # fmt: skip
    run = EpisodeRun(config, tmp_path)
    run.publish_version(0)
    status = run.wait_for(lambda status: bool(status.quarantined))
    assert "episodes.timeout_s" in dict(status.quarantined)[0]
    run.close()


def test_an_episode_ends_at_its_last_turn_and_at_the_end_of_its_context(tmp_path: Path) -> None:
    config = make_config("CountingEnvironment", "task.args={turns: 100}", "episodes.max_turns=4")
    run = EpisodeRun(config, tmp_path / "turns")
    run.train_steps(1)
    run.close()
    assert {row["stop"] for row in run.list_rows()} == {"max_turns"}
    assert all(max(row["turn"]) == 3 and row["reward"] == 10.0 for row in run.list_rows())
    config = make_config(
        "CountingEnvironment", "task.args={turns: 100}", "episodes.max_turns=100",
        "generators.max_model_len=120", "sampling.max_tokens=20",
    )  # fmt: skip
    run = EpisodeRun(config, tmp_path / "context")
    run.train_steps(1)
    run.close()
    assert {row["stop"] for row in run.list_rows()} == {"context_overflow"}
    assert all(len(row["tokens"]) <= 120 for row in run.list_rows())


def test_a_group_may_be_scored_beside_one_another(tmp_path: Path) -> None:
    run = EpisodeRun(make_config("BestOfGroupTask"), tmp_path)
    run.train_steps(1)
    run.close()
    for row in run.list_rows():
        assert row["reward"] == row["sample"] and sum(row["token_rewards"]) == row["reward"]
        assert dict(row["rewards"])["steps"] == 2.0 and "length" in dict(row["rewards"])


def test_a_group_score_that_no_trajectory_can_hold_is_refused() -> None:
    branches = EpisodeBranches()
    for turn in range(2):
        completion = Completion(
            id=f"0/0/{turn}", tokens=[2], logprobs=[0.0], versions=[0], finish_reason="stop"
        )
        branches.append_turn([1] * (turn + 1), completion, turn)
        branches.pay_last_turn(-3e38 * (turn == 0))
    score = Score(-3e38, {f"turn {number}": 0.0 for number in range(60)})
    episode = PlayedEpisode(branches=branches, score=score, stop="completed")
    with pytest.raises(ValueError, match="components must be at most 64, got 120"):
        episode.replace_score(Score(-3e38, {f"group {number}": 0.0 for number in range(60)}))
    with pytest.raises(ValueError, match="reward of the last turn, with score_group's must be within"):
        episode.replace_score(Score(3e38))


def test_revoked_leases_end_their_episodes_and_close_their_environments(tmp_path: Path) -> None:
    log = tmp_path / "log"
    config = make_config("CountingEnvironment", "task.args={turns: 2, wait_s: 0.5, log: " + str(log) + "}")
    run = EpisodeRun(config, tmp_path)
    run.publish_version(0)
    [generator] = run.generators
    run.wait_for(lambda status: status.generators["g0"].sampled_tokens > 0)
    revoked = m.GeneratorStanding(
        revoked=sorted(generator._groups.lease_ids)[:2], version=0, manifest_locator=""
    )
    ended = threading.Event()

    def revoke() -> None:
        for lease_id in revoked.revoked:
            generator._groups.drop_lease(lease_id)
        ended.set()

    submit = generator._groups.submit_played_groups

    def submit_and_revoke() -> None:
        submit()
        if not ended.is_set():
            revoke()

    generator._groups.submit_played_groups = submit_and_revoke  # type: ignore[method-assign]
    assert ended.wait(30)
    assert not set(revoked.revoked) & generator._groups.lease_ids
    run.wait_for(lambda status: status.groups.in_flight >= 0)
    deadline = time.monotonic() + 30
    while Counter(line.split()[0] for line in log.read_text().splitlines())["close"] < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.close()


@pytest.mark.parametrize("task", ["CountingEnvironment", "SlowTask"])
def test_the_engine_is_told_where_the_chat_template_ends_a_reply(tmp_path: Path, task: str) -> None:
    tokenizer, engine = family_tokenizer("qwen2p5"), RecordingEngine()
    arguments = ["task.args={seconds: 0}"] if task == "SlowTask" else []
    config = make_config(task, f"task.name={TASKS}:{task}", "episodes.renderer=auto", *arguments)
    run = EpisodeRun(config, tmp_path, engine, tokenizer)
    run.train_steps(1)
    run.close()
    assert engine.stops == {frozenset(tokenizer.convert_tokens_to_ids(["<|im_end|>"]))}


def test_the_replies_of_one_turn_are_scored_beside_one_another_too(tmp_path: Path) -> None:
    engine = RecordingEngine()
    run = EpisodeRun(make_config("LongestReplyTask"), tmp_path, engine)
    run.train_steps(1)
    run.close()
    lengths = [dict(row["rewards"])["length"] for row in run.list_rows()]
    assert all(dict(row["rewards"])["last_token"] == row["tokens"][-1] for row in run.list_rows())
    assert lengths == [float(sum(row["sampled"])) for row in run.list_rows()] and all(lengths)
    assert [row["reward"] for row in run.list_rows()] == lengths


def test_a_greedy_baseline_is_refused_where_replies_are_scored_beside_one_another(tmp_path: Path) -> None:
    config = make_config("LongestReplyTask", "algo=remax")
    with pytest.raises(
        ValueError, match="algo.advantage must be another than remax where replies are scored"
    ):
        EpisodeRun(config, tmp_path, RecordingEngine())


def test_tools_that_no_reply_can_call_or_see_are_named_in_the_log_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = EpisodeRun(make_config("ToolEnvironment"), tmp_path, RecordingEngine())
    run.train_steps(1)
    run.close()
    assert caplog.text.count("episodes.tool_parser is null") == 1
    assert caplog.text.count("plain-1 does not show them") == 1
