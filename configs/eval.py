"""`eval`: evaluations of versions while a run trains, on held-out prompts and on named sets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from configs.reward import RewardConfig
from configs.rules import FINITE, NOT_NEGATIVE, POSITIVE, Rule, above_up_to
from configs.setting import Condition, Section, section, setting

HELD_OUT = "held_out"
"""Name of the set that every run has: held-out prompts of the run's own task."""
MAX_SAMPLES = 4096
"""Most samples of one prompt."""
PROMPT_KEYS = ("task", "args", "data", "form", "prompt", "answer", "system_prompt", "chat_template_kwargs")
"""Keys of a set that say which prompts it has."""
SET_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,99}")
"""Names of sets. They are names of folders and of metrics too."""


@dataclass(kw_only=True, slots=True)
class EvalSetConfig(Section):
    """One named set: `eval.sets.NAME.data=test.parquet` makes a set of this name."""

    benchmark: str | None = setting(None)
    """Name in the catalogue of benchmarks, which then says whatever is not said here. The set's own name
    counts where it is one."""
    task: str = setting("dataset")
    """The task that makes the prompts and scores the replies, as `task.name`. `dataset` reads `data`."""
    args: dict[str, Any] = setting({})
    """Keyword arguments for that task's class, as `task.args`."""
    data: Any = setting(None)
    """The rows, in the forms of `data.eval`."""
    form: str | None = setting(None)
    """Form of the rows, as `data.form`."""
    prompt: str | None = setting(None)
    """Column of the prompt, as `data.prompt`."""
    answer: str | None = setting(None)
    """Column of the right answer, as `data.answer`."""
    system_prompt: str | None = setting(None)
    """A system message before each prompt that has none."""
    chat_template_kwargs: dict[str, Any] = setting({})
    """Arguments of the chat template, as `data.chat_template_kwargs`."""
    reward: RewardConfig = section(RewardConfig)
    samples: int = setting(1, Rule(f"from 1 to {MAX_SAMPLES}", lambda value: 1 <= value <= MAX_SAMPLES))
    """Samples of each prompt."""
    temperature: float | None = setting(None, NOT_NEGATIVE)
    """Sampling temperature. 0: the likeliest token. Null: `sampling.temperature`."""
    max_tokens: int | None = setting(None, POSITIVE)
    """Longest reply, in tokens. Null: `sampling.max_tokens`."""
    prompts: int | None = setting(None, POSITIVE)
    """The first so many prompts only. Null: all of them. A task without an end of held-out prompts needs a
    number."""
    every: int | None = setting(None, NOT_NEGATIVE)
    """Steps between evaluations on this set. Null: `eval.every`."""
    k: list[int] = setting([])
    """The numbers of pass@k. Empty: 1 and `samples`."""
    passes_at: float = setting(1.0, FINITE)
    """A sample passes with a reward of at least this."""
    prepared: list[Any] = setting([])
    """As `data.prepared`. Not for the command line."""
    size: int | None = setting(None, POSITIVE)
    """Number of held-out prompts of the task: found at the start of a run, and kept with it. Not for the
    command line."""

    @property
    def has_files(self) -> bool:
        """True where rows of files are among the set's; tasks score their own."""
        return _names_files(self.data)

    @property
    def num_prompts(self) -> int | None:
        """Prompts of one evaluation; None where nothing says how many there are."""
        known = [number for number in (self.prompts, self.size) if number is not None]
        return min(known, default=None)

    @property
    def pass_ks(self) -> list[int]:
        return sorted(set(self.k)) or sorted({1, self.samples})


@dataclass(kw_only=True, slots=True)
class EvalConfig(Section):
    """Evaluation of versions, beside training."""

    every: int = setting(0, NOT_NEGATIVE)
    """Steps between evaluations. 0: only before the first step and after the last."""
    prompts: int = setting(512, NOT_NEGATIVE)
    """Held-out prompts of the run's own task in one evaluation, one sample each at the run's temperature: the
    set `held_out`. All of them where it has fewer. 0 leaves this set out."""
    sets: dict[str, EvalSetConfig] = setting({})
    """Further sets by name, each with the keys of `eval.sets.NAME`."""
    benchmarks: list[str] = setting([])
    """Sets of the catalogue, by name: `eval.benchmarks=[gsm8k,aime24]`. Each key of `eval.sets.NAME` may be
    said otherwise."""
    generators: int = setting(0, NOT_NEGATIVE)
    """Generators that this command starts for evaluation alone. They lease no groups, and all tokens of a
    result are of one version. 0: the generators that train evaluate too."""
    share: float = setting(0.5, above_up_to(0, 1))
    """Part of a generator's episodes that evaluation takes at most while the run trains. Groups of the step
    at hand go before it. A prompt with more samples than that is played while no other one is. Without effect
    where `eval.generators` is above 0."""

    def conditions(self) -> list[Condition]:
        found = []
        for name, one in self.sets.items():
            key = f"eval.sets.{name}"
            found += [
                Condition(
                    name != HELD_OUT,
                    key,
                    "have another name (held_out is the set of the run's own task)",
                    name,
                ),
                Condition(
                    SET_NAME.fullmatch(name) is not None,
                    key,
                    "have a name of at most 100 letters, digits, `_` and `-`",
                    repr(name),
                ),
                Condition(
                    all(1 <= k <= one.samples for k in one.k),
                    f"{key}.k",
                    f"be numbers from 1 to {key}.samples",
                    f"{one.k} with {one.samples}",
                ),
            ]
            found += [replace(below, key=f"{key}.{below.key}") for below in one.reward.conditions()]
        return found


def _names_files(rows: Any) -> bool:
    """True where one of the sources, in any of the forms of `data.train`, has a path."""
    if isinstance(rows, list | tuple):
        return any(map(_names_files, rows))
    return isinstance(rows, str) or (isinstance(rows, Mapping) and rows.get("task") is None)
