"""Plays the first groups of a run, with its engine or without one, and notes what each of them shows.

Without an engine the reply to a prompt is its row's right answer, which the reward then rates; of an
environment and of an agent there is the first prompt only.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from buffers.messages import Lease
from buffers.prompts import decode_index
from buffers.refills import is_within
from buffers.supply import PromptSupply
from buffers.terms import make_terms
from configs.schema import Config
from generators.engine import Completion, Engine, Sample
from generators.group import parse_lease_id
from generators.solo_play import SoloGroup
from generators.tasks.dataset import Task as Dataset
from generators.user_code.task_kinds import read_num_prompts
from sync.weight_source import WeightSource

SECONDS = "seconds/"
STEP_S = 0.01
"""Seconds of a step of an engine that answers nothing."""


@dataclass(slots=True, kw_only=True)
class PreviewSample:
    """One reply, or one episode, and its reward."""

    tokens: list[int]
    """All that the engine was given and has sampled, of the episode's last branch."""
    sampled: list[bool]
    """One for each of `tokens`."""
    text: str
    """The reply; of several turns, the last one."""
    stop: str
    reward: float
    components: dict[str, float]
    seconds: dict[str, float]
    """Seconds of scoring, by the reward's part."""

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)


@dataclass(slots=True, kw_only=True)
class PreviewGroup:
    """A prompt, and what came of it."""

    group: int
    source: str
    index: int
    """Number of the prompt in its source."""
    prompt: list[int] = field(default_factory=list)
    """Tokens of the first prompt. Empty where it could not be made."""
    answer: str | None = None
    """The right answer, where the row has one."""
    samples: list[PreviewSample] = field(default_factory=list)
    error: str = ""
    """Why the group could not be played."""
    unscored: list[list[int]] = field(default_factory=list)
    """Tokens of the replies that it had until then."""
    rejection: str = ""
    """Why the run would reject the group: the name of the rule."""


class RecordedEngine:
    """An engine whose prompts and replies are kept: a group that fails shows them too."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.prompts: dict[int, list[int]] = {}
        """First prompt of each lease, by its id."""
        self.replies: dict[int, list[list[int]]] = {}
        """Tokens of the replies, as they came."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add_sample(self, sample: Sample) -> None:
        self.prompts.setdefault(parse_lease_id(sample.id), sample.prompt)
        self._engine.add_sample(sample)

    def step(self) -> list[Completion]:
        completions = self._engine.step()
        for one in completions:
            self.replies.setdefault(parse_lease_id(one.id), []).append(one.tokens)
        return completions


class AnswerEngine:
    """Answers each sample at once with the tokens that it is given."""

    def __init__(self, write_reply: Callable[[Sample], list[int]] | None) -> None:
        """None: no sample gets an answer."""
        self.is_silent = write_reply is None
        self.version: int | None = 0
        self._write_reply = write_reply
        self._waiting: dict[str, Sample] = {}

    def add_sample(self, sample: Sample) -> None:
        self._waiting[sample.id] = sample

    def abort_samples(self, ids: list[str]) -> list[Completion]:
        return [_complete(self._waiting.pop(name), [], "abort") for name in ids if name in self._waiting]

    def step(self) -> list[Completion]:
        if self._write_reply is None:
            time.sleep(STEP_S)
            return []
        waiting, self._waiting = self._waiting, {}
        replies = [(sample, self._write_reply(sample)) for sample in waiting.values()]
        return [
            _complete(
                sample, reply[: sample.max_tokens], "stop" if len(reply) <= sample.max_tokens else "length"
            )
            for sample, reply in replies
        ]

    def count_sampled_tokens(self) -> dict[str, int]:
        return dict.fromkeys(self._waiting, 0)

    def read_tokens(self, sample_id: str, start: int) -> list[int]:
        return []

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting)

    def load_version(self, source: WeightSource) -> None:
        """Holds no weights."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Holds no memory."""

    def wake(self) -> None:
        """Holds no memory."""

    def shutdown(self) -> None:
        """Holds nothing."""


def _complete(sample: Sample, tokens: list[int], reason: str) -> Completion:
    return Completion(
        id=sample.id,
        tokens=tokens,
        logprobs=[0.0] * len(tokens),
        versions=[0] * len(tokens),
        finish_reason=reason,
    )


def list_leases(config: Config, task: Any, split: str, num_rows: int, num_samples: int) -> list[Lease]:
    """Returns leases of the groups that the run would begin with, in its own order of prompts; no more than
    `task` has held-out prompts."""
    supply, indices = PromptSupply(make_terms(config)), list[int]()
    if split == "eval" and (number := read_num_prompts(task, "num_eval_prompts")) is not None:
        num_rows = min(num_rows, number)
    for group in range(num_rows):
        # While all prompts are under way the run would wait; a preview has seen them all.
        index = supply.curriculum.choose_prompt(group) if split == "train" else group
        if index is None:
            break
        if split == "train":
            supply.start_group(group, index)
        indices.append(index)
    return [
        Lease(
            id=group,
            split=split,
            task=config.task.name,
            index=index,
            seed=config.run.seed,
            group=group,
            due=0,
            min_version=0,
            num_samples=num_samples,
        )
        for group, index in enumerate(indices)
    ]


def count_first_groups(config: Config, num_groups: int) -> list[int]:
    """Returns how many of a run's first groups each source gets, as far as no result changes that."""
    supply, counts = PromptSupply(make_terms(config)), [0] * len(make_terms(config).list_sources())
    for group in range(num_groups):
        index = supply.find_prompt(group)
        supply.start_group(group, index)
        counts[decode_index(index, len(counts))[0]] += 1
    return counts


def begin_group(config: Config, task: Any, lease: Lease, answer: str | None) -> PreviewGroup:
    if isinstance(task, Dataset):
        source, row = task.find_row(lease.split, lease.index)
        return PreviewGroup(group=lease.group, source=source.name, index=row, answer=answer)
    sources = make_terms(config).list_sources()
    place, row = decode_index(lease.index, len(sources))
    return PreviewGroup(group=lease.group, source=sources[place].name, index=row, answer=answer)


def fill_group(found: PreviewGroup, played: SoloGroup, engine: RecordedEngine, config: Config) -> None:
    """Notes what has become of a group."""
    found.error, found.prompt = played.error, engine.prompts.get(found.group, [])
    if found.error:
        found.unscored = engine.replies.get(found.group, [])
    rows = {row.sample: row for row in played.rows}
    for number, episode in enumerate(played.episodes):
        row, components = rows[number], dict(episode.score.components)
        seconds = {name: components.pop(name) for name in list(components) if name.startswith(SECONDS)}
        found.samples.append(
            PreviewSample(
                tokens=list(row.tokens),
                sampled=list(row.sampled),
                text=_read_last_reply(episode.messages),
                stop=episode.stop,
                reward=episode.score.reward,
                components=components,
                seconds={name.removeprefix(SECONDS): value for name, value in seconds.items()},
            )
        )
    found.rejection = name_rejection([sample.reward for sample in found.samples], config)


def _read_last_reply(messages: Sequence[dict[str, Any]]) -> str:
    replies = [message for message in messages if message["role"] == "assistant"]
    return str(replies[-1].get("content") or "") if replies else ""


def name_rejection(rewards: Sequence[float], config: Config) -> str:
    """Returns the key of the rule by which the run would reject a group with these rewards; empty where none
    does."""
    if not rewards:
        return ""
    if config.algo.dynamic_sampling and len(rewards) > 1 and min(rewards) == max(rewards):
        return "algo.dynamic_sampling"
    keep, mean = config.curriculum.keep, sum(rewards) / len(rewards)
    return "curriculum.keep" if keep is not None and not is_within(mean, keep) else ""


def split_runs(tokens: Sequence[int], marks: Sequence[Any]) -> Iterator[tuple[Any, list[int]]]:
    """Yields runs of tokens whose marks are equal."""
    start = 0
    for place in range(1, len(tokens) + 1):
        if place == len(tokens) or marks[place] != marks[start]:
            yield marks[start], list(tokens[start:place])
            start = place
