"""The plan of a run's memory (`scripts/launch.sh --plan`): what it prints, what it refuses, and what it
proposes."""

import dataclasses
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import ROOT, read_blocks
from public_models import PUBLIC_MODELS

from configs.load import load_config, to_yaml
from configs.parallel import MegatronConfig
from configs.schema import Config
from configs.sizes import count_sizes
from learners.layout_rules import ParallelSizes, find_megatron_problems
from learners.memory import plan_critic_rank, plan_memory, plan_policy_rank
from slipstream import plan as command
from slipstream.plan_hardware import Hardware
from slipstream.plan_layout import PlannedModel, RunPlan, plan_run
from slipstream.plan_search import apply_changes, propose_layout
from sync.kept_versions import KEPT

GIB = 2**30
BFLOAT16 = ["model.dtype=bfloat16", "generators.max_model_len=8192"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `config.json` for each public model, and nothing else."""
    where = tmp_path_factory.mktemp("models")
    for name, hf in PUBLIC_MODELS.items():
        (where / name).mkdir()
        (where / name / "config.json").write_text(json.dumps(hf))
    return where


@pytest.fixture
def say(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command; returns its exit status and all that it prints."""

    def run(name: str, words: str = "") -> tuple[int, str]:
        status = command.main(["--plan", f"model.path={folder / name}", *BFLOAT16, *shlex.split(words)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def make_model(name: str) -> PlannedModel:
    return PlannedModel(name, PUBLIC_MODELS[name], count_sizes(PUBLIC_MODELS[name]))


def make_hardware(**changes: Any) -> Hardware:
    given = dict(hosts=1, gpus=8, gpu_bytes=80 * GIB, host_bytes=2000 * GIB, shared_bytes=1000 * GIB)
    return Hardware(**given | changes)


def plan(name: str, *overrides: str, **hardware: Any) -> RunPlan:
    return plan_run(load_config([*BFLOAT16, *overrides]), make_model(name), make_hardware(**hardware))


# ---- the command


def test_the_command_loads_no_library_that_computes(folder: Path) -> None:
    code = (
        "import sys; from slipstream.plan import main; status = main(sys.argv[1:]);"
        "sys.exit(status or bool({'torch', 'ray', 'transformers', 'vllm', 'numpy'} & sys.modules.keys()))"
    )
    words = [f"model.path={folder / 'Qwen3-0.6B' / 'config.json'}", *BFLOAT16, "--gpus", "8"]
    found = subprocess.run([sys.executable, "-P", "-c", code, *words], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("Qwen3-0.6B (qwen3): 596,049,920 parameters")


def test_the_table_names_every_part_of_every_role(say: Callable[..., tuple[int, str]]) -> None:
    status, said = say("Qwen3-8B", "learner.ranks=4 learner.activation_checkpointing=true --gpus 8")
    assert status == 0 and said.endswith("The layout fits.\n")
    rows = re.findall(r"^ *(\S.*?) {2,}(\S+ [GM]iB)", said, re.MULTILINE)
    names = [name for name, _ in rows]
    for name in (
        "GPU 0-3 of host 0",
        "each of learner-0 to learner-3",
        "weights",
        "gradients",
        "optimizer",
        "gathered",
        "reduced",
        "activations",
        "head",
        "GPU 4-5 of host 0",
        "each of generator-0 to generator-1",
        "KV cache",
        "memory of host 0",
        "learner: checkpoint",
        "learner: staging",
        "shared memory: published versions",
        "buffer: groups",
        "buffer and driver: processes",
    ):
        assert name in names
    for sentence in ("KV cache: ", "a version: 15.3 GiB; training waits", "a checkpoint: 91.5 GiB on disk"):
        assert sentence in said


def test_what_cannot_fit_is_refused_with_role_place_and_bytes(say: Callable[..., tuple[int, str]]) -> None:
    status, said = say("Qwen3-8B", "--gpus 8 --gpu-memory 40")
    assert status == 1
    assert re.search(
        r"learner-0 must fit into 38.0 GiB of GPU 0 of host 0, which has 40.0 GiB, "
        r"got weights 30.5 GiB \+ .* = 2\d\d.\d GiB",
        said,
    )
    status, said = say("Qwen3-8B", "learner.ranks=4 --gpus 8 --host-memory 150")
    assert status == 1
    assert re.search(
        r"the roles of host 0 must fit into its 150.0 GiB of memory, got learner: .* = \d+.\d GiB", said
    )
    assert (
        "learner.ranks and placement.critic_ranks must be together at most 2"
        in (say("Qwen3-8B", "learner.ranks=4 --gpus 2")[1])
    )


def test_rules_on_a_models_sizes_are_asked_too(say: Callable[..., tuple[int, str]]) -> None:
    many = "learner.engine=megatron learner.ranks=128 learner.megatron.pipeline_parallel=128"
    status, said = say("Qwen3-8B", f"{many} --gpus 8 --hosts 16")
    assert status == 1 and "pipeline_parallel must divide the number of layers, got 128 for 36" in said
    biased = PUBLIC_MODELS["Qwen3-8B"] | {"attention_bias": True}
    assert find_megatron_problems(ParallelSizes(), biased) == [
        "attention_bias of model.path must be false, got true"
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("model.path=tiny", "model.path must be a Hugging Face folder or a config.json for a plan, got tiny"),
        ("model.path=Qwen/Qwen3-8B", "hf download Qwen/Qwen3-8B config.json"),
        ("learner.rank=3", "learner.rank must be a configuration key"),
        ("placement.mode=colocated --gpus 8 --hosts 2", "--hosts must be 1 with placement.mode=colocated"),
        ("learner.engine=simulated generators.engine=simulated", "must be fsdp or megatron to be planned"),
        (
            "algo=ppo placement.critic=own learner.engine=megatron learner.ranks=4 "
            "learner.megatron.tensor_parallel=4",
            "placement.critic_ranks must be a multiple of learner.megatron.tensor_parallel × pipeline",
        ),
    ],
)
def test_what_cannot_be_planned_ends_with_a_sentence(
    words: str, sentence: str, say: Callable[..., tuple[int, str]]
) -> None:
    status, said = say("Qwen3-8B", words)
    assert status == 2 and sentence in said


def test_a_kind_of_model_that_is_not_known_is_named(
    say: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    status, said = say("Qwen3-8B", f"model.path={tmp_path}")
    assert status == 2 and "got mamba" in said


def test_words_for_hardware_are_checked(say: Callable[..., tuple[int, str]]) -> None:
    for words in ("--gpus -1", "--hosts 0", "--gpu-memory nan", "--disk-rate 0", "--gpus 8x"):
        with pytest.raises(SystemExit, match="2"):
            say("Qwen3-8B", words)


def test_the_page_shows_what_the_command_prints(say: Callable[..., tuple[int, str]]) -> None:
    blocks = read_blocks((ROOT / "docs" / "big-models.md").read_text())
    shown = [(one.code, two.code) for one, two in itertools.pairwise(blocks) if two.language == "text"]
    assert len(shown) == 3
    for typed, printed in shown:
        words = shlex.split(typed.replace("\\\n", ""))
        assert words[:2] == ["scripts/launch.sh", "--plan"]
        name = words[2].removeprefix("model.path=models/")
        assert say(name, shlex.join(words[3:]))[1].endswith(printed)


# ---- one arithmetic


@pytest.mark.parametrize(
    "overrides",
    [
        ["learner.ranks=4"],
        ["learner.ranks=4", "learner.fsdp.cpu_offload=true", "algo=ppo"],
        ["learner.engine=megatron", "learner.ranks=4", "learner.megatron.tensor_parallel=2"],
    ],
)
def test_the_plan_and_the_learners_log_have_the_same_numbers(overrides: list[str], folder: Path) -> None:
    config = load_config([*BFLOAT16, f"model.path={folder / 'Qwen3-8B'}", *overrides])
    logged = plan_memory(config, cuda=True)
    (first, *_) = plan("Qwen3-8B", *overrides).roles
    assert logged is not None and first.name == "learner-0"
    assert {name: size for name, size in first.parts.items() if size} == {
        name: size for name, size in logged.parts.items() if size
    }
    assert first.host_parts.items() >= logged.host_parts.items()


def test_megatrons_bytes_of_a_parameter_are_the_published_ones() -> None:
    """6 + 12 / d with the distributed optimizer over d ranks, of which one gradient more is in flight here
    (Megatron-LM, docs/distributed-optimizer)."""
    size = count_sizes(PUBLIC_MODELS["Qwen3-8B"]).parameters
    for ranks in (1, 2, 8):
        (first, *_) = plan("Qwen3-8B", "learner.engine=megatron", f"learner.ranks={ranks}", hosts=2).roles
        parts = first.parts
        held = parts["weights"] + parts["gradients"] + parts["optimizer"]
        assert held == (6 + 12 / ranks) * size


def test_versions_lie_on_the_hosts_whose_ranks_publish_them() -> None:
    overrides = ["learner.ranks=12", "learner.activation_checkpointing=true", "generators.count=4"]
    found = plan("Qwen3-8B", *overrides, hosts=2)
    size = 2 * count_sizes(PUBLIC_MODELS["Qwen3-8B"]).parameters
    assert found.fits and found.version_bytes == size and found.shares == pytest.approx([2 / 3, 1 / 3])
    first, second = found.hosts
    assert first["shared memory: published versions"] == pytest.approx((KEPT + 1) * size * 2 / 3)
    assert second["shared memory: published versions"] == pytest.approx((KEPT + 1) * size / 3)
    assert second["shared memory: fetched versions"] == 2 * size
    assert "shared memory: fetched versions" not in first, "engines are on the second host alone"
    assert sum(host["learner: staging"] for host in found.hosts) == pytest.approx(size)
    on_disk = plan("Qwen3-8B", *overrides, "sync.transport=disk", hosts=2)
    assert not any("shared memory" in name for host in on_disk.hosts for name in host)


def test_the_number_of_kept_versions_is_the_publishers() -> None:
    import inspect

    from sync.publisher import Publisher

    assert inspect.signature(Publisher).parameters["keep"].default == KEPT


def test_roles_that_take_turns_need_the_larger_of_two_and_the_hosts_memory() -> None:
    overrides = ["learner.ranks=8", "generators.count=8", "learner.activation_checkpointing=true"]
    apart = plan("Qwen3-8B", *overrides)
    turns = plan("Qwen3-8B", *overrides, "placement.mode=colocated")
    assert turns.fits and turns.num_gpus == 8
    rank, engine = turns.roles[0], turns.roles[8]
    assert rank.gpus == engine.gpus == (0,)
    assert max(rank.least, engine.least) <= 80 * GIB < sum(rank.parts.values()) + sum(engine.parts.values())
    asleep = turns.hosts[0]["learner: asleep"]
    assert asleep == 8 * (rank.parts["weights"] + rank.parts["optimizer"])
    assert sum(turns.hosts[0].values()) == pytest.approx(sum(apart.hosts[0].values()) + asleep)


def test_a_critic_of_its_own_has_ranks_and_numbers_of_its_own() -> None:
    overrides = ["algo=ppo", "placement.critic=own", "placement.critic_ranks=2", "learner.ranks=4"]
    config = load_config([*BFLOAT16, *overrides])
    sizes = count_sizes(PUBLIC_MODELS["Qwen3-8B"])
    policy, critic = (one(config, sizes, cuda=True) for one in (plan_policy_rank, plan_critic_rank))
    assert critic.parts["optimizer"] == 2 * policy.parts["optimizer"] and critic.parts["head"] == 0
    megatron = load_config([*overrides, "learner.engine=megatron"])
    assert plan_critic_rank(megatron, sizes, cuda=True).parts["head"] == 0
    roles = {role.name: role for role in plan("Qwen3-8B", *overrides).roles}
    assert roles["learner-5"].parts["weights"] == critic.parts["weights"]
    assert roles["learner-3"].parts["weights"] == policy.parts["weights"]


def test_an_engines_kv_is_what_its_part_of_the_gpu_leaves() -> None:
    found = plan("Qwen3-8B", "learner.ranks=4", "learner.activation_checkpointing=true")
    engine = next(role for role in found.roles if role.name == "generator-0")
    assert sum(engine.parts.values()) == pytest.approx(0.9 * 80 * GIB)
    assert found.kv is not None
    assert found.kv.tokens == engine.parts["KV cache"] // (16 * 147_456) * 16
    assert found.kv.sequences == found.kv.tokens // 8192
    told = plan("Qwen3-8B", "generators.kv_cache_mb=1000")
    assert any("generators.kv_cache_mb must be at least 1152 (a sequence" in one for one in told.shortages)


def test_transformers_engine_is_planned_with_its_own_pages_and_batches() -> None:
    overrides = ["generators.engine=transformers", "generators.max_model_len=8200"]
    for gpus, page in ((8, 256), (0, 32)):
        page_bytes = -(-8200 // page) * page * 147_456
        least_mb = math.ceil(page_bytes / 2**20)
        too_few = plan("Qwen3-8B", *overrides, f"generators.kv_cache_mb={least_mb - 1}", gpus=gpus)
        sentence = f"kv_cache_mb must be at least {least_mb} (a sequence"
        assert any(sentence in one for one in too_few.shortages)
    parts = [
        next(role.parts for role in plan("Qwen3-8B", *some).roles if role.name == "generator-0")
        for some in (overrides, overrides[1:])
    ]
    assert parts[0]["activations"] / parts[1]["activations"] == (8200 + 256 + 8) / 2048, (
        "rollouts and the parity probe"
    )


# ---- proposals


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen3-0.6B", "--gpus 1 --gpu-memory 24"),
        ("Qwen3-8B", "--gpus 8 --gpu-memory 80"),
        ("Qwen3-8B", "--gpus 4 --gpu-memory 40 generators.count=4"),
        ("Qwen3-8B", "generators.kv_cache_mb=10 learner.ranks=3 learner.fsdp.accumulate=whole --gpus 8"),
        ("Qwen3-32B", "--gpus 8 learner.engine=megatron"),
        ("Llama-3.1-70B", "--gpus 8 --hosts 4"),
        ("Qwen3-235B-A22B", "--gpus 8 --hosts 2"),
        ("Qwen3-0.6B", "--gpus 0 --host-memory 64"),
        ("Qwen3-8B", "--gpus 8 placement.mode=colocated learner.ranks=8"),
        ("Qwen3-8B", "--gpus 8 learner.lora.rank=16 learner.tokens_per_microbatch=65536"),
        ("Llama-3.1-70B", "--gpus 8 --hosts 4 generators.count=0"),
        ("Qwen3-32B", "--gpus 8 --hosts 8 algo=ppo placement.critic=own"),
        ("Llama-3.1-70B", "--gpus 8 --hosts 8 algo=ppo placement.critic=own learner.engine=megatron"),
        ("Qwen3-8B", "--gpus 8 generators.engine=transformers generators.max_model_len=8200"),
        ("Qwen3-0.6B", "--gpus 0 --host-memory 64 generators.engine=transformers"),
    ],
)
def test_the_layout_that_is_named_is_accepted_when_it_is_typed(
    name: str, words: str, say: Callable[..., tuple[int, str]]
) -> None:
    status, said = say(name, words)
    assert status == 1
    proposed = re.search(r"(?:--hosts (\d+) this would|that fits):\n  (.*)\n  on ", said)
    assert proposed is not None, said
    hosts = f"--hosts {proposed[1]}" if proposed[1] else ""
    status, said = say(name, f"{words} {proposed[2]} {hosts}")
    assert status == 0, said


def test_generators_that_join_a_run_are_planned_without_a_learner(
    say: Callable[..., tuple[int, str]],
) -> None:
    joins = "role=generators buffer.address=tcp://127.0.0.1:5555 generators.count=1"
    status, said = say("Llama-3.1-70B", f"{joins} --gpus 8")
    assert status == 1
    assert "The nearest layout that fits:\n  generators.tensor_parallel=2\n  on 2 GPUs\n" in said
    status, said = say("Llama-3.1-70B", f"{joins} --gpus 8 --gpu-memory 10")
    assert status == 1 and re.search(r"On a GPU an engine needs at least \S+ GiB, and on a host", said)


def test_a_run_that_goes_on_keeps_the_engine_that_its_checkpoints_are_of(
    say: Callable[..., tuple[int, str]], folder: Path, tmp_path: Path
) -> None:
    words = "--gpus 8 --hosts 8 --gpu-memory 24 --host-memory 400"
    status, said = say("Qwen3-32B", words)
    assert status == 1 and "learner.engine=megatron" in said
    begun = load_config([*BFLOAT16, f"model.path={folder / 'Qwen3-32B'}", f"run.outputs={tmp_path}"])
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text(to_yaml(begun))
    for resumed in (
        f"run.resume={tmp_path / 'begun'}", f"run.resume=auto run.name=begun run.outputs={tmp_path}"
    ):  # fmt: skip
        status, said = say("Qwen3-32B", f"{words} {resumed}")
        assert status == 1 and "does not fit" in said and "learner.engine" not in said


def test_generators_that_join_a_run_are_told_no_key_that_is_the_runs(
    say: Callable[..., tuple[int, str]],
) -> None:
    joins = "role=generators buffer.address=tcp://127.0.0.1:5555 generators.count=1 --gpus 8"
    status, said = say("Llama-3.1-70B", f"{joins} generators.kv_cache_mb=1")
    assert status == 1 and "generators.kv_cache_mb must be at least" in said
    assert "generators.kv_cache_mb=" not in said.partition("must be at least")[2]
    status, said = say("Llama-3.1-70B", f"{joins} --gpu-memory 24 model.dtype=float32")
    assert status == 1 and "model.dtype" not in said


def test_what_fits_no_hosts_says_what_it_needs(say: Callable[..., tuple[int, str]]) -> None:
    status, said = say("DeepSeek-V3", "--gpus 8 --gpu-memory 80")
    assert status == 1 and "No layout that was looked at fits such hosts, however many" in said
    assert re.search(r"On a GPU a rank of the learner needs at least gathered \S+ GiB \+ reduced", said)
    status, said = say("DeepSeek-V3", "--gpus 8 --gpu-memory 192 --shared-memory 2700 --host-memory 4000")
    assert re.search(r"With --hosts \d+ this would:", said), "larger GPUs hold a layer of it"


def test_what_fits_no_hosts_in_float32_is_told_what_fits_in_bfloat16(
    say: Callable[..., tuple[int, str]],
) -> None:
    words = "model.dtype=float32 --gpus 8 --gpu-memory 80"
    status, said = say("Qwen3-235B-A22B", words)
    proposed = re.search(r"With another model.dtype and --hosts (\d+) this would:\n  (.*)\n  on ", said)
    assert status == 1 and "however many there are" in said and proposed is not None
    assert proposed[2].startswith("model.dtype=bfloat16 ")
    status, said = say("Qwen3-235B-A22B", f"{words} {proposed[2]} --hosts {proposed[1]}")
    assert status == 0, said


def test_fewer_hosts_than_named_would_not_do() -> None:
    config, model = load_config(BFLOAT16), make_model("Llama-3.1-70B")
    found = propose_layout(config, model, make_hardware())
    assert found is not None and found.hosts > 1
    fewer = propose_layout(config, model, make_hardware(hosts=found.hosts - 1))
    assert fewer is not None and fewer.hosts == found.hosts


# ---- properties


LAYOUTS = st.fixed_dictionaries(
    {
        "learner.ranks": st.sampled_from([2, 4, 8, 16]),
        "learner.activation_checkpointing": st.booleans(),
        "learner.tokens_per_microbatch": st.sampled_from([8192, 16384, 32768]),
        "learner.fsdp.cpu_offload": st.booleans(),
        "learner.fsdp.sequence_parallel": st.sampled_from([1, 2]),
        "generators.tensor_parallel": st.sampled_from([1, 2, 4]),
        "generators.count": st.integers(1, 4),
    }
)
MODELS = st.sampled_from(list(PUBLIC_MODELS))
BASE = load_config(BFLOAT16)


@settings(max_examples=25)
@given(
    MODELS,
    LAYOUTS,
    st.sampled_from([24, 40, 80, 141, 288]),
    st.sampled_from([200, 500, 2000, 8000]),
    st.sampled_from(["gpu_bytes", "host_bytes", "shared_bytes"]),
)
def test_more_memory_never_makes_a_layout_unfit(
    name: str, layout: dict[str, Any], gpu: int, host: int, more: str
) -> None:
    config, model = apply_changes(BASE, layout), make_model(name)
    hardware = make_hardware(hosts=4, gpu_bytes=gpu * GIB, host_bytes=host * GIB, shared_bytes=host * GIB / 2)
    larger = dataclasses.replace(hardware, **{more: 1.5 * getattr(hardware, more)})
    before, after = plan_run(config, model, hardware), plan_run(config, model, larger)
    assert after.fits or not before.fits
    assert len(after.shortages) <= len(before.shortages)


def plan_rank(config: Config, name: str) -> tuple[float, float]:
    """Returns the bytes of a rank on its GPU and in its host's memory."""
    found = plan_policy_rank(config, count_sizes(PUBLIC_MODELS[name]), cuda=True)
    return found.total_bytes, found.host_bytes


@settings(max_examples=25)
@given(MODELS, LAYOUTS)
def test_more_shards_never_need_more_on_a_rank(name: str, layout: dict[str, Any]) -> None:
    """From two shards on: the second brings the buffers of the gathers."""
    config = apply_changes(BASE, layout)
    twice = apply_changes(config, {"learner.ranks": 2 * config.learner.ranks})
    assert all(
        after <= before for before, after in zip(plan_rank(config, name), plan_rank(twice, name), strict=True)
    )


@settings(max_examples=25)
@given(
    st.sampled_from(["Qwen3-8B", "Qwen3-235B-A22B", "Llama-3.1-70B"]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 4, 8]),
    st.sampled_from(["ranks", "tensor_parallel", "expert_parallel"]),
)
def test_more_of_megatrons_shards_never_need_more_on_a_rank(
    name: str, tensor: int, pipeline: int, expert: int, more: str
) -> None:
    layout = MegatronConfig(tensor_parallel=tensor, pipeline_parallel=pipeline, expert_parallel=expert)
    changes = {"learner.engine": load_config(["learner.engine=megatron"]).learner.engine}
    config = apply_changes(BASE, {**changes, "learner.ranks": 64, "learner.megatron": layout})
    key = "learner.ranks" if more == "ranks" else f"learner.megatron.{more}"
    before = {"ranks": 64, "tensor_parallel": tensor, "expert_parallel": expert}[more]
    if not count_sizes(PUBLIC_MODELS[name]).num_experts and more == "expert_parallel":
        return
    after = plan_rank(apply_changes(config, {key: 2 * before}), name)
    # Norms and routers stay whole on each rank.
    assert all(now <= 1.001 * then for then, now in zip(plan_rank(config, name), after, strict=True))
