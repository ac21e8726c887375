"""Every dataset of the `reasoning-gym` library by name, with its settings, in mixtures, and at the levels of
its own curriculum. The library scores the responses.

    task=reasoning_gym task.args.name=leg_counting task.args.settings={max_animals:4}
    task=reasoning_gym task.args.name=chain_sum task.args.levels=[0,1,2]
    task=reasoning_gym task.args.datasets=[{name:gcd,weight:2},{name:lcm,settings:{max_numbers:3}}]
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import reasoning_gym  # fills the registry
from reasoning_gym.coaching.attributes import RangeAttributeDefinition
from reasoning_gym.factory import CURRICULA, DATASETS
from reasoning_gym.utils import extract_answer

from configs.overrides import find_nearest_names
from configs.plugins import KeyRefused
from generators.splits import draw_for_split
from generators.task import Prompt, PromptSource, Score

assert reasoning_gym, "imported for its registry"

NAMES = sorted(name for name in DATASETS if name != "composite")
"""The library's `composite` is what `task.args.datasets` is."""
RESEEDED = {"acre": 10, "gsm_symbolic": 1, "list_functions": 1}
"""Datasets that draw all their questions when they are made: one with so many questions is made for each."""
SOLUTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: str(metadata["example_answer"]),
    "rubiks_cube": lambda metadata: str(metadata["example_correct_answer"]),
}
"""A right answer of datasets whose entries name it in their metadata alone."""
CHEATS: dict[str, Callable[[str, str], bool]] = {
    "coin_flip": lambda answer, right: abs(Fraction(answer) - Fraction(right)) > 1e-4,
    "complex_arithmetic": lambda answer, right: "nan" in answer.lower(),
    "game_of_life_halting": lambda answer, right: answer.strip().lower() != right.lower(),
}
"""Wrong answers that the library gives the whole reward, by dataset: `0` for any probability, `nan` for any
number, and any text. They score 0."""
NUM_NUMBERS = 1 << 31
"""Numbers that name the questions of a dataset. Some add a seed to it, and take less than 2^32."""
MAX_TRIES = 100
INSTRUCTION = "Provide your final answer between <answer> and </answer> tags."
ENTRY_KEYS = ("name", "settings", "weight", "level", "levels", "size", "label")


@dataclass(frozen=True)
class GymSource:
    """A dataset of the library with its settings: one source of prompts."""

    prompts: PromptSource
    dataset_name: str
    config: Any
    """The library's configuration of the dataset, which it has accepted."""

    @cached_property
    def dataset(self) -> Any:
        """The library's dataset, made when it is first needed: some take seconds."""
        return DATASETS[self.dataset_name][0](self.config)

    @cached_property
    def rows(self) -> Any:
        """The rows that `codeio` keeps in its class, where those of another level would replace them."""
        return getattr(self.dataset, "_jsonl_data", None)

    def draw_entry(self, rng: random.Random) -> dict[str, Any]:
        """Draws a question. A few numbers have none, and the library says so; then the next is tried."""
        for _ in range(MAX_TRIES):
            number = rng.randrange(NUM_NUMBERS)
            try:
                return self._make_entry(number)
            except (IndexError, RuntimeError, ValueError) as error:
                problem = error
        raise ValueError(f"{self.dataset_name} made no question of {MAX_TRIES} numbers") from problem

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        is_cheat = CHEATS.get(self.dataset_name)
        if is_cheat is not None and is_cheat(answer, str(entry["answer"])):
            return 0.0
        return float(self.dataset.score_answer(answer, entry))

    def find_solution(self, entry: dict[str, Any]) -> str | None:
        """Returns a right answer; None where the library tells none."""
        if self.dataset_name in SOLUTIONS:
            return SOLUTIONS[self.dataset_name](entry["metadata"])
        return None if entry["answer"] is None else str(entry["answer"])

    def _make_entry(self, number: int) -> dict[str, Any]:
        dataset = self.dataset
        dataset.size = NUM_NUMBERS  # word_ladder lowers it when a number has no question
        if self.rows is not None:
            type(dataset)._jsonl_data = self.rows
        if self.dataset_name in RESEEDED:
            dataset = type(dataset)(replace(self.config, seed=number))
            number %= RESEEDED[self.dataset_name]
        with hold_global_randomness(number):
            entry: dict[str, Any] = dataset[number]
        return entry


class Task:
    name = "reasoning_gym"
    packages = ("reasoning-gym",)

    def __init__(
        self,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        levels: Sequence[int] | None = None,
        size: int | None = None,
        datasets: Sequence[Mapping[str, Any]] | None = None,
        answer: str = "tag",
        instruction: str | None = None,
    ) -> None:
        """Takes one dataset (`name`, and its `settings`, `levels` and `size`), or `datasets`, a list of such
        with `weight` and `label` (the source's name) besides.

        `settings` are the fields of the library's configuration. Each of `levels` becomes a source
        `name@level` of the dataset's own curriculum. `size` is the number of training prompts; without it
        they never end.
        `answer`: the library scores the text in the last <answer> tag (`tag`), or the whole `reply`.
        `instruction` follows each question; by default it asks for the tag.
        """
        if answer not in ("tag", "reply"):
            raise KeyRefused(f"task.args.answer must be tag or reply, got {answer!r}")
        if (name is None) == (datasets is None):
            got = "none" if name is None else "both"
            raise KeyRefused(f"task.args must have either name or datasets, got {got}")
        if datasets is None:
            entries: list[tuple[str, Mapping[str, Any]]]
            entries = [("task.args", {"name": name, "settings": settings, "levels": levels, "size": size})]
        else:
            if settings or levels or size:
                raise KeyRefused("settings, levels and size must stand in the entries of task.args.datasets")
            if not isinstance(datasets, Sequence) or not datasets:
                raise KeyRefused(f"task.args.datasets must be a list of one dataset or more, got {datasets}")
            entries = [(f"task.args.datasets[{place}]", one) for place, one in enumerate(datasets)]
        self._gym_sources = [source for key, entry in entries for source in read_entry(key, entry)]
        self.sources = [source.prompts for source in self._gym_sources]
        self._takes_tag = answer == "tag"
        self._instruction = instruction if instruction is not None else INSTRUCTION if self._takes_tag else ""

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        row, place = divmod(index, len(self._gym_sources))
        source = self._gym_sources[place]
        rng = random.Random(f"{seed}/{split}/{source.prompts.name}/{row}")
        entry = self._draw_entry(source, split, rng)
        return Prompt(self._write_prompt(entry), (place, entry))

    def score_response(self, prompt: Prompt, response: str) -> Score:
        place, entry = prompt.entry
        answer = extract_answer(response) if self._takes_tag else response.strip()
        if answer is None:
            return Score(0.0, {"answered": 0.0, "unscored": 0.0})
        try:
            reward = self._gym_sources[place].score_answer(answer, entry)
        except Exception:  # of some wrong answers: the library tries to read them as what they are not
            return Score(0.0, {"answered": 1.0, "unscored": 1.0})
        return Score(reward, {"answered": 1.0, "unscored": 0.0})

    def solved_examples(self, split: str, seed: int) -> Iterator[tuple[str, str]]:
        """Yields (question, answer) without end; the tiny model is warm-started on them. Of several levels
        only the lowest is shown, so that the others remain to be learned."""
        rng = random.Random(seed)
        lowest = min((one.level for one in self.sources if one.level is not None), default=None)
        shown = [one for one in self._gym_sources if one.prompts.level in (None, lowest)]
        weights = [source.prompts.weight for source in shown]
        while True:
            source = rng.choices(shown, weights)[0]
            entry = self._draw_entry(source, split, rng)
            solution = source.find_solution(entry)
            if solution is None:
                raise ValueError(
                    "model.path must be a folder for a dataset whose answers the library does not tell, "
                    f"got tiny with {source.dataset_name}"
                )
            answer = f"<answer>{solution}</answer>" if self._takes_tag else solution
            yield self._write_prompt(entry), answer

    def _draw_entry(self, source: GymSource, split: str, rng: random.Random) -> dict[str, Any]:
        try:
            return draw_for_split(source.draw_entry, lambda entry: str(entry["question"]), split, rng)
        except ValueError as error:
            raise ValueError(f"{error} ({source.dataset_name} with {source.config})") from error

    def _write_prompt(self, entry: dict[str, Any]) -> str:
        return "\n\n".join(filter(None, (str(entry["question"]), self._instruction)))


def read_entry(key: str, entry: Mapping[str, Any]) -> list[GymSource]:
    """Returns the sources of an entry of `task.args.datasets`, one for each level. `key` names the entry."""
    if not isinstance(entry, Mapping) or not set(entry) <= set(ENTRY_KEYS):
        raise KeyRefused(f"{key} must have no keys but {', '.join(ENTRY_KEYS)}, got {entry}")
    name, levels, level = str(entry.get("name")), entry.get("levels"), entry.get("level")
    if name not in NAMES:
        nearest = find_nearest_names(name, NAMES)
        raise KeyRefused(f"{key}.name must be a dataset of reasoning-gym{nearest}, got {name!r}")
    if levels is not None and level is not None:
        raise KeyRefused(f"{key} must have either level or levels, got both")
    size, weight, label = entry.get("size"), entry.get("weight", 1.0), str(entry.get("label") or name)
    settings = dict(entry.get("settings") or {})
    chosen = levels if levels is not None else [level]
    if not isinstance(chosen, Sequence) or not chosen:
        raise KeyRefused(f"{key}.levels must be a list of levels, got {chosen!r}")
    made_of = f"{name} with {json.dumps(settings, sort_keys=True, default=str)}"
    return [
        GymSource(
            PromptSource(label if one is None else f"{label}@{one}", size, weight, one, made_of),
            name,
            make_gym_config(key, name, settings, one),
        )
        for one in chosen
    ]


def make_gym_config(key: str, name: str, settings: Mapping[str, Any], level: int | None) -> Any:
    """Returns the library's configuration of a dataset. Raises KeyRefused that names the key, the rule and
    the value, for what the library does not have or does not accept."""
    config_class = DATASETS[name][1]
    known = [field.name for field in fields(config_class) if field.name not in ("seed", "size")]
    for setting in settings:
        if setting not in known:
            nearest = find_nearest_names(str(setting), known) or f" ({', '.join(known)})"
            raise KeyRefused(f"{key}.settings must be settings of {name}{nearest}, got {setting!r}")
    values = {**settings, "seed": 0, "size": RESEEDED.get(name, 1)}
    try:
        config = config_class(**values) if level is None else set_level(key, name, values, level)
        if hasattr(config, "validate"):
            config.validate()
    except KeyRefused:
        raise
    except (AssertionError, TypeError, ValueError) as error:
        shown = dict(settings) if level is None else f"{dict(settings)} at level {level}"
        raise KeyRefused(f"{key} must have settings that {name} accepts, got {shown}: {error!r}") from error
    return config


def set_level(key: str, name: str, values: Mapping[str, Any], level: int) -> Any:
    """Returns the configuration of a level of the dataset's own curriculum."""
    if name not in CURRICULA:
        raise KeyRefused(f"{key}.levels must stay away from {name}, which has no curriculum, got {level}")
    curriculum = CURRICULA[name]()
    attributes = curriculum.attributes.values()
    count = max((len(attribute.levels) for attribute in attributes), default=0)
    if not isinstance(level, int) or not 0 <= level < count:
        raise KeyRefused(f"{key}.levels of {name} must be in 0..{count - 1}, got {level!r}")
    decided = {
        field
        for one in attributes
        for field in (
            (one.lower_field_name, one.upper_field_name)
            if isinstance(one, RangeAttributeDefinition)
            else (one.field_name,)
        )
    }
    if both := sorted(decided & set(values)):
        raise KeyRefused(f"{key}.settings must leave to the level what it decides, got {', '.join(both)}")
    curriculum.set_global_level(level)
    return curriculum.generate_configuration(dict(values))


@contextmanager
def hold_global_randomness(number: int) -> Iterator[None]:
    """Python's and numpy's global random numbers follow from `number` within, because some datasets use them.
    They go on as before afterwards."""
    before, before_numpy = random.getstate(), np.random.get_state()
    random.seed(number)
    np.random.seed(number)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)
