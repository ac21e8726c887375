"""Tasks of the episode benchmark: replies of a fixed length, tool waits, and scores that hang or wait."""

import asyncio
import time

from generators.environment import Message, Row, Turn
from generators.task import Prompt, Score

WORDS = "the tool has answered with this"


class WaitingEnvironment:
    """Plays `turns` turns. Before each answer it waits, as for a tool."""

    name = "waiting"

    def __init__(self, turns: int, wait_s: float = 0.0) -> None:
        self._turns, self._wait_s = turns, wait_s
        self._taken = 0

    def reset(self, row: Row, seed: int) -> Turn:
        return Turn(messages=[{"role": "user", "content": f"question {row['index']}"}])

    async def step(self, reply: Message) -> Turn:
        if self._wait_s:
            await asyncio.sleep(self._wait_s)
        self._taken += 1
        done = self._taken == self._turns
        return Turn(messages=[] if done else [{"role": "user", "content": WORDS}], reward=1.0, done=done)

    def close(self) -> None:
        """Holds nothing."""


class WaitingTask:
    """One turn. Each score waits, as for a judge; that of the prompt `hangs` never ends.

    The prompt is as long as the messages of `turns` turns of `WaitingEnvironment` together.
    """

    name = "waiting score"

    def __init__(self, wait_s: float = 0.0, hangs: int | None = None, turns: int = 1) -> None:
        self._wait_s, self._hangs, self._turns = wait_s, hangs, turns

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        return Prompt(" ".join([str(index), *[WORDS] * self._turns]), index)

    def score_response(self, prompt: Prompt, response: str) -> Score:
        if prompt.entry == self._hangs:
            while True:
                pass
        time.sleep(self._wait_s)
        return Score(1.0)
