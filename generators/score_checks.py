"""The checks of scores: user code may return anything, and a trajectory holds finite float32 numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from buffers.trajectory import GREEDY
from generators.plain_values import MAX_ERROR, MAX_NAME, check_number, describe_error, is_text, show_value
from generators.task import Score

__all__ = ["MAX_ERROR", "check_score", "describe_error", "read_score", "read_scores"]

MAX_COMPONENTS = 64


def check_score(score: Any) -> Score:
    """Returns the score in plain floats. Raises ValueError for a score that a trajectory cannot hold."""
    if not isinstance(score, Score):
        raise ValueError(f"score must be a generators.task.Score, got {show_value(score)}")
    components = score.components
    if not isinstance(components, Mapping):
        raise ValueError(f"components must be a dict of numbers by name, got {show_value(components)}")
    if len(components) > MAX_COMPONENTS:
        raise ValueError(f"components must be at most {MAX_COMPONENTS}, got {len(components)}")
    for name in components:
        if not isinstance(name, str) or len(name) > MAX_NAME or name == GREEDY or not is_text(name):
            raise ValueError(
                f"names of components must be text of at most {MAX_NAME} characters other than {GREEDY!r}, "
                f"got {show_value(name)}"
            )
    checked = {name: check_number(f"components[{name!r}]", value) for name, value in components.items()}
    return Score(check_number("reward", score.reward), checked)


def read_score(value: Any) -> Score:
    """Returns the score that a worker has sent, checked as `check_score` does. Nothing from a worker is
    trusted."""
    if not isinstance(value, Mapping) or set(value) != {"reward", "components"}:
        raise ValueError(f"score must have reward and components, got {show_value(value)}")
    return check_score(Score(value["reward"], value["components"]))


def read_scores(value: Any, count: int) -> list[Score] | None:
    """Returns the scores of a group of `count` episodes, or None where the task leaves them as they are."""
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
        raise ValueError(f"score_group must return {count} scores, got {show_value(value)}")
    return [read_score(score) for score in value]
