"""`data`: the rows that `task=dataset` makes prompts of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.rules import POSITIVE
from configs.setting import Section, setting

HUB = "hf:"
"""Begins the name of a data set of the Hugging Face hub."""


@dataclass(kw_only=True, slots=True)
class DataConfig(Section):
    """The rows that `task=dataset` makes prompts of: files, or other tasks."""

    train: Any = setting(None)
    """Rows to train on: a path (a file .parquet or .jsonl, a folder, a glob), `hf:NAME` (needs the extra
    `hub`), a list of them, or a list of sources `{name, path, weight, ...}`."""
    eval: Any = setting(None)
    """Held-out rows, in the same forms.

    Null: a hash of its prompt holds out one row of `data.train` in eight.
    """
    form: str | None = setting(None)
    """How prompt and right answer are made of other columns: `gsm8k`, `problem` (MATH-500, AIME, AMC),
    `mmlu_pro` or `gpqa`. Null: the rows have a prompt."""
    prompt: str | None = setting(None)
    """Column of the prompt, text or chat; with dots for columns within columns. Null: as the layout of
    verl, SkyRL or TRL has it."""
    answer: str | None = setting(None)
    """Column of the right answer, in the same way."""
    system_prompt: str | None = setting(None)
    """A system message before each prompt that has none."""
    chat_template_kwargs: dict[str, Any] = setting({})
    """Arguments of the chat template: `data.chat_template_kwargs.enable_thinking=false`."""
    prepared: list[Any] = setting([])
    """A record of each source's rows: found at the start of a run, and kept with it. Not for the command
    line."""
    max_prompt_tokens: int | None = setting(None, POSITIVE)
    """Longer prompts are left out, and counted.

    Null: `generators.max_model_len` less `sampling.max_tokens`.
    """


def make_absolute(value: Any, place: Callable[[Path], Path] = Path.absolute) -> Any:
    """Returns the value of `data.train` or `data.eval` with absolute paths, for other folders to work in."""
    if isinstance(value, str):
        return value if value.startswith(HUB) else str(place(Path(value).expanduser()))
    if isinstance(value, Mapping):
        return {key: make_absolute(one, place) if key == "path" else one for key, one in value.items()}
    return [make_absolute(one, place) for one in value] if isinstance(value, Sequence) else value
