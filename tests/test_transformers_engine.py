"""The engine on transformers' continuous batching: all that an engine must do, families of models, and what
is this engine's own: its draws, a cache that is full, and errors of the library."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from engine_rig import END, TOLERANCE, TransformersRig, Weights, make_prompts
from safetensors.torch import load_file
from test_families import FAMILIES, HEAD, SIZES, Family, make_model_folder
from transformers import AutoConfig, AutoModelForCausalLM

from configs.load import load_config
from configs.sync import KvCache
from generators.engine import Sample
from generators.token_draw import DrawingSample, TokenDraw
from generators.transformers_engine import TransformersEngine
from sync import transformers_weights
from sync.manifest import DigestMismatch, EngineMismatch
from sync.publisher import Publisher
from sync.snapshot import Snapshot
from sync.stream import whole_parts

SERVED = {
    name: FAMILIES[name]
    for name in ("mistral, window", "mixtral, window", "qwen3_moe", "gemma2", "granite", "cohere2", "smollm3")
} | {
    # vLLM has no such model of its own.
    "helium": Family("helium", HEAD),
    # Stacked experts that are published stacked, which our way into vLLM has no place for.
    "granitemoe": Family("granitemoe", dict(num_local_experts=4, num_experts_per_tok=2, logits_scaling=0.5)),
    # A router's correction bias is a buffer, in float32.
    "glm4_moe": Family(
        "glm4_moe",
        HEAD
        | dict(
            moe_intermediate_size=24,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
    ),
}


@pytest.fixture(scope="module")
def make_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., TransformersRig]]:
    rigs: list[TransformersRig] = []

    def make(**arguments: Any) -> TransformersRig:
        rigs.append(TransformersRig(tmp_path_factory.mktemp("rig"), **arguments))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.engine.shutdown()
        rig.publisher.close()


@pytest.fixture(scope="module")
def tied(make_rig: Callable[..., TransformersRig]) -> TransformersRig:
    """Tied head, an end of sequence, KV kept."""
    return make_rig(tied=True, end=END)


@pytest.fixture(scope="module")
def untied(make_rig: Callable[..., TransformersRig]) -> TransformersRig:
    """Untied head, no end of sequence, KV kept."""
    return make_rig(tied=False, end=None)


@pytest.fixture(scope="module")
def recompute(make_rig: Callable[..., TransformersRig]) -> TransformersRig:
    """Tied head, no end of sequence, KV computed anew, temperature 0.7."""
    return make_rig(tied=True, end=None, kv_cache=KvCache.recompute, temperature=0.7)


@pytest.fixture(params=["tied", "untied", "recompute"])
def rig(request: pytest.FixtureRequest) -> TransformersRig:
    return request.getfixturevalue(request.param)


# ---- families of models


@pytest.mark.parametrize("name", SERVED)
def test_a_family_is_sampled_from_with_the_log_probabilities_of_hugging_face(
    name: str, tmp_path: Path
) -> None:
    model = make_model_folder(SERVED[name], tmp_path / "model")
    engine = TransformersEngine(
        str(model), dtype="float32", max_model_len=64, max_sequences=8, kv_cache_mb=8, temperature=0.7
    )
    publisher = Publisher(tmp_path / "weights", "x")
    manifest = publisher.publish_version(0, whole_parts(load_file(model / "model.safetensors")))
    engine.load_version(Snapshot(manifest))
    assert engine.held_digests(manifest) == {entry.name: entry.digest for entry in manifest.tensors}
    samples = [
        Sample(id=str(i), prompt=list(range(5, 9 + 3 * i)), max_tokens=20, seed=i, forced=True)
        for i in range(4)
    ]
    for sample in samples:
        engine.add_sample(sample)
    done = {}
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
    reference = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    for sample in samples:
        tokens = torch.tensor(done[sample.id].tokens)
        with torch.no_grad():
            logits = reference(torch.tensor([sample.prompt + tokens.tolist()]), use_cache=False).logits[0]
        expected = (logits / 0.7).log_softmax(-1)[len(sample.prompt) - 1 : -1].gather(1, tokens[:, None])
        assert (expected[:, 0] - torch.tensor(done[sample.id].logprobs)).abs().max() < 2e-5
    for entry in manifest.tensors:
        last = engine._weights._places[entry.name].view().view(-1)[-1:]
        before = last.clone()
        last += 0.5
        changed = engine.held_digests(manifest)
        assert [e.name for e in manifest.tensors if changed[e.name] != e.digest] == [entry.name]
        last.copy_(before)
    publisher.close()


@pytest.mark.parametrize(
    ("model_type", "sizes", "found"),
    [
        (
            "deepseek_v3",
            SIZES | FAMILIES["deepseek_v3"].sizes,
            r"deepseek_v3 with latent attention \(kv_lora_rank\)",
        ),
        ("qwen3_next", SIZES | HEAD, "qwen3_next with layers of linear_attention"),
        ("mamba", {}, "mamba with no attention"),
    ],
)
def test_a_model_that_continuous_batching_cannot_serve_is_refused_by_what_it_has(
    model_type: str, sizes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type, **sizes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"generators.engine must be vllm for this model.path .*{found}"):
        TransformersEngine(str(tmp_path), dtype="float32", max_model_len=64, max_sequences=8)


@pytest.mark.parametrize(
    ("model_type", "found"),
    [
        # Computes attention by itself, and sees all requests at once.
        ("bloom", r"bloom: log-probabilities [\d.]+ from those of its own forward pass"),
        # Asks for keys and values at the right place, and does something of its own with them.
        ("diffllama", "diffllama: log-probabilities .* from those of its own forward pass"),
        ("gpt_oss", "gpt_oss: ValueError: GptOssAttention asks its attention for s_aux"),
    ],
)
def test_a_model_whose_samples_are_not_those_of_its_own_forward_pass_is_refused(
    model_type: str, found: str, tmp_path: Path
) -> None:
    sizes = dict(num_local_experts=4) if model_type == "gpt_oss" else {}
    model = make_model_folder(Family(model_type, sizes), tmp_path / "model")
    engine = TransformersEngine(str(model), dtype="float32", max_model_len=64, max_sequences=8, kv_cache_mb=8)
    publisher = Publisher(tmp_path / "weights", "x")
    version = publisher.publish_version(0, whole_parts(load_file(model / "model.safetensors")))
    with pytest.raises(ValueError, match=f"generators.engine must be vllm for this model.path .*{found}"):
        engine.load_version(Snapshot(version))
    publisher.close()


# ---- weights


def test_weights_that_do_not_fit_the_model_are_refused_by_name(untied: TransformersRig) -> None:
    whole, held = untied.weights[0], untied.load_model(0)
    wrong: list[tuple[Weights, str]] = [
        (
            {key: tensor for key, tensor in whole.items() if "1.self_attn.k_proj" not in key},
            "not fill .*k_proj",
        ),
        ({key: tensor for key, tensor in whole.items() if key != "lm_head.weight"}, "not fill .*lm_head"),
        (whole | {"model.extra.weight": torch.zeros(3)}, "no place for .*model.extra.weight"),
        (
            whole | {"lm_head.weight": whole["lm_head.weight"][:-1].clone()},
            r"lm_head.* \(79, 64\), .* \(80, 64",
        ),
        (whole | {"model.norm.weight": whole["model.norm.weight"].bfloat16()}, "published as bfloat16"),
    ]
    for weights, message in wrong:
        untied._version += 2
        manifest = untied.publisher.publish_version(untied._version, whole_parts(weights))
        with pytest.raises(DigestMismatch, match=message):
            untied.engine.load_version(Snapshot(manifest))
        assert untied.engine.version == held.version
    assert untied.engine.held_digests(held) == {entry.name: entry.digest for entry in held.tensors}


def test_both_names_of_a_tied_tensor_may_be_published_with_the_same_bytes_alone(
    tied: TransformersRig,
) -> None:
    for add, message in ((0, ""), (1, "and .* were published with other bytes, and are one tensor here")):
        embedding, held = tied.weights[1]["model.embed_tokens.weight"], tied.load_model(0)
        tied._version += 2
        both = whole_parts(tied.weights[1] | {"lm_head.weight": embedding + add})
        manifest = tied.publisher.publish_version(tied._version, both)
        if not message:
            tied.engine.load_version(Snapshot(manifest))
            assert tied.engine.held_digests(manifest) == {e.name: e.digest for e in manifest.tensors}
            continue
        with pytest.raises(DigestMismatch, match=message):
            tied.engine.load_version(Snapshot(manifest))
        assert tied.engine.version == held.version


def test_weights_that_do_not_arrive_are_found_out_and_nothing_is_sampled(
    tied: TransformersRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied.load_model(0)
    copy = transformers_weights.copy_and_digest
    monkeypatch.setattr(tied.engine, "_map_weights", False)
    monkeypatch.setattr(
        transformers_weights,
        "copy_and_digest",
        lambda source, place: copy(source[:-1], place[:-1]) if len(source) == 80 else copy(source, place),
    )
    with pytest.raises(EngineMismatch, match="1 of 24 tensors in the engine .*: model.embed_tokens.weight"):
        tied.load_model(1)
    assert tied.engine.version is None
    with pytest.raises(AssertionError):
        tied.add_sample([2], 1, seed=0)
    monkeypatch.undo()
    after = tied.load_model(1)
    assert tied.engine.held_digests(after) == {entry.name: entry.digest for entry in after.tensors}


def test_weights_are_the_snapshots_own_memory_and_whole_without_its_file(untied: TransformersRig) -> None:
    manifest = untied.load_model(0)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if manifest.path in line]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
    for _, parameter in untied.engine._model.named_parameters():
        assert any(first <= parameter.data_ptr() < last for first, last in spans)
    Path(manifest.path).unlink()
    assert untied.engine.held_digests(manifest) == {entry.name: entry.digest for entry in manifest.tensors}


# ---- draws


def draw_tokens(draw: TokenDraw, samples: list[Sample], logits: torch.Tensor) -> list[DrawingSample]:
    """Draws a token for each sample from the same `logits` [vocabulary]."""
    draw._batch = [DrawingSample(sample, request_id=sample.id) for sample in samples]
    chosen = draw(logits.repeat(len(samples), 1), torch.empty(0))
    assert chosen.argmax(-1).tolist() == [drawing.tokens[0] for drawing in draw._batch]
    return draw._batch


def make_samples(count: int, **more: Any) -> list[Sample]:
    return [Sample(id=str(i), prompt=[0], max_tokens=1, seed=i, **more) for i in range(count)]


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    logits = 1.5 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    draw = TokenDraw(temperature=0.8, top_p=1.0, top_k=-1, min_p=0.0)
    drawn = draw_tokens(draw, make_samples(20_000), logits)
    shares = np.bincount([drawing.tokens[0] for drawing in drawn], minlength=40) / 20_000
    expected = (logits / 0.8).softmax(-1).numpy()
    assert (abs(shares - expected) < 4.5 * np.sqrt(expected / 20_000)).all()


def test_the_log_probabilities_are_those_of_the_truncated_distribution() -> None:
    logits = torch.tensor([0.5, 0.3, 0.12, 0.05, 0.03]).log()
    for sizes, kept in (
        (dict(top_p=0.85, top_k=-1, min_p=0.0), 3),
        (dict(top_p=1.0, top_k=2, min_p=0.0), 2),
        (dict(top_p=1.0, top_k=-1, min_p=0.09), 4),
        (dict(top_p=0.85, top_k=2, min_p=0.09), 2),
    ):
        draw = TokenDraw(temperature=1.0, **sizes)  # type: ignore[arg-type]
        expected = logits[:kept].log_softmax(-1)
        drawn = draw_tokens(draw, make_samples(300), logits)
        assert {drawing.tokens[0] for drawing in drawn} == set(range(kept))
        for drawing in drawn:
            assert drawing.logprobs[0] == pytest.approx(float(expected[drawing.tokens[0]]), abs=1e-6)
        whole = draw_tokens(draw, make_samples(300, forced=True), logits)
        assert {drawing.tokens[0] for drawing in whole} == set(range(5))
        [likeliest] = draw_tokens(draw, make_samples(1, greedy=True), logits)
        assert (likeliest.tokens, likeliest.logprobs) == ([0], [pytest.approx(float(logits[0]), abs=1e-6)])


def test_a_token_without_probability_is_never_drawn_even_at_the_end_of_the_sum() -> None:
    class AtTheEnd:
        def random(self) -> float:
            return 1 - 2**-53

    logits = torch.tensor([0.0, 1.0, float("-inf"), float("-inf")])
    draw = TokenDraw(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0)
    draw._batch = [DrawingSample(sample, request_id="0") for sample in make_samples(1)]
    draw._batch[0].random = AtTheEnd()  # type: ignore[assignment]
    draw(logits[None].clone(), torch.empty(0))
    assert draw._batch[0].tokens == [1]


# ---- the cache


def test_samples_that_are_pushed_out_of_a_full_cache_are_computed_again(
    make_rig: Callable[..., TransformersRig],
) -> None:
    """Two layers of 2 x 2 heads of 32 in float32 are 1 kB a token: 1 MB holds six of twelve sequences."""
    rig = make_rig(tied=True, end=None, kv_cache_mb=1)
    rig.load_model(0)
    samples = [rig.add_sample(prompt, 140, seed=i) for i, prompt in enumerate(make_prompts(12, length=20))]
    done, pushed_out = {}, 0
    while rig.engine.num_unfinished:
        done |= {completion.id: completion for completion in rig.engine.step()}
        waiting = rig.engine._batches.scheduler.waiting_requests.values()
        pushed_out += sum(state._true_initial_tokens > 0 for state in waiting)
    assert pushed_out, "no sample was pushed out: the test would say nothing"
    for sample in samples:
        completion = done[sample.id]
        assert len(completion.tokens) == len(completion.versions) == 140
        expected = rig.compute_logprobs(0, sample.prompt + completion.tokens[:-1])
        assert rig.find_difference(sample, completion, expected, 0, 140) < TOLERANCE
    # When all that run are aborted, those that were pushed out begin again.
    for i, prompt in enumerate(make_prompts(12, length=20)):
        rig.add_sample(prompt, 140, seed=i)
    scheduler = rig.engine._batches.scheduler
    while not scheduler.block_new_requests:
        rig.engine.step()
    active = {rig.engine._draw.running[request].sample.id for request in scheduler.active_requests}
    rig.engine.abort_samples(list(active))
    assert rig.finish_samples().keys() | active >= {f"s{i}" for i in range(13, 25)}


def test_too_small_a_cache_is_refused_with_the_numbers(tied: TransformersRig, tmp_path: Path) -> None:
    model = str(tied.publisher.folder.parent / "model")
    with pytest.raises(
        ValueError, match="kv_cache_mb must hold generators.max_model_len=2048 tokens, got 1: 1024 tokens"
    ):
        TransformersEngine(model, dtype="float32", max_model_len=2048, max_sequences=4, kv_cache_mb=1)


def test_a_model_whose_memory_cannot_be_counted_needs_the_size_of_its_cache_on_a_gpu(
    tied: TransformersRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tied.engine, "_config", AutoConfig.for_model("helium"))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30)
    )
    with pytest.raises(ValueError, match="generators.kv_cache_mb must be set on a GPU .*got helium"):
        tied.engine._count_kv_bytes(torch.device("cuda"), "bfloat16", None, None)


# ---- errors


def test_what_fails_in_the_library_ends_the_step_with_its_own_error_and_leaves_no_thread(
    make_rig: Callable[..., TransformersRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(tied=True, end=None)
    rig.load_model(0)
    threads = threading.active_count()
    rig.add_sample([2, 3], 5, seed=0)
    rig.engine.step()

    def fail(*_: Any, **__: Any) -> None:
        raise FloatingPointError("from within")

    monkeypatch.setattr(rig.engine._model, "forward", fail)
    with pytest.raises(FloatingPointError, match="from within"):
        rig.engine.step()
    assert threading.active_count() == threads


def test_a_sample_that_transformers_refuses_or_drops_is_an_error(
    make_rig: Callable[..., TransformersRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(tied=True, end=None)
    rig.load_model(0)
    running, refused = rig.add_sample([2, 3], 9, seed=0), None
    rig.engine.step()
    refused = rig.add_sample([4, 5], 9, seed=1)

    def refuse(kwargs: Any) -> None:
        raise TypeError("not of this kind")

    monkeypatch.setattr(rig.engine._batches.logit_processor, "check_kwargs", refuse)
    with pytest.raises(RuntimeError, match=f"ended sample {refused.id} .*: not of this kind"):
        rig.engine.step()
    rig = make_rig(tied=True, end=None)
    rig.load_model(0)
    running = rig.add_sample([2, 3], 9, seed=0)
    rig.engine.step()
    rig.engine._batches.scheduler.finish_request(rig.engine._running[running.id].request_id)
    with pytest.raises(RuntimeError, match="taken none of 1 samples into a batch"):
        rig.engine.step()


# ---- the configuration


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("generators.prefix_cache=true", "generators.prefix_cache must be false "),
        ("learner.moe.router_replay=true", "learner.moe.router_replay must be false "),
        ("sync.transport=nccl", "sync.transport must be one of auto, shared_memory, tcp, disk "),
        ("sync.transport=cuda_ipc", "sync.transport must be one of "),
        ("placement.mode=colocated", "placement.mode must be apart "),
    ],
)
def test_what_only_vllm_can_do_is_refused_by_name(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + ".*with generators.engine=transformers"):
        load_config(["generators.engine=transformers", setting])
