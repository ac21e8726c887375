"""A whole run with episodes of several turns, as a user starts it."""

from collections.abc import Callable
from typing import Any

import pytest
from runs import StartedRun, assert_accounts_close
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from buffers.journal import read_groups
from configs.load import load_config
from generators.rendering import choose_renderer
from generators.tasks import load_task
from slipstream import preparation

EXPERIMENT = "+experiment=guess_number"
NUM_STEPS = 4


@pytest.mark.whole_run
def test_each_game_of_a_run_is_the_one_that_its_environment_plays_token_for_token(
    start: Callable[..., StartedRun],
) -> None:
    """The journal's replies, given to the environment once more, bring the same tokens and rewards."""
    run = start(
        EXPERIMENT, f"run.steps={NUM_STEPS}", "learner.groups_per_step=16", "generators.count=1",
        "eval.every=2", "eval.prompts=32",
    )  # fmt: skip
    code, out = run.finish()
    assert code == 0, out
    summary = run.summary()
    assert_accounts_close(summary)
    assert [one["version"] for one in summary["evaluations"]] == [0, 2, 4], "held-out games of each version"
    assert summary["groups"]["trained"] == 16 * NUM_STEPS
    rows = [row for group in read_groups(run.folder / "journal") for row in group.to_pylist()]
    assert len(rows) >= 16 * NUM_STEPS * 8
    config = load_config([EXPERIMENT])
    tokenizer = AutoTokenizer.from_pretrained(preparation.resolve_model(config))
    task, renderer = load_task("guess_number", {}), choose_renderer(tokenizer, config.episodes)
    for row in rows:
        row["turn"] = row["turn"] or [0 if flag else -1 for flag in row["sampled"]]
        replay_game(task, renderer, row)
    assert {max(row["turn"]) for row in rows} >= {1, 3}, "some games are won early, most take all tries"
    won = [row for row in rows if row["reward"] == 1]
    assert 0.02 < len(won) / len(rows) < 0.6
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("reward/mean")) == NUM_STEPS
    assert len(events.Scalars("eval/held_out/avg")) == 3


def replay_game(task: Any, renderer: Any, row: dict[str, Any]) -> None:
    game = task.make_environment(made := task.make_row("train", row["prompt_id"], 0))
    turn = game.reset(made, 0)
    held, turns, number, reward = renderer.render_first(turn.messages, ()), [], 0, 0.0
    turns += [-1] * len(held)
    while not turn.done:
        assert row["tokens"][: len(held)] == held
        count = row["turn"].count(number)
        reply = row["tokens"][len(held) : len(held) + count]
        assert 0 < count <= 8
        held, turns = held + reply, turns + [number] * count
        turn = game.step(renderer.parse_reply(reply, row["finish_reason"]).message)
        reward += turn.reward
        number += 1
        if not turn.done:
            held = renderer.extend_prompt(held, turn.messages, ())
            turns += [-1] * (len(held) - len(turns))
    assert row["tokens"] == held
    assert row["turn"] == turns
    assert row["sampled"] == [one >= 0 for one in turns]
    assert all((version >= 0) == (one >= 0) for version, one in zip(row["versions"], turns, strict=True))
    assert (row["reward"], dict(row["rewards"])["won"]) == (reward, reward)
    assert (row["stop"], row["renderer"], row["branch"]) == ("completed", renderer.name, 0)
