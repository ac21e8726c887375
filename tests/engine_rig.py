"""A small engine, the publisher that it pulls from, and the Hugging Face models that judge its numbers."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from generators.engine import Completion, Sample
from sync.manifest import Manifest
from sync.publisher import Publisher
from sync.snapshot import Snapshot
from sync.stream import whole_parts

VOCAB, END = 80, 1
TOLERANCE = 5e-5
"""Largest difference to Hugging Face's float32 log-probabilities; wrong weights or KV differ by more than
0.1."""

Weights = dict[str, torch.Tensor]


def make_model(tied: bool, seed: int, end: int | None) -> Qwen3ForCausalLM:
    """Makes a small Qwen3 whose weights are large enough that any mistake shows."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            # The least that vLLM has a CPU kernel for.
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=0,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
    return model


class EngineRig:
    """An engine, the publisher it pulls from, and two models: version v has the weights of model v % 2."""

    def __init__(self, folder: Path, tied: bool, end: int | None, **arguments: Any) -> None:
        self.temperature = arguments.get("temperature", 1.0)
        self.models = [make_model(tied, seed, end) for seed in (0, 1)]
        self.models[0].save_pretrained(folder / "model")
        # A file does not hold every name of the state: not that of a tied head.
        names = load_file(folder / "model" / "model.safetensors")
        self.weights: list[Weights] = [
            {name: model.state_dict()[name] for name in names} for model in self.models
        ]
        sizes = {"dtype": "float32", "max_model_len": 160, "max_sequences": 32, "kv_cache_mb": 16}
        self.engine: Any = self.open_engine(str(folder / "model"), **sizes | arguments)
        self.publisher = Publisher(folder / "weights", "x")
        self._version = -1
        self._num_samples = 0

    def open_engine(self, model: str, **arguments: Any) -> Any:
        raise NotImplementedError

    def publish_model(self, model: int) -> Manifest:
        """Publishes this model's weights as the next version of its parity."""
        self._version += 1 + (self._version + 1 - model) % 2
        return self.publisher.publish_version(self._version, whole_parts(self.weights[model]))

    def load_model(self, model: int) -> Manifest:
        manifest = self.publish_model(model)
        self.engine.load_version(Snapshot(manifest))
        return manifest

    def add_sample(self, prompt: list[int], max_tokens: int, seed: int, greedy: bool = False) -> Sample:
        self._num_samples += 1
        sample = Sample(
            id=f"s{self._num_samples}", prompt=prompt, max_tokens=max_tokens, seed=seed, greedy=greedy
        )
        self.engine.add_sample(sample)
        return sample

    def finish_samples(self) -> dict[str, Completion]:
        done = {}
        while self.engine.num_unfinished:
            done |= {completion.id: completion for completion in self.engine.step()}
        return done

    def compute_logprobs(
        self, model: int, tokens: list[int], cache: DynamicCache | None = None
    ) -> torch.Tensor:
        """Returns [n, VOCAB] log-probabilities of what follows each token. The tokens in the cache precede
        them."""
        with torch.no_grad():
            logits = self.models[model](
                torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None
            ).logits
        return (logits[0] / self.temperature).log_softmax(-1)

    def find_difference(
        self, sample: Sample, completion: Completion, expected: torch.Tensor, first: int, last: int
    ) -> float:
        """Returns the largest |engine - expected| over the sampled tokens first .. last - 1. The rows of
        `expected` end with the last token's."""
        tokens = torch.tensor(completion.tokens[first:last])
        held = torch.tensor(completion.logprobs[first:last])
        return (held - expected[-len(tokens) :].gather(1, tokens[:, None])[:, 0]).abs().max().item()


class VllmRig(EngineRig):
    def open_engine(self, model: str, **arguments: Any) -> Any:
        from generators.vllm_engine import VllmEngine

        return VllmEngine(model, **arguments)


class TransformersRig(EngineRig):
    def open_engine(self, model: str, **arguments: Any) -> Any:
        from generators.transformers_engine import TransformersEngine

        return TransformersEngine(model, **arguments)


def make_prompts(count: int, length: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(2, VOCAB, (count, length), generator=generator).tolist()
