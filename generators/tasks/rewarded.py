"""Prompts from a file or from another task, and a reward that is made of parts (`generators/rewards/`)."""

from collections.abc import Mapping
from typing import Any

from generators.rewards.composition import make_parts
from generators.rewards.rows import read_messages
from generators.rewards.sources import FileRows, TaskRows, read_task_name
from generators.task import Prompt, Score
from generators.tasks import load_task


class Task:
    name = "rewarded"

    def __init__(self, rows: Any, rewards: Any, eval_rows: Any = None) -> None:
        """`rows`: a file .jsonl or .parquet, or `{task: NAME, args: {...}}`. `eval_rows`: a file of held-out
        prompts. `rewards`: the parts, each `{name, use, weight, ...}`; `use: task` is the reward of the task
        that the rows come from."""
        self._source: FileRows | TaskRows
        if isinstance(rows, Mapping):
            if eval_rows is not None:
                raise ValueError(
                    f"task.args.eval_rows must be null where rows name a task, got {eval_rows!r}"
                )
            task = load_task(*read_task_name(rows))
            self._source = TaskRows(task)
            self._parts = make_parts(rewards, further={"task": self._source})
            # A task says by having these what it offers.
            for name in ("num_prompts", "solved_examples"):
                if hasattr(task, name):
                    setattr(self, name, getattr(task, name))
        else:
            self._source = FileRows(rows, eval_rows)
            self._parts = make_parts(rewards)
            self.num_prompts = self._source.num_prompts
        self.max_scores = self._parts.max_concurrent

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        """Raises ValueError for a chat of several messages: this task has prompts of one."""
        row = self._source.make_row(split, index, seed)
        messages = read_messages(row)
        if len(messages) != 1 or messages[0]["role"] != "user":
            raise ValueError(
                "task.args.rows must have prompts of one message of the user (task.name=rewarded_chat takes "
                f"others), got {len(messages)} messages, the first of {messages[0]['role']!r}"
            )
        return Prompt(messages[0]["content"], row)

    def score_response(self, prompt: Prompt, response: str) -> Score:
        return self._parts.rate_reply(prompt.entry, response)
