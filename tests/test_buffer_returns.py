"""Whole runs whose buffer dies: it comes back at its address, and everybody goes on."""

import re
import signal
import time
from collections.abc import Callable

import pytest
from runs import SIMULATED, StartedRun, assert_accounts_close
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from buffers import events as e
from buffers.event_log import read_events
from slipstream.buffer_silence import UNANSWERED_S

pytestmark = pytest.mark.whole_run
SLOW = "generators.simulated.train_tokens_per_s=1000"


def count_lives(run: StartedRun) -> int:
    """Returns how many times a buffer of the run has answered."""
    return (run.folder / "logs" / "buffer.log").read_text().count("the buffer answers at")


def test_a_buffer_that_dies_again_and_again_costs_no_step_no_group_and_no_record(
    start: Callable[..., StartedRun],
) -> None:
    run = start(*SIMULATED, SLOW, "run.steps=40", "learner.checkpoint_every=10", "eval.prompts=4",
                "eval.every=10", "eval.generators=1", "generators.count=2")  # fmt: skip
    run.wait_for(lambda: run.steps() >= 3, "third step")
    learners, generators = run.roles("LearnerRole"), run.roles("GeneratorRole")
    run.lose_buffer()
    run.lose_buffer()  # as soon as there is another, so perhaps while it recovers
    run.wait_for(lambda: run.steps() >= 15, "fifteenth step")
    lives = count_lives(run)
    run.lose_buffer()
    run.wait_for(lambda: count_lives(run) > lives, "next life")
    (learner,) = run.roles("LearnerRole")
    assert [learner] == learners, "the same process throughout"
    run.lose_buffer()
    learner.kill()  # both at once: the learner goes back to a checkpoint of a buffer that has just come back
    run.wait_for(lambda: run.rewinds() != [], "rewind")
    assert run.roles("GeneratorRole") == generators
    code, out = run.finish()
    assert code == 0, out
    run.assert_nothing_left()
    said = re.findall(r"buffer has died: it starts again at (\S+) \(restart (\d) of 5\)", out)
    assert [int(number) for _, number in said] == [1, 2, 3, 4] and len({address for address, _ in said}) == 1
    assert 3 <= out.count("the buffer answers again, after ") <= 4
    assert "finished after 1 restart of the learner and 4 restarts of the buffer" in out
    assert "generators left" not in out and "generators joined" not in out
    summary = run.summary()
    assert (summary["status"], summary["steps"]) == ("finished", 40)
    assert summary["restarts"] == {"learner": 1, "buffer": 4}
    assert summary["groups"]["trained"] == 40 * 4
    assert_accounts_close(summary)
    assert [one["version"] for one in summary["evaluations"]] == [0, 10, 20, 30, 40]
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == list(range(40))
    assert summary["start_s"]["first_step"] < summary["wall_s"]
    trained = [event.step for event in read_events(run.folder / "journal") if isinstance(event, e.Trained)]
    (again,) = set(run.rewinds())  # the request may have reached both lives
    assert trained == [*range(again + len(trained) - 40), *range(again, 40)], "each once, but for the rewind"


def test_a_buffer_that_dies_too_often_ends_the_run_with_the_end_of_its_log(
    start: Callable[..., StartedRun],
) -> None:
    run = start(*SIMULATED, "run.steps=100000", "buffer.max_restarts=1")
    run.wait_for(lambda: run.steps() >= 1, "step")
    run.lose_buffer()
    run.wait_for(lambda: count_lives(run) == 2, "second life")
    run.lose_buffer()
    code, out = run.finish()
    assert code == 1 and "buffer has died. The end of its log:" in out and "The run has failed" in out, out
    run.assert_nothing_left()
    again = start(f"run.resume={run.folder}", f"run.steps={run.steps() + 3}")
    code, out = again.finish()
    assert code == 0, out
    assert again.summary()["restarts"] == {"learner": 0, "buffer": 1}
    assert_accounts_close(again.summary())
    again.assert_nothing_left()


@pytest.mark.parametrize("durability", ["none", "os"])
def test_a_buffer_that_stands_still_is_waited_for_and_one_that_dies_comes_back_for_ctrl_c(
    start: Callable[..., StartedRun], durability: str
) -> None:
    run = start(*SIMULATED, SLOW, "run.steps=100000", "learner.checkpoint_every=5",
                f"buffer.durability={durability}")  # fmt: skip
    run.wait_for(lambda: run.steps() >= 6, "sixth step")
    buffer = run.find_process("BufferRole", "buffer")
    assert buffer is not None
    if durability == "os":
        buffer.suspend()
        time.sleep(UNANSWERED_S + 2)
        buffer.resume()
        steps = run.steps()
        run.wait_for(lambda: run.steps() > steps, "step after it stood still")
    assert run.find_process("BufferRole", "buffer") == buffer, "the same process"
    run.lose_buffer()
    run.process.send_signal(signal.SIGINT)
    code, out = run.finish()
    assert code == 130 and "the buffer answers again" in out, out
    assert "has not answered for" in out or durability == "none", out
    is_back = (
        "the buffer has come back without its last answers (buffer.durability=none): the learner goes on"
    )
    assert (is_back in out) == (durability == "none"), out
    assert sorted((run.folder / "checkpoints").glob("step_*")), out
    assert_accounts_close(run.summary())
    assert run.summary()["restarts"] == {"learner": int(durability == "none"), "buffer": 1}
    run.assert_nothing_left()
