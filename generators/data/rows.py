"""Rows of prompts with right answers, in the column layouts that users bring.

Three layouts are read as they are: verl's (`prompt` as chat, `reward_model.ground_truth`), SkyRL's
(`reward_spec.ground_truth`), and `prompt` as text or chat with any columns beside it (TRL's).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from generators.data.forms import find_form
from generators.environment import Message, Row

REFERENCES = (
    "ground_truth",
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
    "reference",
    "answer",
    "solution",
)
"""Places of the right answer, the first that a row has."""
ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of what a prompt shows beside its text, in verl, SkyRL and TRL."""


def shape_row(
    row: Row,
    *,
    form: str | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    system_prompt: str | None = None,
) -> Row:
    """Returns the row as tasks and rewards see it: its columns, with the prompt in `prompt`.

    `form` is a name of `generators.data.forms`. `prompt` and `answer` are the dotted places of both; None:
    those of the layouts. A named answer is in `ground_truth`. The system prompt stands before a chat that has
    none, and makes a chat of a text. Raises ValueError for a row without a prompt.
    """
    for column in MEDIA:
        if row.get(column):
            raise ValueError(f"prompts must be text alone, got something in the column {column!r}")
    row = row if form is None else find_form(form)(row)
    found = find_value(row, prompt or "prompt")
    if found is None:
        raise ValueError(describe_missing("data.prompt", prompt or "prompt", row))
    shaped = {**row, "prompt": found}
    if answer is not None:
        shaped["ground_truth"] = find_value(row, answer)
        if shaped["ground_truth"] is None:
            raise ValueError(describe_missing("data.answer", answer, row))
    messages = read_messages(shaped)
    if not isinstance(found, str):
        shaped["prompt"] = messages
    if system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        shaped["prompt"] = [{"role": "system", "content": system_prompt}, *messages]
    return shaped


def find_value(row: Row, place: str) -> Any:
    """Returns what stands at a dotted place of a row; None where there is nothing."""
    if place in row:
        return row[place]
    value: Any = row
    for key in place.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def describe_missing(key: str, place: str, row: Row) -> str:
    return f"{key} must name a column that has a value, got {place!r} of the columns {', '.join(row)}"


def read_messages(row: Row) -> list[Message]:
    """Returns the messages of a row's prompt, which is a text or a chat. Raises ValueError for anything
    else."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("prompt must not be empty, got ''")
        _check_text(prompt)
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt:
        raise ValueError(f"prompt must be a text or a list of messages, got {str(prompt)[:200]}")
    messages = [_read_message(message) for message in prompt]
    if messages[-1]["role"] == "assistant":
        raise ValueError("prompt must not end with a message of the assistant, got one")
    return messages


def list_messages(shaped: Row) -> list[Message]:
    """Returns the messages of a row that `shape_row` has made."""
    prompt = shaped["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _read_message(message: Any) -> Message:
    """Returns a message without its empty fields: a table gives every message the fields of all."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages must have a role and a content, got {str(message)[:200]}")
    if message["role"] not in ROLES:
        raise ValueError(f"roles of messages must be one of {', '.join(ROLES)}, got {message['role']!r}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_read_part(part) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"messages must have a role and a content, got {str(message)[:200]}")
    _check_text(content)
    return {**{key: value for key, value in message.items() if value is not None}, "content": content}


def _read_part(part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"prompts must be text alone, got a content with {str(part)[:200]}")
    return str(part["text"])


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt must be text that can be encoded, got {text[:200]!r}") from error


def write_prompt(row: Row) -> str:
    """Returns a prompt as one text, for judges and files: of a chat the contents, each after its role."""
    return write_messages(read_messages(row))


def write_messages(messages: Sequence[Message]) -> str:
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def hash_prompt(messages: Sequence[Message]) -> int:
    """Returns 64 bits that tell prompts apart."""
    return xxhash.xxh3_64_intdigest(write_messages(messages).encode())


def read_reference(row: Row, place: str | None = None) -> Any:
    """Returns the right answer of a row: at the dotted `place`, or else at the first of `REFERENCES` that it
    has. Raises ValueError where there is none."""
    for name in REFERENCES if place is None else (place,):
        if (value := find_value(row, name)) is not None:
            return value
    wanted = f"one of {', '.join(REFERENCES)}" if place is None else place
    raise ValueError(f"a row must have a right answer at {wanted}, got the columns {sorted(row)}")
