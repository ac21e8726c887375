"""Checks of engines and learners: at small size, against Hugging Face's eager attention in float32."""

import multiprocessing as mp
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.check_machine import NotHere, count_gpus

LENGTHS = (64, 33, 17, 9, 2)
"""Tokens of the sequences that are sampled and trained here."""


def make_model(folder: Path) -> Path:
    """A small Qwen3 whose weights are drawn from a seed, and large enough that a mistake shows."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    seed = torch.Generator().manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=128, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=seed)
        drawn = 1 + 0.1 * drawn if parameter.dim() == 1 else drawn / parameter.shape[1] ** 0.5
        parameter.data = drawn.bfloat16().float()  # so that an engine in bfloat16 has the same
    model.save_pretrained(folder)
    return folder


def compute_reference(folder: Path, sequences: list[list[int]]) -> Any:
    """[T] log-probability of each token but a sequence's first (0), by Hugging Face's eager attention in
    float32, one sequence at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = []
    with torch.no_grad():
        for sequence in sequences:
            tokens = torch.tensor(sequence)
            scores = model(tokens[None], use_cache=False).logits[0].log_softmax(-1)
            found += [torch.zeros(1), scores[:-1].gather(-1, tokens[1:, None])[:, 0]]
    return torch.cat(found)


def must_agree(found: Any, expected: Any, dtype: str) -> str:
    """By the rule of a run's parity probe; returns the differences in words."""
    import torch

    from configs.model import Dtype
    from learners.parity import NUM_OUTLIERS, TOLERANCE, compare_logprobs, is_within_tolerance

    everything = torch.ones(len(found), dtype=torch.bool)
    values = compare_logprobs(found, expected, everything).values
    words = f"{dtype}, within {float(values[0]):.1e} of Hugging Face (mean {float(values.mean()):.1e})"
    if not is_within_tolerance(values, TOLERANCE[Dtype(dtype)], NUM_OUTLIERS if dtype == "bfloat16" else 0):
        raise RuntimeError(f"log-probabilities must agree within {TOLERANCE[Dtype(dtype)]:g}, got {words}")
    return words


def check_engine(dtype: str, kind: str = "vllm") -> str:
    """Lets an engine load a published version, attest it, and sample from it."""
    # fmt: off
    engine: Any
    if kind == "vllm":
        from generators.vllm_engine import VllmEngine as engine  # first: it sets what torch reads
    else:
        from generators.transformers_engine import TransformersEngine as engine

    import torch
    from safetensors.torch import load_file

    from generators.engine import Sample
    from sync.publisher import Publisher
    from sync.snapshot import Snapshot
    from sync.stream import whole_parts
    # fmt: on

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        fraction = 0.2 if torch.cuda.is_available() else None
        served = engine(
            str(model),
            dtype=dtype,
            max_model_len=max(LENGTHS),
            max_sequences=8,
            kv_cache_mb=16,
            gpu_memory_fraction=fraction,
        )
        weights = {n: t.to(getattr(torch, dtype)) for n, t in load_file(model / "model.safetensors").items()}
        publisher = Publisher(Path(folder) / "weights", "check")
        served.load_version(Snapshot(publisher.publish_version(0, whole_parts(weights))))
        prompts = [list(range(1, length - length // 2 + 1)) for length in LENGTHS]
        for place, (prompt, length) in enumerate(zip(prompts, LENGTHS, strict=True)):
            served.add_sample(
                Sample(id=str(place), prompt=prompt, max_tokens=length - len(prompt), seed=place, forced=True)
            )
        done: dict[int, Any] = {}
        while served.num_unfinished:
            done |= {int(completion.id): completion for completion in served.step()}
        publisher.close()
        sequences = [prompt + done[place].tokens for place, prompt in enumerate(prompts)]
        expected, starts, at = compute_reference(model, sequences), [], 0
        for place, sequence in enumerate(sequences):
            at += len(sequence)
            starts.append(expected[at - len(done[place].tokens) : at])
        found = torch.tensor([value for place in range(len(prompts)) for value in done[place].logprobs])
        return must_agree(found, torch.cat(starts), dtype)


@contextmanager
def process_group(folder: str, rank: int = 0, size: int = 1) -> Iterator[None]:
    """Joins a process group for the block: NCCL for tensors on GPUs, gloo for the others."""
    import torch
    import torch.distributed as dist

    kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(kind, store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_batch(sequences: list[list[int]]) -> Any:
    import numpy as np
    import torch

    from learners.packing import Batch

    count, total = len(sequences), sum(map(len, sequences))
    return Batch(
        tokens=torch.tensor(sum(sequences, [])).int(), sampled=torch.ones(total, dtype=torch.bool),
        behavior_logprobs=torch.zeros(total), versions=torch.zeros(total, dtype=torch.int32),
        offsets=np.cumsum([0, *map(len, sequences)]), rewards=torch.zeros(count), groups=torch.arange(count),
        group_weights=torch.ones(count), truncated=torch.zeros(count, dtype=torch.bool),
        greedy_rewards=torch.full((count,), float("nan")),
    )  # fmt: skip


def check_learner(
    dtype: str = "float32", *, kind: str = "fsdp", attention: str = "auto", compiled: bool = False,
    liger: bool = False, rank_of_adapters: int | None = None, rank: int = 0, size: int = 1,
    folder: str | None = None,
) -> str:  # fmt: skip
    """Computes log-probabilities of packed sequences with a learner's engine, and makes an update."""
    import torch

    from configs.learner import Attention
    from configs.model import Dtype
    from configs.parallel import FsdpConfig, LoraConfig
    from learners.packing import pack_share

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    with tempfile.TemporaryDirectory() as own:
        folder = folder or own
        model = make_model(Path(own) / "model")
        seed = torch.Generator().manual_seed(1)
        sequences = [torch.randint(1, 320, (length,), generator=seed).tolist() for length in LENGTHS]
        expected = compute_reference(model, sequences)
        with process_group(folder, rank, size):
            trained: Any
            if kind == "megatron":
                from learners.megatron.engine import MegatronEngine

                trained = MegatronEngine(model, dtype=Dtype(dtype))
            else:
                from learners.fsdp import FsdpEngine

                trained = FsdpEngine(
                    model, dtype=Dtype(dtype), attention=Attention(attention),
                    lora=LoraConfig(rank=rank_of_adapters), layout=FsdpConfig(compile=compiled, liger=liger),
                )  # fmt: skip
            batch = make_batch(sequences)
            packed = pack_share(batch, range(len(sequences)), 1000, trained.share.count, trained.share.index)
            logprobs = [part.to("cpu") for part in trained.infer(packed)]
            mine = torch.cat([part.index for part in packed])
            words = must_agree(torch.cat(logprobs), expected[mine], dtype)
            norm = trained.update(packed, lambda found, entropy, part: -found.sum() / 100, 1e-3)
            moved = torch.cat([part.to("cpu") for part in trained.infer(packed)]) - torch.cat(logprobs)
            total = float(moved.sum())
            if not (norm > 0 and (size > 1 or total > 0)):
                raise RuntimeError(
                    f"an update must make the tokens likelier, got a change of {total:g} (norm {norm:g})"
                )
    return words


def check_ranks() -> str:
    """Trains on two ranks that share a model; on GPUs, one each, by NCCL."""
    if count_gpus() == 1:
        raise NotHere("two ranks need two GPUs, or none")
    import learners.fsdp  # noqa: F401  # once for both; a GPU is looked at after the fork only

    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        both = [
            context.Process(target=partial(check_learner, rank=r, size=2, folder=folder)) for r in range(2)
        ]
        for process in both:
            process.start()
        for process in both:
            process.join()
        if codes := [process.exitcode for process in both if process.exitcode]:
            raise RuntimeError(f"a rank has ended with exit code {codes[0]}")
    return "two ranks, " + ("NCCL" if count_gpus() else "gloo")
