"""Sources of rows: a file, or another task. Rows are named by (split, index, seed), as prompts are."""

from collections.abc import Mapping
from typing import Any

import xxhash

from generators.environment import Row
from generators.rewards.arguments import check_text
from generators.rewards.part import Rating
from generators.rewards.rows import RowFile, write_prompt
from generators.task import Prompt, Task

HELD_OUT = 8
"""One prompt of a file in so many is held out where no file of its own is named for evaluation."""


class FileRows:
    """The rows of a file, divided between training and evaluation by their prompts.

    Without `eval_rows`, a hash of the prompt's text says which are held out. Indices beyond the rows begin
    again at the first.
    """

    def __init__(self, rows: Any, eval_rows: Any = None) -> None:
        """Raises ValueError for a file that cannot be read, a row without a prompt, too few prompts to
        divide, or a prompt that is in both files."""
        self._file = RowFile("task.args.rows", check_text("task.args.rows", rows))
        hashes = hash_prompts(self._file)
        if eval_rows is None:
            if len(set(hashes)) < 2:
                raise ValueError(
                    "task.args.rows must have two prompts or more where task.args.eval_rows is null, got "
                    f"{rows!r} with {len(set(hashes))}"
                )
            self._eval_file, held_out = self._file, choose_held_out(set(hashes))
            self._eval = [index for index, hash_ in enumerate(hashes) if hash_ in held_out]
            self._train = [index for index, hash_ in enumerate(hashes) if hash_ not in held_out]
        else:
            self._eval_file = RowFile("task.args.eval_rows", check_text("task.args.eval_rows", eval_rows))
            known, eval_hashes = set(hashes), hash_prompts(self._eval_file)
            if shared := [index for index, hash_ in enumerate(eval_hashes) if hash_ in known]:
                text = write_prompt(self._eval_file.read_row(shared[0]))
                raise ValueError(
                    f"task.args.eval_rows must have no prompt of task.args.rows, got {len(shared)} of them, "
                    f"the first in row {shared[0]}: {text[:200]!r}"
                )
            self._train, self._eval = list(range(len(self._file))), list(range(len(self._eval_file)))
        self.num_prompts = len(self._train)

    def make_row(self, split: str, index: int, seed: int) -> Row:
        if split not in ("train", "eval"):
            raise ValueError(f"split must be train or eval, got {split!r}")
        file, indices = (self._file, self._train) if split == "train" else (self._eval_file, self._eval)
        return file.read_row(indices[index % len(indices)])


def choose_held_out(hashes: set[int]) -> set[int]:
    """Returns the hashes of prompts that are held out, of two or more: one in `HELD_OUT`, but neither none
    nor all."""
    held_out = {hash_ for hash_ in hashes if hash_ % HELD_OUT == 0} or {min(hashes)}
    return held_out - {max(hashes)} if held_out == hashes else held_out


def hash_prompts(file: RowFile) -> list[int]:
    """Returns a hash of each row's prompt, which reads and so checks each row."""
    texts = (write_prompt(file.read_row(index)) for index in range(len(file)))
    return [xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass")) for text in texts]


class TaskRows:
    """The prompts of another task as rows: `prompt`, the task's `entry`, and the split, index and seed.

    It is a reward part as well: the other task's own reward.
    """

    is_async = False

    def __init__(self, task: Task) -> None:
        self.task = task

    def make_row(self, split: str, index: int, seed: int) -> Row:
        prompt = self.task.make_prompt(split, index, seed)
        return {"prompt": prompt.text, "entry": prompt.entry, "split": split, "index": index, "seed": seed}

    def rate_reply(self, row: Row, reply: str) -> Rating:
        score = self.task.score_response(Prompt(row["prompt"], row["entry"]), reply)
        return Rating(score.reward, score.components)


def read_task_name(rows: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns name and arguments of `{task: NAME, args: {...}}`. Raises ValueError for another form."""
    arguments = rows.get("args", {})
    if set(rows) - {"task", "args"} or not isinstance(arguments, Mapping):
        raise ValueError(f"task.args.rows must be a file or {{task: NAME, args: {{...}}}}, got {dict(rows)}")
    return check_text("task.args.rows.task", rows.get("task")), arguments
