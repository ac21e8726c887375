"""The host of a task in a worker: it answers the generator's calls in plain values.

Prompts and rows are named by (split, index, seed) and made again in each process, so no object of the task's
ever crosses to another process.
"""

import asyncio
import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from configs.plugins import call_plugin
from generators.environment import EpisodeRecord, Turn
from generators.plain_values import MAX_NAME, check_number, describe_error, keep_text, make_plain, show_value
from generators.task import Prompt, Score
from generators.tasks import find_task_class
from generators.user_code.agent_command import bypass_proxies, check_command, run_command
from generators.user_code.task_kinds import TaskKind, check_environment, find_kind, read_num_prompts

MAX_PROMPTS = 16
"""Prompts that are kept for the scores that follow."""

PromptKey = tuple[str, int, int]
"""Split, index and seed."""


class UnsuitableTask(ValueError):
    """The task's class or its arguments do not do. The text names `task.name` or `task.args`."""


class TaskHost:
    """Holds the task, and the environment of the episode under way. One call at a time.

    Methods of the task may be plain or async. The async ones share an event loop, which runs during calls.
    """

    def __init__(self, target: str, args: Mapping[str, Any], loop: asyncio.Runner | None = None) -> None:
        """Imports the class, and makes the task unless the class is an environment. Raises UnsuitableTask,
        and whatever the module raises while it is imported.

        `loop` runs the async methods; None makes a loop when it is needed.
        """
        self._name, self._args = target, dict(args)
        try:
            self._class = find_task_class(target)
            self.kind = find_kind(self._class, target)
        except ValueError as error:
            raise UnsuitableTask(str(error)) from error
        self._task: Any = self._class if self.kind == TaskKind.environment else self._make_object()
        self._environment: Any = None
        self._prompts: OrderedDict[PromptKey, Prompt] = OrderedDict()
        self._loop = loop

    @property
    def is_free(self) -> bool:
        """True when no episode is under way in it. An agent's worker is killed after its episode anyway."""
        return self._environment is None and self.kind != TaskKind.agent

    def answer_call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Calls the method that the generator names. Raises whatever the task raises."""
        if method not in _METHODS:
            raise ValueError(f"method must be one of {sorted(_METHODS)}, got {method!r}")
        return getattr(self, method)(*arguments)

    def describe(self) -> dict[str, Any]:
        """Returns the kind of task and what it has. An environment is made, to see that `task.args` suit it,
        and closed, whatever that raises before `reset`."""
        if self.kind == TaskKind.environment:
            environment = self._make_object()
            with contextlib.suppress(Exception):
                self._finish(environment.close())
        if (command := getattr(self._task, "agent_command", None)) is not None:
            check_command(command)
        return {
            "kind": str(self.kind),
            "name": keep_text(str(getattr(self._task, "name", self._name))[:MAX_NAME]),
            "num_prompts": read_num_prompts(self._task),
            "max_scores": getattr(self._task, "max_scores", None),
            "has_group_scores": callable(getattr(self._task, "score_group", None)),
            "needs_tokens": bool(getattr(self._task, "needs_tokens", False)),
        }

    def make_prompt(self, split: str, index: int, seed: int) -> dict[str, Any]:
        prompt = self._finish(self._task.make_prompt(split, index, seed))
        if not isinstance(prompt, Prompt) or not isinstance(prompt.text, str):
            raise ValueError(f"make_prompt must return a generators.task.Prompt, got {show_value(prompt)}")
        self._prompts[split, index, seed] = prompt
        while len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return {
            "text": make_plain(prompt.text, "text of the prompt"),
            "messages": make_plain(prompt.messages, "messages of the prompt"),
            "template_args": make_plain(prompt.template_args, "template_args of the prompt"),
        }

    def score_response(self, split: str, index: int, seed: int, response: str) -> dict[str, Any]:
        if (split, index, seed) not in self._prompts:
            self.make_prompt(split, index, seed)
        prompt = self._prompts[split, index, seed]
        return _write_score(self._finish(self._task.score_response(prompt, response)), "score_response")

    def reset(self, split: str, index: int, seed: int, episode_seed: int) -> dict[str, Any]:
        """Makes the environment and begins its episode."""
        self.close()
        row = self._make_row(split, index, seed)
        if self.kind == TaskKind.environment:
            self._environment = self._make_object()
        else:
            self._environment = check_environment(self._finish(self._task.make_environment(row)))
        return _write_turn(self._finish(self._environment.reset(row, episode_seed)), "reset")

    def step(self, reply: dict[str, Any]) -> dict[str, Any]:
        if self._environment is None:
            raise ValueError("step must follow reset, got no environment")
        return _write_turn(self._finish(self._environment.step(reply)), "step")

    def close(self) -> None:
        """Closes the environment where there is one."""
        environment, self._environment = self._environment, None
        if environment is not None:
            self._finish(environment.close())

    def score_group(
        self, split: str, index: int, seed: int, episodes: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """`episodes` holds for each episode the fields of `EpisodeRecord` other than its row."""
        row = self._make_row(split, index, seed)
        records = [EpisodeRecord(row=row, **episode) for episode in episodes]
        scores = self._finish(self._task.score_group(records))
        if scores is None:
            return None
        if not isinstance(scores, Sequence) or len(scores) != len(records):
            raise ValueError(f"score_group must return {len(records)} scores, got {show_value(scores)}")
        return [_write_score(score, "score_group") for score in scores]

    def run_agent(self, split: str, index: int, seed: int, base_url: str, api_key: str) -> Any:
        """Runs an agent until it is done, and returns its outcome: what `run_agent` returns, or the last line
        that `agent_command` prints."""
        row = self._make_row(split, index, seed)
        bypass_proxies(base_url)
        if (command := getattr(self._task, "agent_command", None)) is not None:
            outcome = run_command(check_command(command), make_plain(row, "row"), base_url, api_key)
            return make_plain(outcome, "outcome of agent_command")
        return make_plain(self._finish(self._task.run_agent(row, base_url, api_key)), "outcome of run_agent")

    def score_agent(self, split: str, index: int, seed: int, outcome: Any) -> dict[str, Any]:
        """Scores the outcome of an agent. A task without `score_agent` gives the reward as the outcome, or
        under the key `reward` of it, beside components."""
        if callable(getattr(self._task, "score_agent", None)):
            row = self._make_row(split, index, seed)
            return _write_score(self._finish(self._task.score_agent(row, outcome)), "score_agent")
        components = dict(outcome) if isinstance(outcome, Mapping) else {"reward": outcome}
        if "reward" not in components:
            raise ValueError(f"the outcome of an agent must hold a reward, got {show_value(outcome)}")
        return _write_score(Score(components.pop("reward"), components), "an agent")

    def _make_row(self, split: str, index: int, seed: int) -> dict[str, Any]:
        if not callable(getattr(self._task, "make_row", None)):
            return {"split": split, "index": index, "seed": seed}
        row = self._finish(self._task.make_row(split, index, seed))
        if not isinstance(row, Mapping):
            raise ValueError(f"make_row must return a dict, got {show_value(row)}")
        return dict(row)

    def _make_object(self) -> Any:
        try:
            return call_plugin(self._class, self._name, self._args, "task.args")
        except ValueError as error:
            raise UnsuitableTask(str(error)) from error
        except BaseException as error:
            raise UnsuitableTask(
                f"task.args must suit {self._name}, got {self._args}: {describe_error(error)}"
            ) from error

    def _finish(self, value: Any) -> Any:
        """Returns the value, or where a method is async the value that it gives in the end."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop.run(_await_value(value))


async def _await_value(value: Any) -> Any:
    return await value


_METHODS = frozenset(name for name in vars(TaskHost) if not name.startswith("_") and name != "answer_call")


def _write_score(score: Any, method: str) -> dict[str, Any]:
    if not isinstance(score, Score):
        raise ValueError(f"{method} must return a generators.task.Score, got {show_value(score)}")
    return {
        "reward": check_number("reward", score.reward),
        "components": _write_components(score.components),
    }


def _write_turn(turn: Any, method: str) -> dict[str, Any]:
    if not isinstance(turn, Turn):
        raise ValueError(f"{method} must return a generators.environment.Turn, got {show_value(turn)}")
    return {
        "messages": make_plain(turn.messages, "messages"),
        "tools": make_plain(turn.tools, "tools"),
        "reward": check_number("reward", turn.reward),
        "components": _write_components(turn.components),
        "done": _read_flag(turn.done),
    }


def _read_flag(value: Any) -> bool:
    """Returns a truth value of Python, numpy or torch. A text such as "no" would count as true."""
    if isinstance(value, bool):
        return value
    try:
        found = value.item()
    except Exception:
        found = None
    if not isinstance(found, bool):
        raise ValueError(f"done must be true or false, got {show_value(value)}")
    return found


def _write_components(components: Any) -> dict[str, float]:
    if not isinstance(components, Mapping):
        raise ValueError(f"components must be a dict of numbers by name, got {show_value(components)}")
    for key in components:
        if not isinstance(key, str) or len(key) > MAX_NAME:
            raise ValueError(
                f"names of components must be text of at most {MAX_NAME} characters, got {show_value(key)}"
            )
    numbers = {key: check_number(f"components[{key!r}]", components[key]) for key in components}
    named: dict[str, float] = make_plain(numbers, "components")
    return named
