"""Prompts of several messages from a file, and a reward that is made of parts (`generators/rewards/`).

The task `rewarded` is the same for prompts of one message. Here an episode is one turn: the row's messages, a
reply, its reward.
"""

from typing import Any

from generators.environment import Environment, Message, Row, Turn
from generators.rewards.composition import WeightedParts, make_parts
from generators.rewards.rows import read_messages
from generators.rewards.sources import FileRows


class RewardedChat:
    """One prompt and its reply."""

    def __init__(self, row: Row, parts: WeightedParts) -> None:
        self._row, self._parts = row, parts

    def reset(self, row: Row, seed: int) -> Turn:
        return Turn(messages=read_messages(self._row))

    def step(self, reply: Message) -> Turn:
        """Pays the reward of the reply's content; reasoning that was parsed apart does not count."""
        score = self._parts.rate_reply(self._row, reply.get("content") or "")
        return Turn(reward=score.reward, components=score.components, done=True)

    def close(self) -> None:
        pass


class Task:
    name = "rewarded_chat"

    def __init__(self, rows: str, rewards: Any, eval_rows: str | None = None) -> None:
        """`rows`: a file .jsonl or .parquet. `eval_rows`: a file of held-out prompts. `rewards`: the parts,
        each `{name, use, weight, ...}`."""
        self._source = FileRows(rows, eval_rows)
        self._parts = make_parts(rewards)
        self.num_prompts = self._source.num_prompts
        self.max_scores = self._parts.max_concurrent

    def make_row(self, split: str, index: int, seed: int) -> Row:
        return self._source.make_row(split, index, seed)

    def make_environment(self, row: Row) -> Environment:
        return RewardedChat(row, self._parts)
