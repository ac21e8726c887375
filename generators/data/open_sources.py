"""Opens the sources of `data`: rows from the cache, and other tasks."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from configs.plugins import call_plugin
from generators.data.cache import find_cache
from generators.data.row_store import RowStore
from generators.data.rows import shape_row
from generators.data.sources import RowSource, read_sources
from generators.environment import Row
from generators.task import Prompt, Score
from generators.tasks import find_task_class
from generators.user_code.task_kinds import TaskKind, find_kind, read_num_prompts


class OpenSource(Protocol):
    """A supply of rows of one split."""

    name: str
    weight: float
    level: int | None
    template_args: Mapping[str, Any]

    @property
    def size(self) -> int | None:
        """Number of its rows; None: without end."""
        ...

    def make_row(self, index: int, seed: int) -> Row:
        """Beyond the last row, the first follows again."""
        ...


class KeptRows:
    """The rows of some files that a run takes for a split."""

    def __init__(self, source: RowSource, record: Mapping[str, Any], split: str) -> None:
        """`record` is of `data.prepared`. Raises ValueError where the cache has lost the rows."""
        self.name, self.weight, self.level = source.name, source.weight, source.level
        self.template_args = source.chat_template_kwargs
        self._source = source
        try:
            self._store = RowStore(find_cache() / record["store"])
            part = "taken" if record["split"] == split else "held_out"
            self._numbers: np.ndarray = np.load(find_cache() / record["kept"] / f"{part}.npy", mmap_mode="r")
        except OSError as error:
            raise ValueError(
                f"data.{split} must be prepared in the cache of this host ({find_cache()}), got nothing for "
                f"source {source.name!r}: {error}"
            ) from error
        self.size: int = len(self._numbers)

    def make_row(self, index: int, seed: int) -> Row:
        row = self._store.read_row(int(self._numbers[index % len(self._numbers)]))
        return {"data_source": self.name, **shape_row(row, **self._source.shape)}


class TaskPrompts:
    """The prompts of another task as rows: `prompt`, the task's `entry`, and the split, index and seed."""

    def __init__(self, source: RowSource, split: str) -> None:
        """Raises ValueError for a task of another kind than one turn."""
        self.name, self.weight, self.level = source.name, source.weight, source.level
        self._split = split
        self.template_args: Mapping[str, Any] = {}
        assert source.task is not None, source
        task_class, key = find_task_class(source.task), f"data.{split}"
        if (kind := find_kind(task_class, source.task)) is not TaskKind.one_turn:
            raise ValueError(f"{key} must name tasks of one turn as sources, got {source.task!r} ({kind})")
        methods = task_class.make_prompt, task_class.score_response  # type: ignore[attr-defined]
        if any(map(inspect.iscoroutinefunction, methods)):
            raise ValueError(
                f"{key} must name tasks with plain methods as sources, got async {source.task!r}"
            )
        self.task = call_plugin(task_class, source.task, source.args, f"{key}.args")
        self.size = read_num_prompts(self.task) if split == "train" else None

    def make_row(self, index: int, seed: int) -> Row:
        prompt = self.task.make_prompt(self._split, index, seed)
        return {
            "prompt": [dict(message) for message in prompt.messages] or prompt.text,
            "entry": prompt.entry,
            "data_source": self.name,
            "task_source": self.name,
            "split": self._split,
            "index": index,
            "seed": seed,
        }

    def score_reply(self, row: Row, reply: str) -> Score:
        """Returns the task's own score of a reply to one of its rows."""
        prompt = row["prompt"]
        is_text = isinstance(prompt, str)
        own = Prompt(prompt if is_text else "", row["entry"], messages=() if is_text else prompt)
        score: Score = self.task.score_response(own, reply)
        return score

    def solve_examples(self, seed: int) -> Iterator[tuple[str, str]]:
        if not hasattr(self.task, "solved_examples"):
            raise ValueError(
                f"model.path must be a folder for a task without `solved_examples`, got tiny for {self.name}"
            )
        solved: Iterator[tuple[str, str]] = self.task.solved_examples(self._split, seed)
        return solved


def open_sources(data: Mapping[str, Any], split: str) -> Sequence[KeptRows | TaskPrompts]:
    """Returns the sources of a split. Without `data.eval`, those of `data.train` have held-out rows.

    Rows without a record in `data.prepared` are prepared, without a limit to their length.
    """
    sources = read_sources(data, split)
    if split == "train" and not sources:
        raise ValueError("data.train must name rows to train on (a file, a folder or sources), got null")
    kept_as = split if sources else "train"
    records = list(data.get("prepared") or ())
    if not records and any(source.path for source in sources or read_sources(data, "train")):
        # Imported here: workers, whose rows are prepared, have no use for Arrow.
        from generators.data.prepare import prepare_data

        records = prepare_data(data)
    by_name = {record["name"]: record for record in records if record["split"] == kept_as}
    return [
        KeptRows(source, by_name[source.name], split) if source.path else TaskPrompts(source, split)
        for source in sources or read_sources(data, "train")
    ]


def take_turns(index: int, sizes: Sequence[int | None]) -> tuple[int, int]:
    """Returns the source and its row at an index, where the sources give a row each by turns until they have
    no more. Behind the last row of all, the first follows again. None is a source without end."""
    if None not in sizes:
        index %= sum(size for size in sizes if size is not None)
    done = 0
    for size in sorted({size for size in sizes if size is not None}):
        left = [place for place, one in enumerate(sizes) if one is None or one > done]
        span = (size - done) * len(left)
        if index < span:
            return left[index % len(left)], done + index // len(left)
        index, done = index - span, size
    left = [place for place, one in enumerate(sizes) if one is None]
    return left[index % len(left)], done + index // len(left)
