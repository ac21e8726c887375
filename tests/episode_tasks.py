"""Tasks that run in workers of the tests: one that does everything wrong, and environments of several
turns."""

import ctypes
import os
import sys
import time
from typing import Any

from generators.environment import Message, Row, Turn
from generators.task import Prompt, Score


class UnrulyTask:
    """Prompts and scores that go wrong in every way that tasks have gone wrong."""

    name = "unruly"

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        if index == 1:
            sys.exit("no prompt")
        return Prompt(f"prompt {index}", index)

    def score_response(self, prompt: Prompt, response: str) -> Score:
        match prompt.entry:
            case 2:
                while True:
                    pass
            case 3:
                sys.exit(1)
            case 5:
                return Score(1e39)
            case 6:
                return Score(1.0, {"judge": None})  # type: ignore[dict-item]
            case 7:
                ctypes.string_at(0)
            case 8:
                return Score(float(len(bytearray(1 << 40))))
            case 9:
                while True:
                    print("x" * 1_000_000)
            case 10:
                raise ValueError("the judge is away")
            case 11:
                return Score(float("nan"))
        return Score(float(prompt.entry % 2))


class SlowTask:
    """Scores that wait, as for a judge."""

    name = "slow"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        return Prompt(f"prompt {index}", index)

    def score_response(self, prompt: Prompt, response: str) -> Score:
        time.sleep(self._seconds)
        return Score(float(len(response) % 2))


class LongestReplyTask(SlowTask):
    """One turn, whose replies are scored beside one another."""

    name = "longest"
    needs_tokens = True

    def __init__(self) -> None:
        super().__init__(0.0)

    def score_group(self, episodes: Any) -> list[Score]:
        assert all([m["role"] for m in one.messages] == ["user", "assistant"] for one in episodes)
        lengths = [float(len(one.messages[1]["content"])) for one in episodes]
        assert all(len(one.tokens) == one.num_tokens > 0 for one in episodes)
        return [
            Score(length, {"length": length, "last_token": float(one.tokens[-1])})
            for length, one in zip(lengths, episodes, strict=True)
        ]


class CountingEnvironment:
    """Plays `turns` turns, pays each by its number, and waits before it answers."""

    name = "counting"

    def __init__(self, turns: int = 3, wait_s: float = 0.0, log: str | None = None) -> None:
        self._turns, self._wait_s, self._log = turns, wait_s, log
        self._taken = 0

    def reset(self, row: Row, seed: int) -> Turn:
        self._note("reset", row["index"])
        return Turn(messages=[{"role": "user", "content": f"begin {row['index']} {seed}"}])

    def step(self, reply: Message) -> Turn:
        assert reply["role"] == "assistant" and isinstance(reply["content"], str)
        time.sleep(self._wait_s)
        self._taken += 1
        done = self._taken == self._turns
        messages = [] if done else [{"role": "user", "content": f"turn {self._taken}"}]
        return Turn(messages=messages, reward=float(self._taken), components={"steps": 1.0}, done=done)

    def close(self) -> None:
        self._note("close", self._taken)

    def _note(self, what: str, number: Any) -> None:
        if self._log is not None:
            with open(self._log, "a") as log:
                print(what, number, os.getpid(), file=log)


class FaultyEnvironment(CountingEnvironment):
    """Fails at its second turn, in a way that the row decides. Row 2 does nothing more, if it is to hang."""

    name = "faulty"

    def __init__(self, hangs: bool = False) -> None:
        super().__init__()
        self._hangs = hangs

    def reset(self, row: Row, seed: int) -> Turn:
        self._index = row["index"]
        if self._index == 1:
            return Turn(messages=[{"role": "assistant", "content": "no"}])
        return super().reset(row, seed)

    def step(self, reply: Message) -> Turn:
        turn = super().step(reply)
        if self._taken == 2:
            match self._index:
                case 2 if self._hangs:
                    time.sleep(1000)
                case 3:
                    os._exit(3)
                case 4:
                    raise RuntimeError("the sandbox is gone")
                case 5:
                    return Turn(reward=float("inf"), done=True)
        return turn


class ToolEnvironment(CountingEnvironment):
    """Names a tool, and plays on whether or not it is called."""

    name = "tools"

    def reset(self, row: Row, seed: int) -> Turn:
        function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
        return Turn(
            messages=super().reset(row, seed).messages, tools=[{"type": "function", "function": function}]
        )


class BestOfGroupTask:
    """Environments of one turn whose group is scored beside one another: the longest reply wins."""

    name = "best"

    def make_row(self, split: str, index: int, seed: int) -> Row:
        return {"index": index}

    def make_environment(self, row: Row) -> CountingEnvironment:
        return CountingEnvironment(turns=2)

    def score_group(self, episodes: Any) -> list[Score]:
        assert all(one.num_tokens > 0 and not one.tokens for one in episodes)
        lengths = [
            sum(len(m["content"]) for m in one.messages if m["role"] == "assistant") for one in episodes
        ]
        return [Score(float(place), {"length": float(length)}) for place, length in enumerate(lengths)]
