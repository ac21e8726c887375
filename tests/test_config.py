"""Bad input is refused at start-up, with field, rule and value."""

import dataclasses
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from refused_configs import ACCEPTED, NOT_COMPOSED, REFUSED, REFUSED_ALGORITHMS

from configs.algo import AlgoConfig
from configs.checks import find_config_problems, find_warnings
from configs.eval import EvalSetConfig
from configs.help import KeyHelp, format_help, format_page, list_sections
from configs.load import (
    FOLDER,
    check_config,
    list_defaults,
    load_config,
    load_resumed_config,
    load_study_config,
    parse_config,
    to_yaml,
)
from configs.reward import RewardConfig
from configs.schema import Config
from configs.surrogates import SURROGATE_NAMES
from slipstream.tracking.trackers import describe_run, list_texts

ROOT = Path(__file__).parents[1]
TASKS = sorted(
    path.stem for kind in ("tasks", "environments") for path in (ROOT / "generators" / kind).glob("[a-z]*.py")
)
PRESETS = sorted(path.stem for path in FOLDER.glob("algo/*.yaml"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("experiment/*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_composes(path: Path) -> None:
    load_config([f"+experiment={path.stem}"])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_accepted_bears_its_name_and_is_the_defaults_with_what_its_file_says(
    name: str,
) -> None:
    config = load_config([f"algo={name}"])
    assert config.algo.name == name and config.max_versions > 0 and find_warnings(config) == []
    said = OmegaConf.load(FOLDER / "algo" / f"{name}.yaml")
    assert config == OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), said))


def test_a_written_configuration_reads_back_the_same() -> None:
    config = load_config(["mode=on_policy", "task.args={digits: 2}", "run.name=x", "algo=vapo"])
    assert parse_config(to_yaml(config)) == config
    assert "learner.groups_per_step" in list_defaults()


@pytest.mark.parametrize("overrides", NOT_COMPOSED)
def test_what_cannot_be_composed_is_refused_with_the_key_and_what_is_near(overrides: str) -> None:
    with pytest.raises(ValueError, match=NOT_COMPOSED[overrides]):
        load_config(overrides.split())


@pytest.fixture(scope="module")
def defaults() -> DictConfig:
    """The preset grpo: the default preset, dppo, takes no correction."""
    return OmegaConf.structured(load_config(["algo=grpo"]))


def override_defaults(defaults: DictConfig, overrides: str) -> Config:
    return check_config(OmegaConf.merge(defaults, OmegaConf.from_dotlist(overrides.split())))


@pytest.mark.parametrize("overrides", REFUSED | REFUSED_ALGORITHMS)
def test_refused_with_field_rule_and_value(defaults: DictConfig, overrides: str) -> None:
    with pytest.raises(ValueError, match=(REFUSED | REFUSED_ALGORITHMS)[overrides]) as error:
        override_defaults(defaults, overrides)
    named = [override.partition("=")[0].rpartition(".")[2] for override in overrides.split()]
    for line in str(error.value).splitlines():
        assert " must " in line and any(name in line for name in named), line


def test_a_loss_without_a_correction_is_refused_with_what_works(defaults: DictConfig) -> None:
    with pytest.raises(ValueError) as error:
        override_defaults(defaults, "algo.correction=none")
    assert "when staleness.max_versions > 0" in str(error.value)
    for works in ("algo.correction=token_tis with algo.proximal=recompute", "algo.accept_uncorrected=true"):
        assert works in str(error.value)
    assert "algo.surrogate=cispo with algo.proximal=behavior" in str(error.value)
    assert str(error.value).endswith("staleness.max_versions=2")


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_accepted(defaults: DictConfig, overrides: str) -> None:
    assert find_config_problems(override_defaults(defaults, overrides)) == []


def test_a_loss_tolerates_what_it_was_shown_to_and_nothing_without_a_correction(defaults: DictConfig) -> None:
    assert override_defaults(defaults, "algo.ppo.clip_low=0.2").algo.max_shown_staleness == 8
    assert (
        override_defaults(defaults, "algo.surrogate=m2po algo.correction=none").algo.max_shown_staleness
        == 256
    )
    assert (
        override_defaults(
            defaults, "algo.correction=none algo.accept_uncorrected=true"
        ).algo.max_shown_staleness
        == 0
    )


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ("staleness.max_versions=8", None),
        ("staleness.max_versions=9", "staleness.max_versions=9 is beyond 8, .*algo=m2po is made for more"),
        ("staleness.max_versions=9 mode=on_policy", None),
        ("staleness.max_versions=9 staleness.controller=ess", None),
        ("staleness.max_versions=9 algo.surrogate=m2po algo.correction=none", None),
        (
            "algo.correction=none algo.accept_uncorrected=true",
            "algo.accept_uncorrected=true: tokens up to 2 versions old",
        ),
    ],
)
def test_staleness_beyond_what_was_shown_is_warned_of(
    defaults: DictConfig, overrides: str, warning: str | None
) -> None:
    found = find_warnings(override_defaults(defaults, overrides))
    assert len(found) == (warning is not None) and all(re.match(warning or "", line) for line in found)


def test_every_parameter_of_a_section_that_plays_no_part_is_refused(defaults: DictConfig) -> None:
    """Under algo=grpo: sections of other surrogates, and of models that it does not use."""
    algo, idle = AlgoConfig(), {*SURROGATE_NAMES, "critic", "gae", "vtrace", "prime"} - {"ppo"}
    unused = [
        f"algo.{name}.{parameter.name}"
        for name in sorted(idle)
        for parameter in dataclasses.fields(getattr(algo, name))
        if isinstance(parameter.default, float)
    ]
    assert len(unused) > 20
    for name in unused:
        with pytest.raises(
            ValueError, match=f"{name} must not be set without algo.*got 0.125 with algo.advantage=grpo"
        ):
            override_defaults(defaults, f"{name}=0.125")


def test_on_policy_is_s_zero_and_needs_no_correction() -> None:
    assert load_config(["mode=on_policy", "algo.correction=none"]).max_versions == 0


def test_a_staleness_bound_that_the_synchronous_baseline_would_not_heed_is_refused(tmp_path: Path) -> None:
    refusal = "staleness.max_versions must be 0 with mode=on_policy .*got 3"
    with pytest.raises(ValueError, match=refusal):
        load_config(["mode=on_policy", "staleness.max_versions=3"])
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(["mode=on_policy"])))
    with pytest.raises(ValueError, match=refusal):
        load_resumed_config(tmp_path, ["staleness.max_versions=3"])
    assert load_resumed_config(tmp_path, []).max_versions == 0
    assert load_config(["mode=on_policy", "staleness.max_versions=0"]).max_versions == 0


def test_all_problems_come_in_one_message() -> None:
    with pytest.raises(ValueError) as error:
        load_config(["learner.lr=nan", "sampling.top_p=0.9", "run.steps=0"])
    assert len(str(error.value).splitlines()) == 3


def test_a_run_from_before_episodes_goes_on_with_its_deadline_of_scores(tmp_path: Path) -> None:
    saved = OmegaConf.create(to_yaml(load_config([])))
    saved.generators.score_threads, saved.generators.score_timeout_s = 2, 7.0
    del saved["episodes"]
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(saved))
    assert load_resumed_config(tmp_path, []).episodes.score_timeout_s == 7.0


def test_a_resumed_run_keeps_what_its_journal_depends_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(["run.seed=3"])))
    assert load_resumed_config(tmp_path, ["run.steps=500"]).run.steps == 500
    with pytest.raises(ValueError, match="learner.groups_per_step must stay 64 in a resumed run .* got 32"):
        load_resumed_config(tmp_path, ["learner.groups_per_step=32"])
    with pytest.raises(ValueError, match="must be the folder of a run"):
        load_resumed_config(tmp_path / "absent", [])


def test_rows_of_a_set_are_the_same_however_a_resumed_run_spells_their_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    config = load_config([f"eval.sets.{name}.data={tmp_path}/{name}.jsonl" for name in "ab"])
    sets = {**config.eval.sets, "b": dataclasses.replace(config.eval.sets["b"], data=[{"path": ["b.jsonl"]}])}
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, sets=sets))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    load_resumed_config(
        tmp_path, ["eval.sets.a.data=../a.jsonl", "eval.sets.b.data=[{path: [../below/b.jsonl]}]"]
    )
    for rows in ("a.jsonl", "hf:a.jsonl", "[../b.jsonl]", "null"):
        with pytest.raises(ValueError, match=r"eval\.sets\.a\.data must stay /.*/a.jsonl .* got "):
            load_resumed_config(tmp_path, [f"eval.sets.a.data={rows}"])
    monkeypatch.chdir(tmp_path)
    load_resumed_config(tmp_path, ["eval.sets.a.data=a.jsonl"])


def test_a_resumed_run_takes_what_suits_it_and_not_the_default_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from slipstream import train

    (tmp_path / "config.yaml").write_text(
        to_yaml(load_config(["algo=grpo", "generators.max_model_len=2048"]))
    )
    overrides = [f"run.resume={tmp_path}", "algo.ppo.clip_high=0.28", "sampling.max_tokens=512"]
    assert train.main(["--cfg", *overrides]) == 0
    assert "clip_high: 0.28" in capsys.readouterr().out
    with pytest.raises(ValueError, match="run.stpes must be a configuration key .nearest: run.steps"):
        load_resumed_config(tmp_path, ["run.stpes=3"])
    with pytest.raises(ValueError, match="^learner.lr must be a number, got 'abc'"):
        load_resumed_config(tmp_path, ["learner.lr=abc"])


def test_overrides_of_a_run_that_goes_on_are_read_as_those_of_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(load_config([])))
    said = ["tracking.args={path:b,on:yes}", "tracking.args.at=12:30:00", "data.system_prompt=Say: yes"]
    new, resumed = load_config(said), load_resumed_config(tmp_path, said)
    assert new.tracking.args == {"path": "b", "on": "yes", "at": "12:30:00"}
    assert (resumed.tracking.args, resumed.data.system_prompt) == (new.tracking.args, "Say: yes")
    with pytest.raises(ValueError, match=r"a list stands in brackets: \[tensorboard,wandb\]"):
        load_resumed_config(tmp_path, ["tracking.trackers=tensorboard,wandb"])


@pytest.mark.parametrize(
    "text", ["costs ${x}", "${", r"as $${\boxed{x}}$$", r"\${x}", r"\\${", r"end\\", "${oc.env:HOME}"]
)
def test_a_text_with_a_dollar_and_a_brace_reads_back_as_it_was(text: str) -> None:
    config = load_config([])
    written = dataclasses.replace(config, data=dataclasses.replace(config.data, system_prompt=text))
    assert parse_config(to_yaml(written)) == written
    run = describe_run(written, Path("outputs/a"), 0)
    assert OmegaConf.create(textwrap.dedent(list_texts(run)["config"])).data.system_prompt == text
    with pytest.raises(ValueError, match="^data.system_prompt must have a backslash before"):
        load_config(["data.system_prompt='costs ${x}'"])


def test_a_recipe_of_ones_own_is_a_file_and_may_build_on_another(tmp_path: Path) -> None:
    path = tmp_path / "my own.yaml"
    path.write_text(
        "defaults: [{/experiment: gsm8k_ppo_0p5b}, _self_]\n"
        "learner: {lr: 3.0e-6}\neval: {sets: {gsm8k: {samples: 3}}}\ngenerators: {max_model_len: 2048}\n"
    )
    config = load_config([f"+experiment={path}", "run.steps=9"])
    assert (config.algo.name, config.learner.lr, config.run.steps) == ("ppo", 3e-6, 9)
    assert (config.eval.sets["gsm8k"].samples, config.eval.sets["gsm8k"].form) == (3, "gsm8k")
    path.write_text("learner: {lr: 4.0e-6}\n")
    assert load_config([f"+experiment={path}"]).learner.lr == 4e-6


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("learner: {lrr: 1}", r"my.yaml: learner.lrr must be a configuration key \(nearest: learner.lr,"),
        ("learner: {lr: abc}", "my.yaml: learner.lr must be a number, got 'abc'"),
        ("task: dataset", "my.yaml: task must be followed by a key of this section, got 'dataset'"),
        ("eval: {sets: {a: {smaples: 4}}}", "eval.sets.a.smaples must be a key of an evaluation set"),
        ("eval: {sets: {a: {benchmark: gsm9k}}}", "eval.sets.a.benchmark must be of gsm8k"),
        ("- 1", "experiment must name a file with sections and keys"),
        ("learner: [1", "experiment must name a file with a recipe"),
    ],
)
def test_a_wrong_recipe_of_ones_own_is_refused_by_file_and_key(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ValueError, match=problem):
        load_config([f"+experiment={tmp_path}/my.yaml"])
    with pytest.raises(ValueError, match="experiment must name a file with a recipe, got .*absent.yaml"):
        load_config([f"+experiment={tmp_path}/absent.yaml"])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("run.resume=", "run.resume must be the folder of a run, got "),
        ("run.resume='/no/such run'", "run.resume must be the folder of a run, got /no/such run"),
        ("++run.resume=/no/such", "run.resume must be said as run.resume=FOLDER"),
        ("run={resume:/no/such}", "run.resume must be said as run.resume=FOLDER"),
    ],
)
def test_no_spelling_of_a_folder_begins_a_run_of_the_defaults_in_it(
    said: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from slipstream import train

    assert train.main([said]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "then", "lr", "minibatches"),
    [
        ("algo=grpo", "algo=dppo", 6e-4, 1),
        ("algo=dppo", "algo=grpo", 2e-4, 4),
        ("algo=grpo learner.lr=1e-6 learner.minibatches=8", "algo=dppo", 1e-6, 8),
        ("algo=grpo", "algo=dppo learner.lr=1e-5", 1e-5, 1),
        ("algo=grpo algo.name=mine", "algo=dppo", 6e-4, 4),
    ],
)
def test_a_study_has_the_presets_rate_and_minibatches_unless_the_run_had_its_own(
    tmp_path: Path, before: str, then: str, lr: float, minibatches: int
) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(before.split())))
    studied = load_study_config(tmp_path, then.split())
    assert (studied.algo.surrogate, studied.learner.lr, studied.learner.minibatches) == (
        "dppo" if "dppo" in then else "ppo", lr, minibatches,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["model.path=/models/Qwen3"], r"learner.lr=0.0006 is a rate for the tiny model"),
        (["model.path=/models/Qwen3", "learner.lr=1e-6"], None),
        (["model.path=/models/Qwen3", "learner.lora.rank=8"], None),
        (["model.path=/home/me/.cache/tiny-12ab"], None),
        (["model.path=simulated", "learner.engine=simulated", "generators.engine=simulated"], None),
        (
            ["algo=grpo", "learner.minibatches=1"],
            r"learner.minibatches=1: the clip of algo.surrogate=ppo never acts",
        ),
    ],
)
def test_a_rate_for_the_tiny_model_and_a_clip_that_never_acts_are_told_of(
    overrides: list[str], warning: str | None
) -> None:
    found = find_warnings(load_config(overrides))
    assert len(found) == (warning is not None) and all(re.match(warning or "", line) for line in found)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.stpes=3"], "run.stpes must be a configuration key (nearest: run.steps"),
        (["generators.pipeline_parallel=2"], "generators.pipeline_parallel must be left out (with several"),
        (["generators.expert_parallel=2"], "generators.expert_parallel must be left out (vLLM's kernel"),
        (
            ["model.path=/no/such/model"],
            "model.path must be a Hugging Face model folder or `tiny`, got /no/such/model",
        ),
        (
            ["task.name=nope"],
            f"task.name must be one of {TASKS}, or read module:Class, got 'nope'",
        ),
        (["task.args.numbers=0"], "task.args must suit sorting, got {'numbers': 0}"),
    ],
)
def test_the_command_says_what_is_wrong_and_leaves_nothing_behind(
    tmp_path: Path, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from slipstream import train

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = train.main([f"run.outputs={tmp_path}", *overrides])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err
    assert code == 2 and message in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_the_command_ends_with_status_two_when_it_is_told_what_cannot_be(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "slipstream.train", f"run.outputs={tmp_path}", "run.stpes=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "nearest: run.steps" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def list_keys() -> list[KeyHelp]:
    return [key for section in list_sections() for key in section.keys]


def list_all_names() -> set[str]:
    """Returns every key, and those of an evaluation set: a user's sets have names of their own."""
    return set(list_defaults()) | {f"eval.sets.NAME.{name}" for name in list_evaluation_set_keys()}


def list_evaluation_set_keys() -> list[str]:
    reward = [f"reward.{field.name}" for field in dataclasses.fields(RewardConfig)]
    return [field.name for field in dataclasses.fields(EvalSetConfig) if field.name != "reward"] + reward


def test_every_key_section_and_choice_says_what_it_is() -> None:
    assert {key.name for key in list_keys()} == list_all_names()
    assert not [section.name for section in list_sections() if not section.text.endswith(".")]
    assert not [key.name for key in list_keys() if not key.text.endswith(".")]
    choices = [
        (key.name, name, text)
        for key in list_keys()
        for name, text in key.choices.items()
        if key.name != "mode"
    ]
    assert len(choices) > 50 and not [choice for choice in choices if not choice[2].endswith(".")]


def test_the_page_of_the_configuration_is_current() -> None:
    """After a change of a key: `python -m configs.help --markdown > docs/configuration.md`."""
    assert (ROOT / "docs" / "configuration.md").read_text() == format_page()


def test_a_default_keeps_its_rule_and_the_rule_stands_in_the_help() -> None:
    assert find_config_problems(Config()) == []
    assert "learner.lr=0.0002\n  Peak learning rate" in format_help(["learner.lr"])
    assert "Must be a finite number above 0." in format_help(["learner.lr=3"])
    assert "- mask: The step trains other complete groups." in format_help(["staleness.on_late"])
    assert "Sections below it: learner.fsdp, learner.megatron" in format_help(["learner"])
    assert "algo=NAME chooses a preset: aipo, cispo" in format_help(["algo"])


def test_the_overview_names_every_key_below_its_section() -> None:
    lines = format_help([]).splitlines()
    assert max(map(len, lines)) <= 110
    named = {line.split("=")[0].strip() for line in lines if re.match(r"  [a-z]", line)}
    assert named == list_all_names()
    assert lines.index("learner.fsdp: The engine `learner.engine=fsdp`.") > 0


def test_help_for_what_is_no_key_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    from slipstream import train

    assert train.main(["--help", "staleness.max_version"]) == 2
    assert (
        "must be followed by a key or a section (nearest: staleness.max_versions" in capsys.readouterr().err
    )
    assert train.main(["--help", "staleness"]) == 0
    assert "staleness.on_late=wait" in capsys.readouterr().out


def test_a_reader_that_leaves_early_brings_no_traceback_and_no_signal() -> None:
    """The disposition of SIGPIPE stays: with the default one, a socket whose peer has gone ends a process."""
    code = (
        "import os, signal, sys; from slipstream import train; before = signal.getsignal(signal.SIGPIPE); "
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); "
        "status = train.main(['--help']); sys.exit(status or signal.getsignal(signal.SIGPIPE) != before)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_preset_repeats_a_default() -> None:
    defaults = list_defaults()
    for name in PRESETS:
        preset = OmegaConf.load(FOLDER / "algo" / f"{name}.yaml")
        assert isinstance(preset, DictConfig)
        repeated = [
            key for key, default in defaults.items() if OmegaConf.select(preset, key) == default is not None
        ]
        assert repeated in ([], ["algo.name"]), f"{name} repeats {repeated}"


@pytest.mark.parametrize(
    ("overrides", "address"),
    [
        ([], None),
        (["buffer.address=tcp://10.0.0.7:5555", "buffer.keys=keys"], "tcp://10.0.0.7:0"),
        (["buffer.address=tcp://10.0.0.7:5555", "buffer.keys=keys", "sync.transport=disk"], None),
        (
            ["buffer.address=tcp://10.0.0.7:5555", "buffer.keys=keys", "sync.address=tcp://n7:6000"],
            "tcp://n7:6000",
        ),
        (["sync.transport=tcp"], "tcp://127.0.0.1:0"),
        (["sync.transport=shared_memory"], None),
        (["buffer.address=ipc:///tmp/buffer"], None),
    ],
)
def test_weights_are_served_where_other_hosts_can_join(
    defaults: DictConfig, overrides: list[str], address: str | None
) -> None:
    assert override_defaults(defaults, " ".join(overrides)).weights_address == address


def test_a_buffer_that_listens_everywhere_needs_an_address_for_weights() -> None:
    with pytest.raises(ValueError, match="sync.address must be set when buffer.address names no host"):
        load_config(["buffer.address=tcp://0.0.0.0:5555", "buffer.keys=keys"])


def test_a_configuration_of_another_version_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(load_config([])) + "gone: 3\n")
    for read in (
        lambda: parse_config((tmp_path / "config.yaml").read_text()),
        lambda: load_resumed_config(tmp_path, []),
        lambda: load_study_config(tmp_path, []),
    ):
        with pytest.raises(
            ValueError,
            match="config.yaml must be .* got one with gone must be a configuration key",
        ):
            read()
