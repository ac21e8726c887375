"""The tiny model: a Qwen3 of 0.1 M parameters with its own tokenizer, so that everything runs on a laptop
without a hub.

Supervised training on solved questions warms it up, and stops as soon as a sampled answer is right four times
in ten. So reinforcement learning begins with a policy that is mostly wrong, and makes it mostly right on
questions that it never saw.

Its weights differ between processors, because rounding does, and SLIPSTREAM_TINY_SEED draws other initial
weights. The warm start ends at a measured score, so every such model begins a run at about the same reward.
"""

import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from learners.tiny_seed import SEED_VARIABLE

EOS = "<|end|>"
HIDDEN, LAYERS, VOCABULARY = 64, 2, 320
BATCH, LEARNING_RATE, WARMUP, STEPS, TARGET = 128, 3e-3, 20, 1500, 0.40
LOOK_EVERY = 5
"""Steps between two measurements of a sampled answer's reward."""
IGNORED = -100
"""Label of a token that is not trained, as torch's cross-entropy has it."""
WarmStart = Callable[[Qwen3ForCausalLM, PreTrainedTokenizerFast], None]


def make_tiny_model(solved: Iterator[tuple[str, str]], texts: list[str], seed: int, folder: Path) -> None:
    """Writes the model and its tokenizer into `folder`.

    `texts`: the questions that the tokenizer learns its tokens from.
    """
    save_warm_model(texts, lambda model, tokenizer: _warm_start(model, tokenizer, solved), seed, folder)


def save_warm_model(texts: list[str], warm_start: WarmStart, seed: int, folder: Path) -> None:
    """Makes a tokenizer from `texts` and a model with new weights, warms the model up, and writes both into
    `folder`."""
    print(f"Making the tiny model in {folder.parent}: once, about half a minute ...", file=sys.stderr)
    began, num_threads = time.monotonic(), torch.get_num_threads()
    # No operation here is large enough for two threads, and on a busy machine two would wait for each other.
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = _make_tokenizer(texts)
        model = _make_model(tokenizer.eos_token_id)
        warm_start(model, tokenizer)
    torch.set_num_threads(num_threads)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"The tiny model is ready ({time.monotonic() - began:.0f} s).", file=sys.stderr)


def _make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: it encodes any text; a digit and the space before it are one token, and so are the
    questions' phrases."""
    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r" ?\d"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS, pad_token=EOS, clean_up_tokenization_spaces=False
    )


def _make_model(eos: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            intermediate_size=2 * HIDDEN,
            tie_word_embeddings=False,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=eos,
            pad_token_id=eos,
        )
    )


def _warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, solved: Iterator[tuple[str, str]]
) -> None:
    """Fits right answers until a sampled answer's reward is TARGET, measured on questions that are not
    fitted."""
    check, score = _encode_pairs(tokenizer, list(islice(solved, 512))), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("tiny model", total=TARGET)
        for step in range(STEPS):
            rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP)
            fit_batch(model, optimizer, rate, *_encode_pairs(tokenizer, list(islice(solved, BATCH))))
            if step % LOOK_EVERY == LOOK_EVERY - 1:
                score = _measure_reward(model, *check)
                progress.update(bar, completed=min(score, TARGET))
                if score >= TARGET:
                    return
    raise RuntimeError(
        f"the tiny model must answer {TARGET} of the questions after at most {STEPS} steps, got {score:.2f}: "
        f"set another {SEED_VARIABLE}"
    )


def _encode_pairs(tokenizer: PreTrainedTokenizerFast, solved: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Returns tokens [n, L], padded, and labels [n, L]: the answer's tokens and the end, IGNORED
    elsewhere."""
    questions, answers = (tokenizer(list(texts))["input_ids"] for texts in zip(*solved, strict=True))
    pairs = [(q, [*a, tokenizer.eos_token_id]) for q, a in zip(questions, answers, strict=True)]
    length = max(len(q) + len(a) for q, a in pairs)
    tokens = [q + a + [tokenizer.eos_token_id] * (length - len(q) - len(a)) for q, a in pairs]
    labels = [[IGNORED] * len(q) + a + [IGNORED] * (length - len(q) - len(a)) for q, a in pairs]
    return torch.tensor(tokens), torch.tensor(labels)


def _compute_logprobs(model: Qwen3ForCausalLM, tokens: Tensor, labels: Tensor) -> Tensor:
    """Returns [n, L - 1] log-probabilities of the labels, 0 where the label is IGNORED."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
    return -F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="none").view(
        len(tokens), -1
    )


def fit_batch(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, rate: float, tokens: Tensor, labels: Tensor
) -> None:
    """Makes one step towards the labels."""
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    (-_compute_logprobs(model, tokens, labels).sum() / (labels != IGNORED).sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def _measure_reward(model: Qwen3ForCausalLM, tokens: Tensor, labels: Tensor) -> float:
    """Returns the probability that a sampled response is exactly the answer, on average."""
    return float(_compute_logprobs(model, tokens, labels).sum(1).exp().mean())
