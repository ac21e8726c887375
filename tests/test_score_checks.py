"""A score holds finite float32 numbers by name, or it is refused with field, rule and value."""

import numpy as np
import pytest
import torch

from buffers.trajectory import GREEDY
from generators.plain_values import describe_error
from generators.score_checks import check_score
from generators.task import Score


@pytest.mark.parametrize(
    ("score", "error"),
    [
        (Score(float("nan")), "reward must be finite, got nan"),
        (Score(float("-inf")), "reward must be finite, got -inf"),
        (Score(1e39), "reward must be within ± 3.4e38 (it is kept in float32), got 1e+39"),
        (Score(10**400), "reward must be within ± 3.4e38"),
        (Score(10**5000), "reward must be within ± 3.4e38"),
        (Score("0.5"), "reward must be a number, got '0.5'"),
        (Score(None), "reward must be a number, got None"),
        (Score(1j), "reward must be a number, got 1j"),
        (Score(torch.ones(2)), "reward must be a number, got tensor([1., 1.])"),
        (Score(1.0, {"length": "long"}), "components['length'] must be a number, got 'long'"),
        (Score(1.0, {"length": float("inf")}), "components['length'] must be finite, got inf"),
        (Score(1.0, {"length": -1e39}), "components['length'] must be within ± 3.4e38"),
        (Score(1.0, [1.0]), "components must be a dict of numbers by name, got [1.0]"),
        (Score(1.0, {str(i): 0.0 for i in range(65)}), "components must be at most 64, got 65"),
        (
            Score(1.0, {"x" * 201: 0.0}),
            "names of components must be text of at most 200 characters…, got 'xxx",
        ),
        (Score(1.0, {7: 0.0}), "names of components must be text…, got 7"),
        (Score(1.0, {"\ud800": 0.0}), "names of components must be text"),
        (Score(1.0, {GREEDY: 0.0}), "names of components must be text… other than 'greedy', got 'greedy'"),
    ],
)
def test_a_score_that_a_trajectory_cannot_hold_is_refused_with_field_rule_and_value(
    score: Score, error: str
) -> None:
    with pytest.raises(ValueError) as raised:
        check_score(score)
    assert all(part in str(raised.value) for part in error.split("…"))


def test_numbers_of_every_kind_are_taken_for_what_they_are() -> None:
    for number in (
        True,
        1,
        1.0,
        np.float32(1),
        np.bool_(True),
        np.int64(1),
        torch.tensor(1.0),
        torch.tensor(1),
    ):
        found = check_score(Score(number, {"a": number}))
        assert found == Score(1.0, {"a": 1.0}) and type(found.reward) is type(found.components["a"]) is float
    assert describe_error(ValueError("plain")) == "ValueError: plain"
