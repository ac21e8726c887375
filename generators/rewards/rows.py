"""Rows of prompts with right answers, from a file in JSON lines or parquet.

Three layouts are read as they are: verl's (`prompt` as chat, `reward_model.ground_truth`), SkyRL's
(`reward_spec.ground_truth`), and `prompt` as text with any columns beside it (TRL's).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from generators.environment import Message, Row

REFERENCES = (
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
    "ground_truth",
    "reference",
    "answer",
    "solution",
)
"""Places of the right answer, the first that a row has."""


class RowFile:
    """The rows of a file, made one at a time."""

    def __init__(self, field: str, path: str) -> None:
        """Raises ValueError that names `field`, the rule, the value and the row."""
        self.field, self.path = field, Path(path).expanduser()
        if self.path.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"{field} must be a file .jsonl or .parquet, got {path!r}")
        try:
            self._read_row, self._num_rows = (
                _open_lines(self.path) if self.path.suffix == ".jsonl" else _open_table(self.path)
            )
        # Arrow's own errors for a damaged file are ValueErrors too.
        except (OSError, ValueError) as error:
            raise ValueError(f"{field} must be a file that can be read, got {path!r}: {error}") from error
        if not self._num_rows:
            raise ValueError(f"{field} must have a row, got {path!r}, which has none")

    def __len__(self) -> int:
        return self._num_rows

    def read_row(self, index: int) -> Row:
        """Returns a row with a prompt. Raises ValueError for another."""
        try:
            row = self._read_row(index)
            read_messages(row)
        except ValueError as error:
            raise ValueError(
                f"{self.field} must have rows with a prompt, got row {index}: {error}"
            ) from error
        return row


def _open_lines(path: Path) -> tuple[Callable[[int], Row], int]:
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]

    def read_line(index: int) -> Row:
        row = json.loads(lines[index])
        if not isinstance(row, dict):
            raise ValueError(f"a line must be a JSON object, got {str(row)[:200]}")
        return row

    return read_line, len(lines)


def _open_table(path: Path) -> tuple[Callable[[int], Row], int]:
    table = pq.read_table(path)

    def read_slice(index: int) -> Row:
        row: Row = table.slice(index, 1).to_pylist()[0]
        return row

    return read_slice, table.num_rows


def read_messages(row: Row) -> list[Message]:
    """Returns the messages of a row's prompt, which is a text or a chat. Raises ValueError for anything
    else."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt:
        raise ValueError(f"prompt must be a text or a list of messages, got {str(prompt)[:200]}")
    for message in prompt:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or not isinstance(message.get("content"), str):
            raise ValueError(f"messages must have a role and a content, got {str(message)[:200]}")
    if prompt[-1]["role"] == "assistant":
        raise ValueError("prompt must not end with a message of the assistant, got one")
    return [dict(message) for message in prompt]


def write_prompt(row: Row) -> str:
    """Returns a prompt as one text, for judges and files: of a chat the contents, each after its role."""
    messages = read_messages(row)
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def read_reference(row: Row, place: str | None = None) -> Any:
    """Returns the right answer of a row: at the dotted `place`, or else at the first of `REFERENCES` that it
    has. Raises ValueError where there is none."""
    for name in REFERENCES if place is None else (place,):
        value: Any = row
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    wanted = f"one of {', '.join(REFERENCES)}" if place is None else place
    raise ValueError(f"a row must have a right answer at {wanted}, got the columns {sorted(row)}")
