"""The FSDP2 engine beside the mathematics of one update (`test_same_numbers.py`): heads, dropout, dtypes,
shards."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_batches import SMALL, draw_batch, negate_logprobs, save_small_qwen3
from ranks import gather_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PhiConfig, PhiForCausalLM

from configs.learner import Attention
from configs.model import Dtype
from learners import heads
from learners.attention import choose_attention
from learners.fsdp import FsdpEngine
from learners.packing import Packed, pack_rows, pack_share
from sync.stream import collect_tensors

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def tied_with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("phi")
    PhiForCausalLM(
        PhiConfig(**SMALL, tie_word_embeddings=True, resid_pdrop=0.5, embd_pdrop=0.5)
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packed() -> list[Packed]:
    return pack_share(draw_batch([5, 9, 2, 30, 7, 1, 12, 4]), range(8), 40, 1, 0)


def test_logprobs_and_entropy_are_those_after_temperature(qwen3: Path, packed: list[Packed]) -> None:
    engine, seen = FsdpEngine(qwen3, temperature=0.7), []

    def record(logprobs: Tensor, entropy: Tensor, part: Packed) -> Tensor:
        seen.append((logprobs.detach(), entropy.detach(), part))
        return logprobs.sum()

    engine.update(packed, record, lr=0.0)
    model = AutoModelForCausalLM.from_pretrained(qwen3, attn_implementation="eager")
    for logprobs, entropy, part in seen:
        for start, end in zip(part.cu_seqlens.tolist(), part.cu_seqlens.tolist()[1:], strict=False):
            tokens = part.tokens[start:end]
            with torch.no_grad():
                expected = (model(tokens[None], use_cache=False).logits[0, :-1].double() / 0.7).log_softmax(
                    -1
                )
            picked = expected.gather(-1, tokens[1:, None])[:, 0]
            torch.testing.assert_close(logprobs[start + 1 : end].double(), picked, atol=1e-5, rtol=0)
            torch.testing.assert_close(
                entropy[start + 1 : end].double(), -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0
            )
            assert logprobs[start] == 0 and entropy[start] == 0


def test_entropy_carries_no_gradient(qwen3: Path, packed: list[Packed]) -> None:
    assert (
        FsdpEngine(qwen3).update(
            packed, lambda logprobs, entropy, part: entropy.sum() + 0 * logprobs.sum(), 1e-3
        )
        == 0
    )


def test_chunks_at_the_head_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, dtype=torch.float64, generator=rng) for shape in ((11, 8), (20, 8)))
    targets, upstream = torch.randint(0, 20, (11,), generator=rng), torch.randn(11, generator=rng)
    found = []
    for elements in (2**20, 3 * 20):
        monkeypatch.setattr(heads, "CHUNK_ELEMENTS", elements)
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = heads.chunked_logprobs(h, w, None, targets, 1.3)
        (logprobs * upstream).sum().backward()
        found.append((logprobs.detach(), entropy, h.grad, w.grad))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)  # the head adds up in float32


@pytest.mark.parametrize("elements", [2**20, 3 * 20])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_head_has_the_gradients_of_a_plain_log_softmax(
    elements: int, entropy_gradient: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", elements)
    rng = torch.Generator().manual_seed(0)
    hidden, weight, bias = (3 * torch.randn(shape, generator=rng) for shape in ((11, 8), (20, 8), (20,)))
    targets, upstream = torch.randint(0, 20, (11,), generator=rng), torch.randn(2, 11, generator=rng)
    found, expected = [], []
    for grads in (found, expected):
        h, w, b = (x.clone().double().requires_grad_() for x in (hidden, weight, bias))
        if grads is found:
            h, w, b = (x.detach().float().requires_grad_() for x in (h, w, b))
            logprobs, entropy = heads.chunked_logprobs(
                h, w, b if with_bias else None, targets, 0.7, entropy_gradient
            )
            assert entropy.requires_grad == entropy_gradient
        else:
            scores = ((h @ w.t() + (b if with_bias else 0)) / 0.7).log_softmax(-1)
            logprobs, entropy = scores.gather(-1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(-1)
        loss = (logprobs * upstream[0]).sum() + ((entropy * upstream[1]).sum() if entropy_gradient else 0)
        loss.backward()
        grads += [logprobs.detach(), entropy.detach(), h.grad, w.grad] + ([b.grad] if with_bias else [])
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), plain, atol=1e-4, rtol=1e-4)


def test_the_gradient_of_the_head_does_not_lose_digits_over_many_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 40 * 16)
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=rng).bfloat16() for shape in ((148 * 16, 8), (40, 8)))
    targets = torch.randint(0, 40, (len(hidden),), generator=rng)
    w, exact = weight.clone().requires_grad_(), weight.double().requires_grad_()
    heads.chunked_logprobs(hidden, w, None, targets, 1.0)[0].sum().backward()
    (hidden.double() @ exact.t()).log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    assert w.grad is not None and exact.grad is not None and w.grad.dtype == torch.bfloat16
    error = (w.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 0.004, "rounded once"


def test_a_forward_pass_before_an_update_leaves_no_stale_weights_behind(
    qwen3: Path, packed: list[Packed]
) -> None:
    looked, blind = FsdpEngine(qwen3), FsdpEngine(qwen3)
    for _ in range(2):
        looked.infer(packed)
        assert looked.update(packed, negate_logprobs, 1e-2) == blind.update(packed, negate_logprobs, 1e-2)
    assert all(map(torch.equal, looked.infer(packed), blind.infer(packed)))


@pytest.mark.parametrize("model", ["qwen3", "tied_with_dropout"])
def test_training_is_the_same_to_the_bit_each_time_and_dropout_is_off(
    model: str, packed: list[Packed], request: pytest.FixtureRequest
) -> None:
    folder, results = request.getfixturevalue(model), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        engine = FsdpEngine(folder)
        norms = [engine.update(packed, negate_logprobs, 1e-2) for _ in range(3)]
        results.append((norms, gather_weights(engine.stream_weights())))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


@pytest.mark.parametrize("model", ["qwen3", "tied_with_dropout"])
def test_weights_bear_the_names_and_values_of_the_model_file(
    model: str, request: pytest.FixtureRequest
) -> None:
    from safetensors.torch import load_file

    folder = request.getfixturevalue(model)
    stored, published = (
        load_file(folder / "model.safetensors"),
        collect_tensors(FsdpEngine(folder, dtype=Dtype.bfloat16).stream_weights()),
    )
    assert published.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name].to(torch.bfloat16)) for name, tensor in published.items())


def test_activation_checkpointing_changes_memory_and_not_the_numbers(
    tied_with_dropout: Path, packed: list[Packed]
) -> None:
    plain, thrifty = (FsdpEngine(tied_with_dropout, activation_checkpointing=on) for on in (False, True))
    calls = []
    layer = thrifty._model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    assert plain.update(packed, negate_logprobs, 1e-2) == pytest.approx(
        thrifty.update(packed, negate_logprobs, 1e-2), rel=1e-6
    )
    assert len(calls) == 2 * len(packed), "each layer must be computed again in the backward pass"
    expected = collect_tensors(plain.stream_weights())
    for name, tensor in collect_tensors(thrifty.stream_weights()).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    "attention",
    [
        Attention.packed_sdpa,
        pytest.param(Attention.varlen, marks=[pytest.mark.gpu, ON_GPU]),
        pytest.param(Attention.flash_attention_2, marks=[pytest.mark.gpu, ON_GPU]),
    ],
)
def test_packed_sequences_cannot_see_each_other(attention: Attention, qwen3: Path) -> None:
    """Anything may stand in one of them: also in those before, which a causal mask alone would show."""
    dtype = Dtype.float32 if attention is Attention.packed_sdpa else Dtype.bfloat16
    engine, batch = FsdpEngine(qwen3, attention=attention, dtype=dtype), draw_batch([7, 12, 1, 20, 9])
    (before,) = engine.infer([pack_rows(batch, range(5))])
    for changed in range(5):
        tokens, place = batch.tokens.clone(), slice(batch.offsets[changed], batch.offsets[changed + 1])
        tokens[place] = (tokens[place] + 1) % 48
        (after,) = engine.infer([pack_rows(replace(batch, tokens=tokens), range(5))])
        others = torch.arange(len(tokens))
        outside = (others < place.start) | (others >= place.stop)
        assert torch.equal(after[outside], before[outside])
        assert len(tokens[place]) == 1 or not torch.equal(after[~outside], before[~outside])


def test_a_kernel_that_cannot_run_here_is_refused_at_the_start(qwen3: Path) -> None:
    with pytest.raises(
        ValueError, match="learner.attention must be auto or packed_sdpa .* got varlen on cpu"
    ):
        FsdpEngine(qwen3, attention=Attention.varlen)
    gpu = torch.device("cuda")
    assert choose_attention(Attention.auto, gpu, Dtype.float32) is Attention.packed_sdpa
    assert choose_attention(Attention.auto, gpu, Dtype.bfloat16) is not Attention.packed_sdpa


def test_a_checkpoint_holds_nothing_but_safetensors(
    qwen3: Path, packed: list[Packed], tmp_path: Path
) -> None:
    engine = FsdpEngine(qwen3)
    engine.update(packed, negate_logprobs, 1e-2)
    engine.copy_state()(tmp_path / "engine")
    assert {path.suffix for path in (tmp_path / "engine").rglob("*") if path.is_file()} == {".safetensors"}
