"""The tiny model that plays: its warm start are whole conversations of a weak player.

Supervised training stops as soon as games that the model plays itself bring TARGET on average. So
reinforcement learning begins with a policy that keeps to the form and loses most of its games.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from learners.text_game import TextGame
from learners.tiny import IGNORED, WARMUP, fit_batch, save_warm_model
from learners.tiny_seed import SEED_VARIABLE

BATCH, LEARNING_RATE, STEPS, TARGET = 64, 3e-3, 800, 0.20
LOOK_EVERY = 10
"""Steps between two measurements."""
NUM_GAMES = 256
"""Games of one measurement. A quarter of them is played first, and the others only where that promises
TARGET: a model that has learned little yet talks much, which takes long."""
MAX_REPLY = 16
"""Tokens of a reply in these games."""
MAX_LENGTH = 240
"""Tokens after which such a game is given up. The model knows 256 positions."""


def make_tiny_player(
    conversations: Iterator[list[str]],
    open_game: Callable[[int], TextGame],
    texts: list[str],
    seed: int,
    folder: Path,
) -> None:
    """Writes the model and its tokenizer into `folder`. The tokenizer learns its tokens from `texts`.

    `conversations` are the environment's texts and the replies by turns.
    """

    def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        _imitate_player(model, tokenizer, conversations, open_game)

    save_warm_model(texts, warm_start, seed, folder)


def _imitate_player(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Iterator[list[str]],
    open_game: Callable[[int], TextGame],
) -> None:
    """Fits the replies of the conversations until the model's own games bring TARGET."""
    reward = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("tiny model", total=TARGET)
        for step in range(STEPS):
            rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP)
            fit_batch(
                model, optimizer, rate, *encode_conversations(tokenizer, list(islice(conversations, BATCH)))
            )
            if step % LOOK_EVERY == LOOK_EVERY - 1:
                reward = _measure_reward(model, tokenizer, open_game, step * NUM_GAMES)
                progress.update(bar, completed=min(reward, TARGET))
                if reward >= TARGET:
                    return
    raise RuntimeError(
        f"the tiny model must reach a reward of {TARGET} after at most {STEPS} steps of imitation, got "
        f"{reward:.2f}: set another {SEED_VARIABLE}, or let the examples come from a better player"
    )


def _measure_reward(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    open_game: Callable[[int], TextGame],
    first: int,
) -> float:
    """Returns the mean reward of games from the number `first` on."""
    few = NUM_GAMES // 4
    reward = play_games(model, tokenizer, [open_game(first + number) for number in range(few)])
    if reward < TARGET / 2:
        return reward
    others = [open_game(first + number) for number in range(few, NUM_GAMES)]
    return (few * reward + len(others) * play_games(model, tokenizer, others)) / NUM_GAMES


def encode_conversations(
    tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Sequence[str]]
) -> tuple[Tensor, Tensor]:
    """Returns tokens [n, L], padded, and labels [n, L]: the replies' tokens and their ends, IGNORED
    elsewhere."""
    tokens, labels = list[list[int]](), list[list[int]]()
    for conversation in conversations:
        tokens.append([])
        labels.append([])
        for number, ids in enumerate(tokenizer(list(conversation))["input_ids"]):
            is_reply = number % 2 == 1
            ids = [*ids, tokenizer.eos_token_id] if is_reply else ids
            tokens[-1] += ids
            labels[-1] += ids if is_reply else [IGNORED] * len(ids)
    return _pad_rows(tokens, tokenizer.eos_token_id), _pad_rows(labels, IGNORED)


@torch.no_grad()
def play_games(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, games: Sequence[TextGame]
) -> float:
    """Plays all games to their ends, each reply sampled, and returns their mean reward."""
    held = [list(tokenizer(game.text)["input_ids"]) for game in games]
    live = list(range(len(games)))
    while live:
        replies = _sample_replies(model, [held[number] for number in live], tokenizer.eos_token_id)
        for number, reply in zip(live, replies, strict=True):
            games[number].take_reply(tokenizer.decode(reply, skip_special_tokens=True))
            held[number] += [*reply, *tokenizer(games[number].text)["input_ids"]]
        live = [number for number in live if not games[number].is_done and len(held[number]) <= MAX_LENGTH]
    return statistics.fmean(game.reward for game in games)


def _sample_replies(model: Qwen3ForCausalLM, prompts: Sequence[list[int]], end: int) -> list[list[int]]:
    """Returns a reply to each prompt, its end token included where it was sampled."""
    replies = [list[int]() for _ in prompts]
    live = list(range(len(prompts)))
    for _ in range(MAX_REPLY):
        rows = [prompts[number] + replies[number] for number in live]
        last = torch.tensor([len(row) - 1 for row in rows])
        hidden = model.model(input_ids=_pad_rows(rows, end), use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[torch.arange(len(rows)), last])
        sampled = torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()
        for number, token in zip(live, sampled, strict=True):
            replies[number].append(token)
        live = [number for number in live if replies[number][-1] != end]
        if not live:
            break
    return replies


def _pad_rows(rows: Sequence[list[int]], value: int) -> Tensor:
    """Returns [n, L]. What is behind a row's end is `value`; causal attention never looks there."""
    length = max(map(len, rows))
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])
