"""Bad input is refused at start-up, with field, rule and value."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import FOLDER, fields, load, parse, resume, to_yaml

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("experiment/*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_composes(path: Path) -> None:
    load([f"+experiment={path.stem}"])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("algo/*.yaml")), ids=lambda p: p.stem)
def test_every_preset_composes_and_bears_its_name(path: Path) -> None:
    assert load([f"algo={path.stem}"]).algo.name == path.stem


def test_a_written_configuration_reads_back_the_same() -> None:
    config = load(["mode=on_policy", "task.args={digits: 2}", "run.name=x"])
    assert parse(to_yaml(config)) == config
    assert "learner.groups_per_step" in fields()


REFUSED = {
    "buffer.max_uses=3": "buffer.max_uses must divide learner.groups_per_step, got 3 and 64",
    "buffer.max_uses=0": "buffer.max_uses must be a finite number above 0, got 0",
    "buffer.max_bytes=-1": "buffer.max_bytes must be a finite number above 0, got -1",
    "mode=on_policy buffer.sampler=freshest": "buffer.sampler fifo when staleness.max_versions = 0 .* got 1 and freshest",
    "task.size=0": "task.size must be a finite number above 0, got 0",
    "generators.cuont=3": r"generators.cuont must be a configuration key \(nearest: generators.count.*'generators.cuont=3'",
    "+foo.bar=1": r"foo.bar must be a configuration key, got '\+foo.bar=1'",
    "mode=sync": r"mode: Invalid value 'sync', expected one of \[async, on_policy\]",
    "run.steps=1.5": r"run.steps: Value '1.5' of type 'float' could not be converted to Integer",
    "run.steps=0": "run.steps must be a finite number above 0, got 0",
    "learner.lr=nan": "learner.lr must be a finite number above 0, got nan",
    "algo=nope": "algo=nope: .*Available options in 'algo'",
    "learner.minibatches=5": "learner.minibatches must divide learner.groups_per_step, got 5 and 64",
    "sampling.max_tokens=64": "sampling.max_tokens must be below generators.max_model_len .* got 64 and 64",
    "sampling.top_p=0.9": "unless sampling.accept_truncation_bias=true, got 0.9, -1 and 0.0",
    "sampling.temperature=0": "sampling.temperature must be a finite number above 0, got 0.0",
    "algo.correction=none": "algo.correction must not be none when staleness.max_versions > 0 .*max_versions=2",
    "algo.proximal=behavior": "algo.proximal must be recompute when staleness.max_versions > 0",
    "learner.ranks=3": "learner.ranks × learner.minibatches must divide .* got 3 × 1 and 64 × 8",
    "staleness.max_versions=-1": "staleness.max_versions must be >= 0, got -1",
    "staleness.on_late=cancel": "straggler_timeout_s must be set exactly when staleness.on_late=cancel",
    "staleness.on_late=mask sync.in_flight=false": "sync.in_flight must be true when staleness.on_late=mask",
    "learner.samples_per_prompt=1": "learner.samples_per_prompt must be at least 2 for algo.advantage=grpo",
    "generators.max_sequences=4": "generators.max_sequences must be at least learner.samples_per_prompt .* got 4 and 8",
    "generators.engine=simulated": "must both be simulated or neither, got simulated and fsdp",
    "buffer.address=tcp://0.0.0.0:5555": "buffer.keys must name a folder of keys .*0.0.0.0:5555",
    "buffer.address=nowhere": "buffer.address must read tcp://HOST:PORT or ipc://PATH, got 'nowhere'",
    "role=generators": "role=generators must name the buffer to join",
    "sync.folder=/tmp/w": "sync.folder must be set only when sync.transport=disk",
    "algo.surrogate=gspo": "algo.clip_low and clip_high must be at most 0.1 for algo.surrogate=gspo",
    "algo.clip_low=3e-4 algo.clip_high=4e-4": "must be at least 0.01 for algo.surrogate=ppo.*algo.surrogate=gspo takes",
    "algo.surrogate=topr": "algo.correction must be none for algo.surrogate=topr",
    "algo.overlong_share=1.5": r"algo.overlong_share must be in \(0, 1\], got 1.5",
    "algo=reinforce_pp learner.samples_per_prompt=1 algo.dynamic_sampling=true": "when algo.dynamic_sampling=true .*got 1",
    "algo.temperatures=[1,0]": "algo.temperatures must be two finite numbers above 0",
    "sync.bucket_mb=0": "sync.bucket_mb must be a finite number above 0, got 0",
    "sync.address=tcp://0.0.0.0:5556": "sync.address must name a host",
    "run.name=a/b": "run.name must be a plain folder name, got 'a/b'",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_refused_with_field_rule_and_value(overrides: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[overrides]):
        load(overrides.split())


@pytest.mark.parametrize("name", sorted(path.stem for path in (FOLDER / "algo").glob("*.yaml")))
def test_each_preset_is_accepted_as_it_is(name: str) -> None:
    assert load([f"algo={name}"]).algo.name == name


def test_on_policy_is_s_zero_and_needs_no_correction() -> None:
    assert load(["mode=on_policy", "algo.correction=none"]).bound == 0


def test_all_problems_come_in_one_message() -> None:
    with pytest.raises(ValueError) as error:
        load(["learner.lr=nan", "sampling.top_p=0.9", "run.steps=0"])
    assert len(str(error.value).splitlines()) == 3


def test_a_resumed_run_keeps_what_its_journal_depends_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(load(["run.seed=3"])))
    assert resume(tmp_path, ["run.steps=500"]).run.steps == 500
    with pytest.raises(ValueError, match="learner.groups_per_step must stay 64 in a resumed run .* got 32"):
        resume(tmp_path, ["learner.groups_per_step=32"])
    with pytest.raises(ValueError, match="must be the folder of a run"):
        resume(tmp_path / "absent", [])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.stpes=3"], "run.stpes must be a configuration key (nearest: run.steps"),
        (["model.path=/no/such/model"], "model.path must be a Hugging Face model folder or `tiny`, got /no/such/model"),
        (["task.name=nope"], "task.name must be one of ['arithmetic'], or read module:Class, got 'nope'"),
        (["task.args.digits=0"], "task.args must suit Task of generators.tasks.arithmetic, got {'digits': 0}"),
    ],
)
def test_the_command_says_what_is_wrong_and_leaves_nothing_behind(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    command = [sys.executable, "scripts/train.py", f"run.outputs={tmp_path}", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "address"),
    [
        ([], None),
        (["buffer.address=tcp://10.0.0.7:5555", "buffer.keys=keys"], "tcp://10.0.0.7:0"),
        (["buffer.address=tcp://10.0.0.7:5555", "buffer.keys=keys", "sync.transport=disk"], None),
        (["buffer.address=tcp://10.0.0.7:5555", "buffer.keys=keys", "sync.address=tcp://n7:6000"], "tcp://n7:6000"),
        (["sync.transport=tcp"], "tcp://127.0.0.1:0"),
        (["sync.transport=shared_memory"], None),
        (["buffer.address=ipc:///tmp/buffer"], None),
    ],
)
def test_weights_are_served_where_other_hosts_can_join(overrides: list[str], address: str | None) -> None:
    assert load(overrides).weights_address == address


def test_a_buffer_that_listens_everywhere_needs_an_address_for_weights() -> None:
    with pytest.raises(ValueError, match="sync.address must be set when buffer.address names no host"):
        load(["buffer.address=tcp://0.0.0.0:5555", "buffer.keys=keys"])
