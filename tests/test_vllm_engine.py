"""The real engine: versions in flight, digests, samples and log-probabilities.

vLLM changes its process (threads, memory, a process group); the fixture puts back what it can. Three engines
share one import of vLLM. A Hugging Face forward pass judges an engine's numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_claims import (  # noqa: F401
    test_a_forced_sample_goes_on_beyond_the_end_of_sequence_to_the_models_last_place,
    test_a_greedy_sample_takes_the_likeliest_token_each_time,
    test_a_sample_ends_at_the_end_of_sequence_or_at_its_length,
    test_a_sample_ends_with_its_own_stop_tokens_and_with_the_models,
    test_a_sample_is_the_same_alone_and_in_a_crowd_to_the_last_bit,
    test_a_sample_that_the_model_cannot_take_is_refused_with_the_numbers,
    test_a_version_that_is_gone_leaves_the_one_before_in_service,
    test_an_aborted_sample_returns_what_it_had_and_the_others_go_on,
    test_copied_weights_are_sampled_from_as_mapped_ones_are,
    test_damaged_weights_are_never_served_and_a_good_load_repairs,
    test_different_seeds_give_different_samples,
    test_each_token_carries_the_version_that_sampled_it,
    test_kept_kv_is_the_old_versions_and_what_follows_is_the_new_ones,
    test_recomputed_kv_leaves_no_trace_of_the_old_version,
    test_samples_at_another_temperature_change_no_bit_of_the_others_and_have_their_own,
    test_the_digests_are_of_what_the_engine_holds,
    test_the_same_snapshot_may_be_taken_up_again,
)
from engine_rig import END, TOLERANCE, VOCAB, VllmRig, Weights, make_prompts
from ranks import on_ranks
from transformers import Qwen3ForCausalLM

from configs.parallel import LoraConfig, LoraPublish
from configs.sync import KvCache
from learners.fsdp import FsdpEngine
from learners.packing import Batch, pack_rows
from learners.world import World
from sync.adapters import describe_adapters
from sync.announcement import announce_version
from sync.manifest import DigestMismatch, EngineMismatch
from sync.publisher import Publisher
from sync.snapshot import Snapshot
from sync.stream import collect_tensors, whole_parts
from sync.subscriber import Subscriber


@pytest.fixture(scope="module")
def make_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VllmRig]]:
    set_num_threads, disabled = torch.set_num_threads, torch._dynamo.config.disable
    rigs: list[VllmRig] = []

    def make(**arguments: Any) -> VllmRig:
        rigs.append(VllmRig(tmp_path_factory.mktemp("rig"), **arguments))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.engine.shutdown()
        rig.publisher.close()
    torch.set_num_threads, torch._dynamo.config.disable = set_num_threads, disabled


@pytest.fixture(scope="module")
def tied(make_rig: Callable[..., VllmRig]) -> VllmRig:
    """Tied head, an end of sequence, KV kept, no prefix cache."""
    return make_rig(tied=True, end=END)


@pytest.fixture(scope="module")
def untied(make_rig: Callable[..., VllmRig]) -> VllmRig:
    """Untied head, no end of sequence, KV kept, with prefix cache."""
    return make_rig(tied=False, end=None, prefix_cache=True)


@pytest.fixture(scope="module")
def recompute(make_rig: Callable[..., VllmRig]) -> VllmRig:
    """Tied head, no end of sequence, KV computed anew, temperature 0.7."""
    return make_rig(tied=True, end=None, kv_cache=KvCache.recompute, temperature=0.7)


@pytest.fixture(params=["tied", "untied", "recompute"])
def rig(request: pytest.FixtureRequest) -> VllmRig:
    return request.getfixturevalue(request.param)


def adapters_of_a_learner(
    world: World, model: Path, sequences: list[list[int]]
) -> tuple[Weights, list[torch.Tensor]]:
    """Returns what the learner publishes after three updates, and its log-probabilities of the sequences'
    tokens."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    total, count = int(lengths.sum()), len(sequences)
    batch = Batch(
        tokens=torch.tensor(sum(sequences, [])),
        sampled=torch.ones(total, dtype=torch.bool),
        behavior_logprobs=torch.zeros(total),
        versions=torch.zeros(total, dtype=torch.int32),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).numpy(),
        rewards=torch.zeros(count),
        groups=torch.arange(count),
        group_weights=torch.ones(count),
        truncated=torch.zeros(count, dtype=torch.bool),
        greedy_rewards=torch.full((count,), float("nan")),
    )
    engine = FsdpEngine(model, temperature=0.7, lora=LoraConfig(rank=4, publish=LoraPublish.adapter))
    lesson = replace(
        pack_rows(batch, [0]), tokens=torch.arange(2, 2 + len(sequences[0]))
    )  # the same, whatever was sampled
    for _ in range(3):
        engine.update([lesson], lambda logprobs, entropy, packed: -logprobs.sum() / 10, 1e-2)
    logprobs = engine.infer([pack_rows(batch, range(count))])[0]
    return collect_tensors(engine.stream_weights()), list(logprobs.split(lengths.tolist()))


def test_adapters_alone_are_taken_up_in_flight_and_sampled_from_as_the_learner_has_them(
    recompute: VllmRig, tmp_path: Path
) -> None:
    model = recompute.publisher.folder.parent / "model"
    [(adapters, _)] = on_ranks(1, adapters_of_a_learner, tmp_path / "first", model, [[0] * 12])
    before = recompute.load_model(0)
    samples = [recompute.add_sample(prompt, 30, seed=i) for i, prompt in enumerate(make_prompts(6))]
    for _ in range(10):
        assert recompute.engine.step() == []
    publisher = Publisher(
        tmp_path / "weights", "x", adapter=describe_adapters(model, "float32", LoraConfig().alpha / 4)
    )
    subscriber = Subscriber()
    after = publisher.publish_version(before.version + 1, whole_parts(adapters))
    whole = subscriber.prepare_version(announce_version(after))
    assert isinstance(whole, Snapshot)
    recompute.engine.load_version(whole)
    assert recompute.engine.held_digests(whole.manifest) == {e.name: e.digest for e in whole.manifest.tensors}
    done = recompute.finish_samples()
    recompute.load_model(0)
    subscriber.close()
    publisher.close()

    sequences = [sample.prompt + done[sample.id].tokens for sample in samples]
    [(again, logprobs)] = on_ranks(
        1, adapters_of_a_learner, tmp_path / "again", model, [[0] * 12, *sequences]
    )
    assert all(torch.equal(again[name], adapters[name]) for name in adapters)
    for sample, sequence, learner in zip(samples, sequences, logprobs[1:], strict=True):
        completion = done[sample.id]
        assert completion.versions == [before.version] * 10 + [after.version] * 20
        sampled = torch.tensor(completion.logprobs[10:])
        assert (sampled - learner[-20:]).abs().max() < 1e-4
        base = recompute.compute_logprobs(0, sequence[:-1])[-20:].gather(
            1, torch.tensor(sequence[-20:])[:, None]
        )[:, 0]
        assert (sampled - base).abs().max() > 0.1


@pytest.mark.parametrize(
    ("parameter", "row", "changed"),
    [
        ("model.layers.1.self_attn.qkv_proj.weight", 0, "model.layers.1.self_attn.q_proj.weight"),
        ("model.layers.1.self_attn.qkv_proj.weight", 128, "model.layers.1.self_attn.k_proj.weight"),
        ("model.layers.1.self_attn.qkv_proj.weight", -1, "model.layers.1.self_attn.v_proj.weight"),
        ("model.layers.0.mlp.gate_up_proj.weight", 95, "model.layers.0.mlp.gate_proj.weight"),
        ("model.layers.0.mlp.gate_up_proj.weight", 96, "model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", VOCAB - 1, "lm_head.weight"),
        ("model.embed_tokens.weight", 0, "model.embed_tokens.weight"),
        ("model.norm.weight", 3, "model.norm.weight"),
    ],
)
def test_one_changed_number_in_the_engine_changes_the_digest_of_its_tensor_alone(
    untied: VllmRig, parameter: str, row: int, changed: str
) -> None:
    manifest = untied.load_model(0)
    model = untied.engine._core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    dict(model.named_parameters())[parameter].data[row] += 1e-3
    held = untied.engine.held_digests(manifest)
    assert [entry.name for entry in manifest.tensors if held[entry.name] != entry.digest] == [changed]
    untied.load_model(0)


def test_weights_that_do_not_fit_the_model_are_refused_by_name(untied: VllmRig) -> None:
    whole, held = untied.weights[0], untied.load_model(0)
    name = "model.layers.0.self_attn.k_proj.weight"
    wrong: list[tuple[Weights, str]] = [
        ({key: tensor for key, tensor in whole.items() if key != name}, "lacks .*k_proj"),
        (
            {key: tensor for key, tensor in whole.items() if key != "lm_head.weight"},
            "does not fill .*lm_head",
        ),
        (
            {key: tensor for key, tensor in whole.items() if "down_proj" not in key},
            "does not fill .*down_proj",
        ),
        (whole | {"model.layers.7.mlp.up_proj.bias": torch.zeros(3)}, "lacks .*gate_proj.bias"),
        (whole | {"model.extra.weight": torch.zeros(3)}, "no place for .*model.extra.weight"),
        (whole | {"lm_head.weight": whole["lm_head.weight"][:-1].clone()}, "does not fill .*lm_head"),
        (whole | {"model.norm.weight": whole["model.norm.weight"].bfloat16()}, "published as bfloat16"),
    ]
    for weights, message in wrong:
        untied._version += 2
        manifest = untied.publisher.publish_version(untied._version, whole_parts(weights))
        with pytest.raises(DigestMismatch, match=message):
            untied.engine.load_version(Snapshot(manifest))
        assert untied.engine.version == held.version
    assert untied.engine.held_digests(held) == {entry.name: entry.digest for entry in held.tensors}


@pytest.mark.parametrize("mapped", [True, False])
def test_an_engine_that_does_not_take_the_weights_is_found_out(
    tied: VllmRig, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is right, and one tensor does not arrive. The head has 80 rows and the engine's has 128, so it
    is never mapped."""
    from sync import engine_layout

    before = tied.load_model(0)
    copy = engine_layout.copy_and_digest
    monkeypatch.setattr(tied.engine, "_map_weights", mapped)
    monkeypatch.setattr(
        engine_layout,
        "copy_and_digest",
        lambda source, place: copy(source[:-1], place[:-1]) if len(source) == VOCAB else copy(source, place),
    )
    with pytest.raises(EngineMismatch, match="1 of 24 tensors in the engine .*: model.embed_tokens.weight"):
        tied.load_model(1)
    assert before.version is not None and tied.engine.version is None
    with pytest.raises(AssertionError):
        tied.add_sample([2], 1, seed=0)
    monkeypatch.undo()
    after = tied.load_model(1)
    assert tied.engine.held_digests(after) == {entry.name: entry.digest for entry in after.tensors}


def test_weights_are_the_snapshots_own_memory_where_the_layout_allows_and_whole_without_its_file(
    untied: VllmRig,
) -> None:
    manifest = untied.load_model(0)
    model = untied.engine._core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    places = [
        line.split() for line in Path("/proc/self/maps").read_text().splitlines() if manifest.path in line
    ]
    spans = [tuple(int(end, 16) for end in place[0].split("-")) for place in places]
    mapped = {
        name for name, parameter in model.named_parameters()
        if any(first <= parameter.data_ptr() < last for first, last in spans)
    }  # fmt: skip
    assert {name for name, _ in model.named_parameters()} - mapped == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    Path(manifest.path).unlink()
    assert untied.engine.held_digests(manifest) == {entry.name: entry.digest for entry in manifest.tensors}
    with pytest.raises(FileNotFoundError):
        Snapshot(manifest)


def test_a_folder_on_disk_is_a_model_folder_when_its_publisher_has_closed(
    tied: VllmRig, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    tied.models[0].save_pretrained(model)
    publisher = Publisher(tmp_path / "weights", "x", model=model)
    for version in range(3):
        publisher.publish_version(version, whole_parts(tied.weights[version % 2]))
    publisher.publish_version(3, whole_parts(tied.weights[1]))
    publisher.close()
    names = {path.name for path in publisher.folder.iterdir()}
    assert names == {"model.safetensors", *(path.name for path in model.glob("*.json"))}
    served = Qwen3ForCausalLM.from_pretrained(publisher.folder)
    assert all(torch.equal(tensor, served.state_dict()[name]) for name, tensor in tied.weights[1].items())
    again = Publisher(publisher.folder, "y")  # another run may use it
    tied.engine.load_version(Snapshot(again.publish_version(0, whole_parts(tied.weights[0]))))
    again.close()


def test_float32_is_computed_in_float32_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    from generators.vllm_engine import make_float32_environment

    assert make_float32_environment("bfloat16") == {}
    for name, value in make_float32_environment("float32").items():
        monkeypatch.setenv(name, value)
    assert knobs.language.fp32_default == "ieee", "Triton knows the variable"


def test_the_prefix_cache_never_gives_a_sample_the_kv_of_other_weights(untied: VllmRig) -> None:
    """A prompt of three blocks is cached under model 0. Under model 1 it is asked for by a sample that was
    waiting at the update and by one that came later; running samples keep the old KV alive all the while."""
    prompt = make_prompts(1, length=100)[0]
    untied.load_model(0)
    untied.add_sample(prompt, 2, seed=0)
    untied.finish_samples()
    for i in range(32):
        untied.add_sample(prompt[:64] + [2 + i], 40, seed=i)
    for _ in range(3):
        untied.engine.step()
    waiting = untied.add_sample(prompt, 10, seed=1)
    untied.engine.step()
    assert untied.engine.count_sampled_tokens()[waiting.id] == 0
    after = untied.load_model(1)
    later = untied.add_sample(prompt, 10, seed=2)
    done = untied.finish_samples()
    again = untied.add_sample(prompt, 10, seed=3)  # finds model 1's own KV
    done |= untied.finish_samples()
    for sample in (waiting, later, again):
        completion = done[sample.id]
        assert completion.versions == [after.version] * 10
        expected = untied.compute_logprobs(1, prompt + completion.tokens[:-1])
        assert untied.find_difference(sample, completion, expected, 0, 10) < TOLERANCE


class RecordedCore:
    """Stands where vLLM's core does and records what an engine on a GPU asks of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def sleep(self, level: int, mode: str) -> None:
        self.asked.append(("sleep", level, mode))

    def wake_up(self, tags: list[str] | None) -> None:
        self.asked.append(("wake", tags))

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        self.asked.append(method)

    def set_weight_version(self, version: str) -> None:
        self.asked.append(("version", version))


def test_an_engine_on_a_gpu_sleeps_and_wakes_in_the_order_that_leaves_room_for_its_weights(
    tied: VllmRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights before KV, and both before a step. vLLM's sleep itself needs a GPU."""
    engine, core = tied.engine, RecordedCore()
    source = Snapshot(tied.publish_model(0))
    monkeypatch.setattr(engine, "_core", core)
    monkeypatch.setattr(engine, "_sleeps", True)
    monkeypatch.setattr(engine, "version", 7)
    engine.sleep(keep_weights=True)
    engine.wake()
    assert engine.version == 7 and core.asked == [("sleep", 1, "keep"), ("wake", None)]
    core.asked.clear()
    engine.sleep(keep_weights=False)
    assert engine.version is None, "it may sample from nothing before a version is loaded"
    engine.wake()
    engine.load_version(source)
    version = source.manifest.version
    assert core.asked == [
        ("sleep", 2, "keep"), ("wake", ["weights"]), "load_version", ("wake", ["kv_cache"]),
        ("version", str(version)),
    ]  # fmt: skip
    assert engine.version == version
