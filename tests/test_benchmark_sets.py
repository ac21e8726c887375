"""Benchmarks in a configuration: the catalogue says whatever the user does not."""

from pathlib import Path

import pytest

from configs.benchmarks import BENCHMARKS
from configs.load import load_config, load_recorded_config, to_yaml

ROOM = "generators.max_model_len=40000"


def test_a_benchmark_is_a_set_by_its_name() -> None:
    config = load_config(["eval.benchmarks=[gsm8k,aime24]", ROOM])
    assert list(config.eval.sets) == ["gsm8k", "aime24"]
    aime = config.eval.sets["aime24"]
    assert (aime.samples, aime.form, aime.reward.function, aime.pass_ks) == (32, "problem", "math", [1, 32])
    assert config.eval.sets["gsm8k"].temperature == 0.0
    rows = config.for_evaluation(aime).data
    assert (rows.form, rows.eval) == ("problem", BENCHMARKS["aime24"].settings["data"])


def test_each_key_of_a_benchmark_may_be_said_otherwise() -> None:
    config = load_config(
        [
            "eval.sets.aime24.samples=4", "eval.sets.aime24.data=mine.jsonl", "eval.benchmarks=[aime24]",
            "eval.sets.greedy.benchmark=aime24", "eval.sets.greedy.temperature=0", "eval.sets.gsm8k={}", ROOM,
        ]
    )  # fmt: skip
    aime, greedy = config.eval.sets["aime24"], config.eval.sets["greedy"]
    assert (aime.samples, aime.data, aime.max_tokens) == (4, "mine.jsonl", 16384)
    assert (greedy.samples, greedy.temperature, greedy.form) == (32, 0.0, "problem")
    assert config.eval.sets["gsm8k"].max_tokens == 1024


def test_a_recorded_run_keeps_what_its_sets_were_and_takes_further_benchmarks(tmp_path: Path) -> None:
    config = load_config(["eval.sets.gsm8k.samples=2", "eval.sets.gsm8k.temperature=null", ROOM])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_recorded_config(tmp_path, ["eval.benchmarks=[gsm8k,amc23]", "eval.sets.gsm8k.prompts=7"])
    gsm8k = again.eval.sets["gsm8k"]
    assert (gsm8k.samples, gsm8k.temperature, gsm8k.prompts) == (2, None, 7)
    assert again.eval.sets["amc23"].samples == BENCHMARKS["amc23"].settings["samples"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("eval.benchmarks=[gsm9k]", "eval.benchmarks"),
        ("eval.sets.mine.benchmark=gsm9k", "eval.sets.mine.benchmark"),
    ],
)
def test_an_unknown_benchmark_is_refused_with_the_nearest_name(override: str, key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key} must be of gsm8k, .*nearest: gsm8k.*got 'gsm9k'"):
        load_config([override])


def test_a_benchmark_whose_replies_do_not_fit_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="eval.sets.aime24.max_tokens"):
        load_config(["eval.benchmarks=[aime24]", "generators.max_model_len=4096"])
