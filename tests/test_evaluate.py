"""An evaluation alone goes on where it was stopped, never mixes, and counts what failed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

import slipstream.evaluate as evaluate
import slipstream.evaluation_sets as evaluation_sets
from buffers.evaluated_samples import read_segment
from buffers.evaluation_statistics import bootstrap_interval
from configs.load import load_config, to_yaml
from generators.data.prepare import prepare_data
from generators.engine import Sample
from generators.episode import SimulatedEpisodes, SimulatedPrompt
from generators.simulated_engine import SimulatedEngine
from generators.task import Score
from generators.tasks import load_task
from slipstream.evaluate import Evaluation
from slipstream.evaluated_model import (
    Target,
    bring_model,
    digest_files,
    find_target,
    publish_model,
    read_tensors,
)
from slipstream.evaluated_sets import SoloSet, digest_code
from slipstream.evaluation_pair import compare_reports
from slipstream.evaluation_view import SetProgress, make_comparison, make_table
from slipstream.stop_signals import StopSignals
from sync.publisher import Publisher
from sync.snapshot import read_manifest
from sync.stream import whole_parts

SIMULATED = ["generators.engine=simulated", "learner.engine=simulated", "buffer.max_attempts=1"]


class AskedEngine(SimulatedEngine):
    """Counts the samples that it is asked for."""

    def __init__(self) -> None:
        super().__init__(tokens_per_s=4000, slots=64, mean_tokens=5, cv=0.5)
        self.load_version(SimpleNamespace(manifest=SimpleNamespace(version=0)))  # type: ignore[arg-type]
        self.num_asked = 0

    def add_sample(self, sample: Sample) -> None:
        self.num_asked += 1
        super().add_sample(sample)


class Judged(SimulatedEpisodes):
    """Rewards say whether the prompt's number is odd; prompts in `failing` cannot be scored."""

    failing: set[int] = set()

    async def score_tokens(self, prompt: SimulatedPrompt, tokens: list[int]) -> Score:
        if prompt.index in self.failing:
            raise ValueError("the judge is away")
        return Score(float(prompt.index % 2))


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "make_episodes", lambda config: Judged())
    monkeypatch.setattr(Judged, "failing", set())


def make_set(prompts: int = 20, samples: int = 2, *overrides: str) -> SoloSet:
    config = load_config([*SIMULATED, "generators.max_sequences=8", *overrides])
    return SoloSet(name="odd", config=config, num_prompts=prompts, samples=samples, k=[1, samples])


def play(
    out: Path,
    chosen: SoloSet,
    identity: str = "m1",
    should_stop: Callable[[Evaluation], bool] = lambda evaluation: False,
) -> tuple[dict[str, Any], int]:
    """Returns the report, and how many samples the engine was asked for."""
    target = Target(text="model", run=Path("run"), step=0)
    # The folder's lock is held until the process ends.
    evaluate.claim_folder = lambda *_: None
    evaluation, engine = Evaluation(target, "d" * 32, identity, [chosen], out), AskedEngine()
    with SetProgress(Console(quiet=True)) as progress:
        evaluation.play_sets(engine, progress, lambda: should_stop(evaluation))
    return evaluation.report(), engine.num_asked


def test_a_stopped_evaluation_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    whole, _ = play(tmp_path / "whole", make_set())
    stopped, _ = play(
        tmp_path / "parts", make_set(), should_stop=lambda one: len(one.outcomes[0].samples.prompts) >= 5
    )
    (first,) = stopped["results"]
    assert 5 <= first["prompts"] < 20 and first["missing"] == 20 - first["prompts"]
    assert not stopped["is_complete"]
    resumed, num_asked = play(tmp_path / "parts", make_set())
    assert num_asked == 2 * first["missing"]
    assert resumed["is_complete"] and resumed["results"] == whole["results"]
    assert json.loads((tmp_path / "parts" / "results.json").read_bytes()) == resumed
    assert play(tmp_path / "parts", make_set())[1] == 0


def test_figures_are_those_of_the_prompts(tmp_path: Path) -> None:
    (result,) = play(tmp_path, make_set(prompts=21, samples=4))[0]["results"]
    assert result["avg"] == pytest.approx(10 / 21) and result["pass"] == {"1": 10 / 21, "4": 10 / 21}
    rewards = [float(index % 2) for index in range(21)]
    assert tuple(result["avg_ci95"]) == bootstrap_interval(torch.tensor(rewards).numpy())
    assert result["samples"] == 84 and result["versions"] == [0, 0] and result["tokens"] > 0


def test_more_prompts_go_on_and_other_settings_begin_anew(tmp_path: Path) -> None:
    play(tmp_path, make_set(prompts=10))
    assert play(tmp_path, make_set(prompts=14))[1] == 2 * 4
    assert play(tmp_path, make_set(prompts=6))[0]["results"][0]["prompts"] == 6
    truncated = make_set(10, 2, "sampling.top_p=0.9", "sampling.accept_truncation_bias=true")
    greedy = dataclasses.replace(make_set(10), temperature=0.0)
    for others in (make_set(10, 4), truncated, make_set(10, 2, "run.seed=7"), greedy):
        assert play(tmp_path, others)[1] == 10 * others.samples
    # How many play side by side changes no sample.
    assert play(tmp_path, make_set(10, 2, "generators.max_sequences=16"))[1] == 0


def test_a_folder_never_holds_two_models(tmp_path: Path) -> None:
    play(tmp_path / "out", make_set(prompts=4))
    with pytest.raises(ValueError, match=r"--out must be new, or hold the evaluation of this model \(m2\)"):
        play(tmp_path / "out", make_set(prompts=4), identity="m2")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="--out must be a new folder"):
        play(tmp_path / "other", make_set(prompts=4))


def test_failed_prompts_are_counted_named_never_scored_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Judged, "failing", {3, 5})
    report, _ = play(tmp_path, make_set(prompts=10))
    (result,) = report["results"]
    assert (result["prompts"], result["failed"], result["avg"]) == (8, 2, 3 / 8)
    assert sorted(result["errors"]) == ["3", "5"] and "the judge is away" in result["errors"]["3"]
    assert not report["is_complete"] and result["missing"] == 0
    shown = Console(width=100)
    with shown.capture() as text:
        shown.print(make_table(report))
    assert "2 prompts failed" in text.get() and "prompt 3: ValueError: the judge is away" in text.get()
    assert "8 of 10 × 2" in text.get() and "pass@2" in text.get()  # of the same value as the average
    monkeypatch.setattr(Judged, "failing", set())
    report, num_asked = play(tmp_path, make_set(prompts=10))
    assert num_asked == 4 and report["results"][0]["failed"] == 0 and report["is_complete"]


def test_every_sample_is_in_arrow_with_its_conversation(tmp_path: Path) -> None:
    report, _ = play(tmp_path, make_set(prompts=5))
    folder = tmp_path / report["results"][0]["samples_folder"]
    rows = [row for path in folder.glob("*.arrow") for row in pa.ipc.open_file(path).read_all().to_pylist()]
    assert sorted((row["prompt_id"], row["sample"]) for row in rows) == [
        (p, s) for p in range(5) for s in (0, 1)
    ]
    assert all("messages" in json.loads(row["extra"]) and row["generator"] == "evaluate" for row in rows)


def test_two_models_are_compared_prompt_by_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = play(tmp_path / "a", make_set(prompts=40))
    monkeypatch.setattr(Judged, "failing", {0, 2})  # the second answers other prompts less
    second, _ = play(tmp_path / "b", make_set(prompts=40), identity="m2")
    compared = compare_reports(first, second)
    (one,) = compared["differences"]
    assert (one["prompts"], one["difference"], tuple(one["ci95"])) == (38, 0.0, (0.0, 0.0))
    # Twenty prompts are wanted now: those that were asked before count no more, and A and B are of these.
    fewer, _ = play(tmp_path / "a", make_set(prompts=21))
    (one,) = compare_reports(fewer, second)["differences"]
    assert (one["prompts"], one["a"], one["b"]) == (19, 10 / 19, 10 / 19)
    other, _ = play(tmp_path / "c", make_set(40, 2, "run.seed=9"))
    assert compare_reports(first, other)["left_out"].keys() == {"odd"}
    Console(quiet=True).print(make_comparison(compared))


def test_tensors_of_a_folder_have_the_digest_of_their_publication(tmp_path: Path) -> None:
    tensors = {
        "model.b": torch.randn(300, 7), "model.a": torch.randn(5).bfloat16(), "ids": torch.arange(4),
        "lm_head.weight": torch.randn(3, 3),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    names = [part.name for part in read_tensors(tmp_path, torch.float32)]
    assert sorted(names) == ["ids", "model.a", "model.b"]
    expected = {name: tensors[name].float() if name != "ids" else tensors[name] for name in names}
    publishers = [Publisher(tmp_path / name, "life") for name in ("one", "two")]
    found = read_manifest(publish_model(tmp_path, publishers[0], "float32", -1))
    assert found.digest == publishers[1].publish_version(7, whole_parts(expected)).digest
    for publisher in publishers:
        publisher.close()


def test_what_is_neither_run_nor_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    with pytest.raises(ValueError, match="MODEL-OR-RUN must be a run's folder"):
        find_target(str(tmp_path), None)
    with pytest.raises(ValueError, match=r"`hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`"):
        find_target("Qwen/Qwen3-0.6B", None)
    with pytest.raises(ValueError, match="`hf download OWNER/Qwen3-4B --local-dir models/Qwen3-4B`"):
        find_target("models/Qwen3-4B", None)
    with pytest.raises(ValueError, match="got 'outputs/typo'$"):
        find_target("outputs/typo", None)
    (tmp_path / "config.json").write_text("{}")
    assert find_target(str(tmp_path), None).run is None
    with pytest.raises(ValueError, match="--step must be left out for a model"):
        find_target(str(tmp_path), 3)
    with pytest.raises(ValueError, match="must have its weights in .safetensors files"):
        list(read_tensors(tmp_path, torch.float32))
    with pytest.raises(ValueError, match=r"a model folder must have a tokenizer \(tokenizer.json\)"):
        bring_model(Target(text=str(tmp_path)), load_config([f"model.path={tmp_path}"]), tmp_path)
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(ValueError, match="the run must hold a checkpoint"):
        find_target(str(tmp_path), None)


def test_a_changed_reward_function_is_another_setting(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def score(row, reply): return 1.0")
    before = digest_code(f"{file}:score")
    file.write_text("def score(row, reply): return 0.0")
    assert before != digest_code(f"{file}:score") and digest_code("math") == ""


ListSets = Callable[..., list[SoloSet]]


@pytest.fixture
def list_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ListSets:
    """Prepares the sets that a command with these overrides plays, with a cache of rows of the test's own."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    # No prompt is too long: a tokenizer takes seconds.
    monkeypatch.setattr(evaluation_sets, "make_limit", lambda config: None)

    def prepare(*overrides: str, run: Path | None = None) -> list[SoloSet]:
        target = Target(text="model", run=run, step=None if run is None else 0)
        overrides = overrides if run else (*overrides, "generators.max_model_len=64")
        config = evaluate.load_settings(target, run, overrides)
        config = evaluate.choose_sets(config, overrides, run is not None)
        return evaluate.prepare_sets(config, StopSignals())

    return prepare


def write_rows(path: Path, prompt: str = "1 3", answer: str = "7", number: int = 16) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for _ in range(number)))
    return path


def read_prompt(chosen: SoloSet) -> str:
    task = load_task(chosen.config.task.name, chosen.config.task_arguments)
    return str(task.make_prompt("eval", 0, 0).text)


@pytest.mark.parametrize(
    ("key", "common"),
    [
        ("eval.sets.mine.data", ["eval.sets.mine.reward.function=exact_match", "eval.sets.mine.prompts=5"]),
        ("data.eval", ["task=dataset", "reward.function=exact_match", "eval.prompts=5"]),
    ],
)
def test_other_rows_are_other_settings(
    tmp_path: Path, list_sets: ListSets, key: str, common: list[str]
) -> None:
    def digest(value: str) -> str:
        (chosen,) = list_sets(f"{key}={value}", f"data.train={trained}", *common)
        return chosen.digest_settings("model")

    rows, moved, trained = (write_rows(tmp_path / name / "rows.jsonl") for name in ("a", "b", "c"))
    same = [digest(str(rows)), digest(str(moved)), digest(f"[{{name: rows, path: {rows}, weight: 2}}]")]
    write_rows(rows, answer="8")
    others = [digest(str(rows))]
    for settings in ("system_prompt: be kind", "chat_template_kwargs: {a: 1}", "answer: prompt"):
        others.append(digest(f"[{{name: rows, path: {moved}, {settings}}}]"))
    others += [digest(f"[{{task: sorting, args: {{numbers: {number}}}}}]") for number in (2, 3)]
    assert len(set(same)) == 1 and len({same[0], *others}) == 7


def test_rows_that_a_command_names_take_the_place_of_the_runs(tmp_path: Path, list_sets: ListSets) -> None:
    old, new = write_rows(tmp_path / "old.jsonl"), write_rows(tmp_path / "new.jsonl", "5 4", number=20)
    run = tmp_path / "run"
    run.mkdir()
    words = [f"data.train={old}", f"data.eval={old}", "reward.function=exact_match", "task.name=dataset"]
    words += [f"eval.sets.{name}.data={old}" for name in ("one", "two")]
    words += [f"eval.sets.{name}.reward.function=exact_match" for name in ("one", "two")]
    config = load_config(words)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, prepared=prepare_data(dataclasses.asdict(config.data))),
        eval=evaluation_sets.prepare_eval_sets(config, lambda: None),
    )
    (run / "config.yaml").write_text(to_yaml(config))
    own = list_sets(run=run)
    assert [(one.name, one.num_prompts) for one in own] == [("held_out", 16), ("one", 16), ("two", 16)]
    # The run's rows are in the cache, whatever became of their file.
    old.unlink()
    assert [one.digest_settings("m") for one in list_sets(run=run)] == [
        one.digest_settings("m") for one in own
    ]
    for word, name in (
        (f"eval.sets.one.data={new}", "one"),
        (f"eval.sets={{two: {{data: {new}}}}}", "two"),
        (f"eval.sets.one={{data:{new}}}", "one"),
        (f"++eval.sets.one.data={new}", "one"),
        (f"eval.sets.one.data=[{new}]", "one"),
        (f"data.eval={new}", "held_out"),
        (f"++data.eval={new}", "held_out"),
    ):
        chosen, *others = list_sets(word, run=run)
        assert (chosen.name, len(others)) == (name, 2 if name == "held_out" else 0)
        assert read_prompt(chosen) == "5 4"
        assert chosen.num_prompts == 20
    assert read_prompt(list_sets("eval.sets.one.samples=4", run=run)[0]) == "1 3"
    words = [f"eval.sets.one.data={tmp_path}/n*.jsonl", r"eval.sets.one.system_prompt='Don\'t guess'"]
    both = list_sets("++eval.prompts=5", *words, run=run)
    assert [(one.name, one.num_prompts) for one in both] == [("held_out", 5), ("one", 20)]


def test_what_a_section_says_is_said(
    tmp_path: Path, list_sets: ListSets, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    words = ["task=dataset", "reward.function=exact_match", f"data={{train:{rows},eval:{rows}}}"]
    one = ["eval.sets.one.task=sorting", "eval.sets.one.prompts=2"]
    assert [chosen.name for chosen in list_sets(*words, *one)] == ["held_out", "one"]
    assert [chosen.num_prompts for chosen in list_sets(*words, *one, "eval={prompts:3}")] == [3, 2]
    monkeypatch.setattr(evaluate, "read_longest_context", lambda folder: 99)
    for word in ("++generators.max_model_len=80", "generators={max_model_len:80}"):
        config = evaluate.load_settings(Target(text="model"), None, [word, "sampling.max_tokens=9"])
        assert config.generators.max_model_len == 80


def test_a_reward_that_rates_no_reply_is_refused_before_the_engine_starts(
    tmp_path: Path, list_sets: ListSets
) -> None:
    (tmp_path / "reward.py").write_text("def give_text(row, reply): return 'good'")
    words = [f"eval.sets.mine.data={write_rows(tmp_path / 'rows.jsonl')}", "eval.sets.mine.samples=3"]
    sets = list_sets(*words, f"eval.sets.mine.reward.function={tmp_path}/reward.py:give_text")
    evaluation = Evaluation(Target(text="model"), "d" * 32, "m1", sets, tmp_path / "out")
    with pytest.raises(ValueError, match=r"^mine cannot be played: reward\.function .* got 'good'"):
        evaluation.try_rewards(lambda: None)


def test_nothing_but_the_result_is_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    with evaluate.reserve_stdout() as result:
        os.write(1, b"a reward talks\n")
        subprocess.run(["echo", "so does its process"], check=True)
        result.write("{}\n")
    os.write(1, b"afterwards\n")
    told, others = capfd.readouterr()
    assert told == "{}\nafterwards\n" and "a reward talks\nso does its process\n" in others


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"])
def test_a_changed_file_beside_the_weights_is_another_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "README.md").write_text("x")
    before = digest_files(tmp_path)
    (tmp_path / "README.md").write_text("y")
    (tmp_path / "model.safetensors").write_text("its digest is that of its tensors")
    assert digest_files(tmp_path) == before
    (tmp_path / name).write_text("a b")
    assert digest_files(tmp_path) != before


def test_words_and_flags_stand_in_any_order() -> None:
    options = evaluate.parse_arguments(["out/a", "--json", "eval.prompts=3", "--step", "4", "run.seed=1"])
    assert (options.models, options.overrides) == (["out/a"], ["eval.prompts=3", "run.seed=1"])
    assert options.json and options.step == 4


@pytest.mark.whole_run
def test_a_command_that_is_killed_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    rows, gate, reward = tmp_path / "rows.jsonl", tmp_path / "gate", tmp_path / "reward.py"
    rows.write_text("".join(f'{{"prompt": "{i} 3", "number": {i}}}\n' for i in range(48)))
    # The second half has no end before the first command is killed.
    reward.write_text(
        "import os, time\ndef score(row, reply):\n"
        f"    while row['number'] >= 24 and not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        "    return 1.0\n"
    )

    def begin() -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", "-m", "slipstream.evaluate", "tiny", "--json"]
        overrides = [f"eval.sets.mine.data={rows}", f"eval.sets.mine.reward.function={reward}:score"]
        overrides += ["generators.max_sequences=8", f"run.outputs={tmp_path}"]
        return subprocess.Popen([*command, *overrides], stdout=subprocess.PIPE, text=True)

    def find_samples() -> Path | None:
        return next(tmp_path.glob("evaluations/tiny-*/mine-*/000000.arrow"), None)

    killed = begin()
    while (found := find_samples()) is None or found.stat().st_size < 20_000:
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    gate.touch()
    resumed = begin()
    report = json.loads(resumed.communicate()[0])
    assert resumed.returncode == 0 and report["is_complete"]
    (result,) = report["results"]
    assert (result["prompts"], result["samples"], result["failed"]) == (48, 48, 0)
    first, second = (read_segment(found.with_name(f"00000{number}.arrow")) for number in (0, 1))
    assert first and second and not first.keys() & second.keys() and len(first) + len(second) == 48
    assert not list(Path("/dev/shm").glob(f"slipstream-evaluate-{killed.pid}"))
