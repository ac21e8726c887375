"""Mixtures of experts in the real engine: what a learner publishes is what vLLM's kernels read and sample
from.

One engine and one learner's weights a family; a Hugging Face forward pass of what was published is the judge.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import make_sampled_batch
from ranks import gather_weights, on_ranks
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from generators.engine import Completion, Sample
from learners.fsdp import FsdpEngine
from learners.packing import Batch, pack_rows
from learners.world import World
from sync.experts import find_element_places
from sync.manifest import DigestMismatch, Manifest
from sync.publisher import Publisher
from sync.snapshot import Snapshot
from sync.stream import whole_parts

Weights = dict[str, torch.Tensor]

TOLERANCE = 1e-4
"""Largest difference to Hugging Face's float32 log-probabilities; wrong experts or a wrong order of them
differ by more than 0.1."""
SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=False,
)
MIXTURES: dict[str, dict[str, Any]] = {
    # 24 is no multiple of what vLLM's CPU kernel takes: it pads
    "qwen3_moe": dict(
        head_dim=32, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "mixtral": dict(head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    # the sizes of latent attention are the only ones that vLLM's CPU kernel has
    "deepseek_v3": dict(
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def make_model(family: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | MIXTURES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    model.save_pretrained(folder)


def make_lesson() -> Batch:
    return make_sampled_batch([12, 12], torch.arange(2, 26))


def publish_mixtures(world: World, folder: Path) -> dict[str, list[Weights]]:
    """By family, what the learner publishes before and after three updates, and what it would publish in
    bfloat16."""
    found = {}
    for family in MIXTURES:
        engine = FsdpEngine(folder / family)
        weights = [gather_weights(engine.stream_weights())]
        for _ in range(3):
            engine.update(
                [pack_rows(make_lesson(), [0, 1])],
                lambda logprobs, entropy, packed: -logprobs.sum() / 48,
                1e-2,
            )
        found[family] = [*weights, gather_weights(engine.stream_weights())]
        engine._publish_dtype = torch.bfloat16
        found[family].append(gather_weights(engine.stream_weights()))
    return found


class MixtureRig:
    """An engine and the publisher that it pulls from; version v has the learner's weights v % 2."""

    def __init__(self, family: str, folder: Path, learner: list[Weights]) -> None:
        from generators.vllm_engine import VllmEngine

        self.family, self.learner, self._version = family, learner, -1
        self.models = []
        for number, weights in enumerate(learner[:2]):
            copy = folder / f"weights-{number}"
            AutoConfig.from_pretrained(folder / family).save_pretrained(copy)
            save_file(weights, copy / "model.safetensors", {"format": "pt"})
            self.models.append(AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval())
        arguments = {"dtype": "float32", "max_model_len": 160, "max_sequences": 32, "kv_cache_mb": 16}
        self.engine = VllmEngine(str(folder / family), record_experts=True, **arguments)
        self.publisher = Publisher(folder / f"published-{family}", "x")

    def load(self, number: int, weights: Weights | None = None) -> Manifest:
        self._version += 1 + (self._version + 1 - number) % 2
        manifest = self.publisher.publish_version(self._version, whole_parts(weights or self.learner[number]))
        self.engine.load_version(Snapshot(manifest))
        return manifest

    def parameters(self) -> Weights:
        core: Any = self.engine._core
        model = core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
        return {name: parameter.data for name, parameter in model.named_parameters()}

    def find_wrong(self, manifest: Manifest) -> list[str]:
        """The tensors that the engine does not hold as published."""
        held = self.engine.held_digests(manifest)
        return [entry.name for entry in manifest.tensors if held[entry.name] != entry.digest]


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], MixtureRig]]:
    set_num_threads, disabled = torch.set_num_threads, torch._dynamo.config.disable
    folder = tmp_path_factory.mktemp("mixtures")
    for family in MIXTURES:
        make_model(family, folder / family)
    learner = on_ranks(2, publish_mixtures, folder / "ranks", folder)[0]
    made: dict[str, MixtureRig] = {}

    def rig(family: str) -> MixtureRig:
        if family not in made:
            made[family] = MixtureRig(family, folder, learner[family])
        return made[family]

    yield rig
    for one in made.values():
        one.engine.shutdown()
        one.publisher.close()
    torch.set_num_threads, torch._dynamo.config.disable = set_num_threads, disabled


def compute_logprobs(model: Any, tokens: list[int], cache: DynamicCache | None = None) -> torch.Tensor:
    """[n, vocabulary] of what follows each token, the cache's tokens before them."""
    return compute_routing(model, tokens, cache)[0]


def compute_routing(
    model: Any, tokens: list[int], cache: DynamicCache | None = None
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """(log-probabilities, [n, k] experts of each token in ascending order, by layer)."""
    chosen: dict[int, torch.Tensor] = {}

    def keep(layer: int, outputs: Any) -> None:
        chosen[layer] = outputs[2].sort(-1).values

    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda module, inputs, outputs, number=number: keep(number, outputs)
        )
        for number, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None)
    for hook in hooks:
        hook.remove()
    return out.logits[0].log_softmax(-1), chosen


def find_difference(expected: torch.Tensor, completion: Completion, first: int, last: int) -> float:
    """Largest difference of the sampled tokens first .. last - 1; `expected` ends with the last one's."""
    tokens, held = torch.tensor(completion.tokens[first:last]), torch.tensor(completion.logprobs[first:last])
    return float((held - expected[-len(tokens) :].gather(1, tokens[:, None])[:, 0]).abs().max())


@pytest.mark.timeout(300)  # the first imports vLLM, and waits for the learner
@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_is_sampled_from_as_published_attested_updated_in_flight_and_its_routing_recorded(
    family: str, rigs: Callable[[str], MixtureRig]
) -> None:
    rig = rigs(family)
    before = rig.load(0)
    assert rig.find_wrong(before) == []
    samples = [
        Sample(id=f"{i}", prompt=list(range(5 + i, 17 + i)), max_tokens=20, seed=i, greedy=False)
        for i in range(6)
    ]
    for sample in samples:
        rig.engine.add_sample(sample)
    for _ in range(10):
        assert rig.engine.step() == []
    after = rig.load(1)
    assert rig.find_wrong(after) == []
    done: dict[str, Completion] = {}
    while rig.engine.num_unfinished:
        done |= {completion.id: completion for completion in rig.engine.step()}
    for sample in samples:
        completion = done[sample.id]
        assert completion.versions == [before.version] * 10 + [after.version] * 10
        tokens, until = sample.prompt + completion.tokens, len(sample.prompt) + 9
        cache = DynamicCache()
        old, chosen = compute_routing(rig.models[0], tokens[:until], cache)
        mixed, chosen_after = compute_routing(rig.models[1], tokens[until:-1], cache)
        assert completion.experts is not None and len(completion.experts) == len(tokens)
        recorded = torch.from_numpy(completion.experts).view(len(tokens), 2, 2).sort(-1).values
        for layer in chosen:
            assert torch.equal(recorded[:-1, layer].long(), torch.cat([chosen[layer], chosen_after[layer]]))
        assert (recorded[-1] == -1).all(), "the last token went into no layer"
        assert find_difference(old, completion, 0, 10) < TOLERANCE
        assert find_difference(mixed, completion, 10, 20) < TOLERANCE
        assert find_difference(compute_logprobs(rig.models[0], tokens[:-1]), completion, 10, 20) > 0.1


@pytest.mark.parametrize("family", MIXTURES)
def test_one_changed_number_of_an_expert_changes_the_digest_of_its_tensor_alone(
    family: str, rigs: Callable[[str], MixtureRig]
) -> None:
    rig = rigs(family)
    manifest = rig.load(0)
    assert all(
        len(found) == 1
        for found in (change_element(rig, manifest, leaf) for leaf in ("w13_weight", "w2_weight"))
    )
    rig.load(0)
    assert rig.find_wrong(manifest) == []


def change_element(rig: MixtureRig, manifest: Manifest, leaf: str) -> list[str]:
    parameter = next(
        data for name, data in rig.parameters().items() if "layers.1" in name and name.endswith(leaf)
    )
    place = parameter[2].nonzero()[0]  # what is zero may be padding
    parameter[(2, *place)] += 1e-3
    wrong = rig.find_wrong(manifest)
    parameter[(2, *place)] -= 1e-3
    assert all(".experts.2." in name for name in wrong)
    return wrong


def test_a_routers_correction_bias_is_published_in_float32_taken_up_and_attested(
    rigs: Callable[[str], MixtureRig],
) -> None:
    rig = rigs("deepseek_v3")
    assert {weights[BIAS].dtype for weights in rig.learner} == {torch.float32}
    assert {tensor.dtype for name, tensor in rig.learner[2].items() if name != BIAS} == {torch.bfloat16}
    manifest = rig.load(0)
    torch.testing.assert_close(rig.parameters()[BIAS], rig.learner[0][BIAS], atol=0, rtol=0)
    rig.load(0, rig.learner[0] | {BIAS: -rig.learner[0][BIAS]})
    assert rig.find_wrong(manifest) == [BIAS]
    with pytest.raises(DigestMismatch, match="does not fill parameters of the engine"):
        rig.load(0, {name: tensor for name, tensor in rig.learner[0].items() if name != BIAS})
    rig.load(0)


def test_what_latent_attention_derives_of_a_matrix_is_attested_with_it(
    rigs: Callable[[str], MixtureRig],
) -> None:
    rig = rigs("deepseek_v3")
    manifest = rig.load(0)
    for derived in ("W_UK_T", "W_UV"):
        [name] = [name for name in rig.parameters() if "layers.1" in name and name.endswith(derived)]
        stale = rig.parameters()[name].clone()
        stale[0, 0, 0] += 1
        core: Any = rig.engine._core
        model = core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
        dict(model.named_parameters())[name].data = stale
        assert rig.find_wrong(manifest) == ["model.layers.1.self_attn.kv_b_proj.weight"]
        manifest = rig.load(0)
        assert rig.find_wrong(manifest) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernels_order_of_elements_is_found_and_anything_but_an_order_is_refused(
    dtype: torch.dtype,
) -> None:
    rows, columns = 320, 300  # more elements than a bfloat16's 16 bits can number
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0))

    def pack(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.view(-1)[order].view(1, rows, columns)

    matrix = torch.randn(rows, columns).to(dtype)
    places = find_element_places(rows, columns, dtype, pack)
    assert torch.equal(pack(matrix[None]).view(-1)[places], matrix)
    with pytest.raises(
        RuntimeError, match="must keep experts as a new order of their elements, got another form for"
    ):
        find_element_places(rows, columns, dtype, lambda matrix: matrix.clamp(max=0))
