"""Prompts from files and from other tasks (`generators/data/`), and the reward of `reward`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from configs.plugins import KeyRefused
from generators.data.open_sources import KeptRows, TaskPrompts, open_sources, take_turns
from generators.data.rows import read_messages, read_reference
from generators.environment import EpisodeRecord, Message, Row
from generators.rewards.composition import make_reward
from generators.rewards.part import Rating
from generators.task import Prompt, PromptSource, Score

LONGEST_EXAMPLE = 400
"""Characters of a question and its answer together that the tiny model is warm-started on."""


class TaskReward:
    """The reward of the task that a row comes from, as a part of a reward."""

    is_async = False

    def __init__(self, tasks: Mapping[tuple[str, str], TaskPrompts]) -> None:
        """`tasks` are named by split and source."""
        self._tasks = tasks

    def rate_reply(self, row: Row, reply: str) -> Rating:
        if not is_of_task(row):
            raise ValueError(f"a row must come from a task, got one of {row['data_source']!r}")
        score = self._tasks[row["split"], row["task_source"]].score_reply(row, reply)
        return Rating(score.reward, score.components)


def is_of_task(row: Row) -> bool:
    """True for a row that another task has made."""
    return "task_source" in row


class Task:
    name = "dataset"

    def __init__(self, data: Mapping[str, Any], reward: Mapping[str, Any] | None = None) -> None:
        """`data` and `reward` are the sections of that name. Raises KeyRefused."""
        try:
            self._open(data, reward or {})
        except ValueError as error:
            raise KeyRefused(str(error)) from error

    def _open(self, data: Mapping[str, Any], reward: Mapping[str, Any]) -> None:
        # An evaluation set has no rows to train on.
        is_set = data.get("train") is None and data.get("eval") is not None
        splits = ("eval",) if is_set else ("train", "eval")
        self._splits = {split: open_sources(data, split) for split in splits}
        train, held_out = self._splits.get("train", ()), self._splits["eval"]
        self.sources = [PromptSource(one.name, one.size, one.weight, one.level) for one in train]
        if len(train) == 1:
            self.num_prompts = train[0].size
        sizes = [one.size for one in held_out]
        self.num_eval_prompts = None if None in sizes else sum(size for size in sizes if size is not None)
        tasks = {
            (split, one.name): one
            for split, sources in self._splits.items()
            for one in sources
            if isinstance(one, TaskPrompts)
        }
        self.packages = sorted({name for one in tasks.values() for name in getattr(one.task, "packages", ())})
        has_files = any(isinstance(one, KeptRows) for sources in self._splits.values() for one in sources)
        parts = reward.get("parts") or ()
        if has_files and tasks and reward.get("function") is None and not parts:
            raise ValueError("reward.function must say what a reply to a row of a file is worth, got null")
        self._own_reward = TaskReward(tasks)
        self._parts = make_reward(reward, further={"task": self._own_reward} if tasks else {})
        uses_own = any(isinstance(part, Mapping) and part.get("use") == "task" for part in parts)
        self._tasks_score = has_files and not uses_own
        """True when each task scores its own rows, and the reward those of files."""
        self.max_scores = self._parts.max_concurrent
        if self._parts.rates_groups:
            self.score_group, self.needs_tokens = self._score_group, self._parts.needs_tokens

    def make_row(self, split: str, index: int, seed: int) -> Row:
        """Returns the row of a prompt: its columns, with the prompt itself at `prompt`."""
        source, number = self.find_row(split, index)
        return source.make_row(number, seed)

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        source, number = self.find_row(split, index)
        row = source.make_row(number, seed)
        messages = read_messages(row)
        return Prompt(join_contents(messages), row, messages=messages, template_args=source.template_args)

    def score_response(self, prompt: Prompt, response: str) -> Score:
        row = prompt.entry
        if self._tasks_score and is_of_task(row):
            rating = self._own_reward.rate_reply(row, response)
            return Score(rating.value, dict(rating.details))
        return self._parts.rate_reply(row, response)

    def _score_group(self, episodes: Sequence[EpisodeRecord]) -> list[Score] | None:
        if self._tasks_score and is_of_task(episodes[0].row):
            return None
        return self._parts.score_group(episodes)

    def find_row(self, split: str, index: int) -> tuple[KeptRows | TaskPrompts, int]:
        """Returns the source of a prompt, and the number of its row there."""
        if split not in self._splits:
            raise ValueError(f"split must be train or eval, got {split!r}")
        sources = self._splits[split]
        if split == "eval":
            place, number = take_turns(index, [one.size for one in sources])
        else:
            number, place = divmod(index, len(sources))
        return sources[place], number

    def solved_examples(self, split: str, seed: int) -> Iterator[tuple[str, str]]:
        """Yields short questions and their right answers, of one source after the other, without end. Raises
        ValueError for a source of files that has none."""
        solved = [
            one.solve_examples(seed) if isinstance(one, TaskPrompts) else _solve_rows(one, seed)
            for one in self._splits[split]
        ]
        while True:
            for examples in solved:
                yield next(examples)


def _solve_rows(source: KeptRows, seed: int) -> Iterator[tuple[str, str]]:
    found = False
    for index in count():
        if index and not index % source.size and not found:
            raise ValueError(
                "model.path must be a folder for rows without short texts as prompts and answers "
                f"({LONGEST_EXAMPLE} characters together), got tiny for source {source.name!r}"
            )
        row = source.make_row(index, seed)
        question = join_contents(read_messages(row))
        try:
            answer = read_reference(row)
        except ValueError:
            continue
        if isinstance(answer, str | int | float) and len(question) + len(str(answer)) <= LONGEST_EXAMPLE:
            found = True
            yield question, str(answer)


def join_contents(messages: Sequence[Message]) -> str:
    return "\n\n".join(message["content"] for message in messages)
