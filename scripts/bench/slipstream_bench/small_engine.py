"""An engine for models of a few hundred thousand parameters: a whole forward pass for each token, in plain
PyTorch.

It samples from the weights that were published, and so it passes the parity probe, but it starts in a moment.
vLLM takes longer to start than most faults of `chaos_run.py` last.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from generators.engine import Completion, Sample
from sync.digest import tensor_digest
from sync.snapshot import Snapshot
from sync.weight_source import WeightSource, load_attested

STEP_S = 0.03
"""Seconds that a step takes at least: a pace that leaves the processors to the roles that are tried."""


@dataclass(slots=True)
class DrawnSample:
    """A sample in the engine, with the tokens that it has so far."""

    sample: Sample
    random: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def make_completion(self, finish_reason: str) -> Completion:
        return Completion(
            id=self.sample.id,
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=finish_reason,
        )


class SmallEngine:
    """`generators.engine.Engine` on a Hugging Face model, for a CPU and float32."""

    def __init__(self, model: str, *, temperature: float, **_: Any) -> None:
        """Takes the arguments of `VllmEngine`, and leaves out what such a model has no use for."""
        torch.set_num_threads(1)
        self.version: int | None = None
        self._temperature = temperature
        config = AutoConfig.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        ends = GenerationConfig.from_pretrained(model).eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or [])
        self._running: dict[str, DrawnSample] = {}

    def add_sample(self, sample: Sample) -> None:
        assert self.version is not None, "load_version must be called before the first sample"
        self._running[sample.id] = DrawnSample(sample, torch.Generator().manual_seed(sample.seed % 2**63))

    def abort_samples(self, ids: list[str]) -> list[Completion]:
        return [self._running.pop(id).make_completion("abort") for id in ids if id in self._running]

    @torch.no_grad()
    def step(self) -> list[Completion]:
        if not self._running:
            return []
        began, running = time.monotonic(), list(self._running.values())
        rows = [[*drawn.sample.prompt, *drawn.tokens] for drawn in running]
        longest = max(map(len, rows))
        # Attention is causal, so what stands behind a row does not reach its last token.
        logits = self._model(
            input_ids=torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        ).logits
        for drawn, row, of_row in zip(running, rows, logits, strict=True):
            self._draw_token(drawn, of_row[len(row) - 1])
        finished = [drawn for drawn in running if self._name_end(drawn)]
        for drawn in finished:
            del self._running[drawn.sample.id]
        time.sleep(max(0.0, began + STEP_S - time.monotonic()))
        return [drawn.make_completion(self._name_end(drawn)) for drawn in finished]

    def _draw_token(self, drawn: DrawnSample, logits: torch.Tensor) -> None:
        sample, version = drawn.sample, self.version
        assert version is not None, "load_version must succeed before the next step"
        logprobs = (logits / (1.0 if sample.greedy else sample.temperature or self._temperature)).log_softmax(
            0
        )
        token = (
            logprobs.argmax() if sample.greedy else logprobs.exp().multinomial(1, generator=drawn.random)[0]
        )
        drawn.tokens.append(int(token))
        drawn.logprobs.append(float(logprobs[token]))
        drawn.versions.append(version)

    def _name_end(self, drawn: DrawnSample) -> str:
        """Returns why a sample ends here; empty where it goes on."""
        sample = drawn.sample
        if not sample.forced and drawn.tokens[-1] in self._ends | sample.stop_tokens:
            return "stop"
        return "length" if len(drawn.tokens) == sample.max_tokens else ""

    def count_sampled_tokens(self) -> dict[str, int]:
        return {id: len(drawn.tokens) for id, drawn in self._running.items()}

    def read_tokens(self, sample_id: str, start: int) -> list[int]:
        drawn = self._running.get(sample_id)
        return [] if drawn is None else drawn.tokens[start:]

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def load_version(self, source: WeightSource) -> None:
        # The transport that `chaos_run.py` uses brings snapshots, which ask for nothing but `load_snapshot`.
        load_attested(source, self)  # type: ignore[arg-type]
        self.version = source.manifest.version

    @torch.no_grad()
    def load_snapshot(self, snapshot: Snapshot) -> dict[str, str]:
        """Copies a snapshot; returns the digests of the parameters (`sync.snapshot.SnapshotLoader`)."""
        snapshot.attest()
        held = dict(self._model.named_parameters())
        for name, tensor in snapshot.named_tensors():
            held[name].copy_(tensor)
        return {name: tensor_digest(held[name]) for name, _ in snapshot.named_tensors()}

    def sleep(self, *, keep_weights: bool) -> None: ...

    def wake(self) -> None: ...

    def shutdown(self) -> None: ...


VllmEngine = SmallEngine
"""The name by which a generator looks for its engine (`witnessed_generators.py`)."""
