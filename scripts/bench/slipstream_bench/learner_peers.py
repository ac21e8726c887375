"""Training steps that `benchmark_learner.py` compares ours with: a bare FSDP2 loop, padded steps, TRL's.

All of them take the same step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, Qwen3Config

from algos.advantages import grpo_advantages
from configs.learner import Attention
from learners.heads import chunked_logprobs
from learners.packing import Batch, Packed

ROWS = 8
"""Sequences of a padded microbatch, and of TRL's (its default)."""
GROUP = 8
"""Samples of a prompt."""
LR, BETAS, MAX_GRAD_NORM = 1e-6, (0.9, 0.99), 1.0

Step = Callable[[], tuple[float, float]]
"""Function that makes one update of all parameters; returns loss and gradient norm."""


def read_clock() -> float:
    """Returns seconds: the processor's with one thread on a CPU, otherwise the clock's after all GPU work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclass
class Work:
    """A model and the sequences of one step."""

    path: str
    batch: Batch
    budget: int
    cuda: bool = field(default_factory=torch.cuda.is_available)
    coefficients: Tensor = field(init=False)
    """[T] advantage over the number of sampled tokens, 0 where not sampled."""

    def __post_init__(self) -> None:
        batch = self.batch
        self.config = Qwen3Config.from_pretrained(self.path)
        self.attention = Attention.varlen if self.cuda else Attention.packed_sdpa
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.lengths = np.diff(batch.offsets).tolist()
        self.responses = torch.zeros(batch.num_sequences).index_add_(0, batch.sequence, batch.sampled.float())
        self.advantages = grpo_advantages(batch.rewards, batch.groups)
        self.coefficients = self.advantages[batch.sequence] * batch.sampled / batch.sampled.sum()

    def load_model(self, attention: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            self.path, dtype=torch.float32, attn_implementation=attention
        )
        return model.to(self.device)


class BarePolicy(nn.Module):
    """Causal LM whose forward pass returns the log-probabilities of the target tokens."""

    def __init__(self, model: Any, entropies: bool) -> None:
        super().__init__()
        self.model, self.head, self.entropies = model.model, model.lm_head, entropies

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor, lengths: dict[str, Any]) -> Tensor:
        hidden = self.model(
            tokens[None], position_ids=positions[None], use_cache=False, **lengths
        ).last_hidden_state[0]
        hidden, wanted = hidden[targets - 1], tokens[targets]
        if self.entropies:
            return chunked_logprobs(hidden, self.head.weight, None, wanted, 1.0)[0]
        logits = F.linear(hidden, self.head.weight).float()
        return logits.gather(-1, wanted[:, None])[:, 0] - logits.logsumexp(-1)


class BareLoop:
    """The shortest FSDP2 loop: no engine could do with less."""

    def __init__(
        self, work: Work, microbatches: Callable[[], Sequence[Packed]], entropies: bool = True
    ) -> None:
        self.work, self.microbatches = work, microbatches
        self.policy = BarePolicy(work.load_model(str(work.attention)).eval(), entropies)
        precision = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if work.cuda else MixedPrecisionPolicy()
        )
        for module in (*self.policy.model.layers, self.policy):
            fully_shard(module, mp_policy=precision, reshard_after_forward=True)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), LR, BETAS, weight_decay=0.0, fused=True)

    def __call__(self) -> tuple[float, float]:
        work, total, microbatches = self.work, 0.0, self.microbatches()
        for number, packed in enumerate(microbatches):
            self.policy.set_requires_gradient_sync(number == len(microbatches) - 1)
            ends, longest = packed.cu_seqlens.to(work.device), packed.max_seqlen
            lengths = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest)
            tokens, positions, at = (
                t.to(work.device) for t in (packed.tokens, packed.positions, packed.targets)
            )
            logprobs = self.policy(tokens, positions, at, lengths)
            coefficients = work.coefficients[packed.index][packed.targets].to(work.device)
            loss = -(coefficients * (logprobs - logprobs.detach()).exp()).sum()
            loss.backward()
            total += loss.item()
        norm = clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm.full_tensor().item()

    def measure_shares(self) -> dict[str, float]:
        """Takes one more step; returns the share of its time that each part took."""
        spent: dict[str, float] = {}
        now, since = "layers, forward", read_clock()

        def begin_part(name: str, *_: Any) -> None:
            nonlocal now, since
            spent[now] = spent.get(now, 0.0) + read_clock() - since
            now, since = name, read_clock()

        hooks = [
            self.policy.register_forward_pre_hook(partial(begin_part, "layers, forward")),
            self.policy.model.register_forward_hook(partial(begin_part, "head, forward")),
            self.policy.register_forward_hook(partial(begin_part, "backward")),
            self.optimizer.register_step_pre_hook(partial(begin_part, "optimizer")),
        ]
        self()
        begin_part("")
        for hook in hooks:
            hook.remove()
        return {name: seconds / sum(spent.values()) for name, seconds in spent.items()}


def make_padded_step(work: Work, by_microbatch: bool = False) -> Step:
    """Makes a padded step in plain PyTorch, as it is usually written."""
    model, batch = work.load_model("sdpa").eval(), work.batch
    optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS, weight_decay=0.0, fused=True)
    tokens, coefficients, mask = (
        nn.utils.rnn.pad_sequence(column.split(work.lengths), batch_first=True).to(work.device)
        for column in (
            batch.tokens.long(),
            work.coefficients,
            torch.ones_like(batch.tokens, dtype=torch.long),
        )
    )

    def step() -> tuple[float, float]:
        total = 0.0
        for part, ids, coefficient in zip(
            mask.split(ROWS), tokens.split(ROWS), coefficients.split(ROWS), strict=True
        ):
            longest = int(part.sum(-1).max()) if by_microbatch else part.shape[1]
            ids, part, coefficient = ids[:, :longest], part[:, :longest], coefficient[:, :longest]
            with torch.autocast(work.device.type, torch.bfloat16, enabled=work.cuda):
                logits = model(ids, attention_mask=part, use_cache=False).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            loss = -(coefficient[:, 1:] * (logprobs - logprobs.detach()).exp()).sum()
            loss.backward()
            total += loss.item()
        norm = clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.item()

    return step


def _pad_for_trl(work: Work) -> dict[str, Tensor]:
    """Makes the padded columns that TRL's trainer takes: prompts padded on the left, completions on the
    right."""
    batch = work.batch

    def pad_column(values: Tensor, sampled: bool) -> Tensor:
        chosen = values[batch.sampled == sampled]
        sizes = work.responses if sampled else torch.tensor(work.lengths) - work.responses
        parts = chosen.split(sizes.int().tolist())
        side = "right" if sampled else "left"
        return nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_side=side).to(work.device)

    tokens, ones = batch.tokens.long(), torch.ones_like(batch.tokens, dtype=torch.long)
    return {
        "prompt_ids": pad_column(tokens, sampled=False),
        "prompt_mask": pad_column(ones, sampled=False),
        "completion_ids": pad_column(tokens, sampled=True),
        "completion_mask": pad_column(ones, sampled=True),
        "advantages": work.advantages.to(work.device),
        "num_items_in_batch": work.responses.sum().to(work.device),
    }


def _make_trl_settings(work: Work) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=work.path,
        use_cpu=not work.cuda,
        bf16=work.cuda,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=work.batch.num_sequences // ROWS,
        num_generations=GROUP,
        loss_type="dapo",
        beta=0.0,
        learning_rate=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        optim="adamw_torch_fused",
    )


def make_trl_step(work: Work, compact: bool = False) -> Step:
    """Makes TRL's step: `GRPOTrainer` with given completions and its own loop over microbatches.

    It writes no logs and no files. `compact` asks its head for sampled tokens alone, as it does on a GPU.
    """
    import trl.trainer.utils as internals
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOTrainer

    num, given = work.batch.num_sequences, _pad_for_trl(work)

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
            return dict(given)

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, "x")), eos_token="x"
    )
    trainer: Any = Given(
        work.load_model("sdpa"), lambda prompts, **_: [0.0] * len(prompts), _make_trl_settings(work),
        Dataset.from_dict({"prompt": ["x"] * num}), processing_class=tokenizer,
    )  # fmt: skip
    trainer.create_optimizer()
    model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.current_gradient_accumulation_steps = num // ROWS
    # TRL scores all positions where it has no Triton; `compact` makes it believe that it has.
    scores_all = internals._use_triton

    def step() -> tuple[float, float]:
        internals._use_triton = (lambda device: True) if compact else scores_all
        total = sum(trainer.training_step(model, None, None).item() for _ in range(num // ROWS))
        norm = trainer._clip_grad_norm(model)
        trainer.optimizer.step()
        model.zero_grad()
        internals._use_triton = scores_all
        return total, float(norm)

    return step
