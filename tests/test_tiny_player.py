"""The tiny model that plays: what it imitates, how it plays, and where it is kept."""

import asyncio
import copy
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.episodes import EpisodesConfig
from configs.load import load_config
from generators.environment import Message, Row, Turn
from generators.rendering import choose_renderer
from generators.tasks import load_task
from generators.text_play import TextPlay, join_messages
from learners import tiny_cache, tiny_player
from learners.tiny import IGNORED
from slipstream import preparation

NAME = "guess_number"


class EchoGame:
    """An environment of a user's own: it says a word, and the policy says it again."""

    name = "echo"

    def __init__(self, patience: int = 1) -> None:
        self._patience = patience

    async def reset(self, row: Row, seed: int) -> Turn:
        self._word = "ab" if row["index"] % 2 else "ba"
        return Turn(messages=[{"role": "system", "content": "Say "}, {"role": "user", "content": self._word}])

    def step(self, reply: Message) -> Turn:
        self._patience -= 1
        said = float(reply["content"] == self._word)
        if said or not self._patience:
            return Turn(reward=said, done=True)
        return Turn(messages=[{"role": "user", "content": "again "}], reward=-0.25)

    def close(self) -> None:
        """Holds nothing."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, loop: asyncio.Runner) -> Iterator[Callable[..., Path]]:
    """Makes a tiny player with two steps only."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"STEPS": 2, "LOOK_EVERY": 2, "TARGET": 0.0, "NUM_GAMES": 8}.items():
            patch.setattr(tiny_player, name, value)

        def make_player(seed: str = "0", cache: Path = cache) -> Path:
            patch.setenv("SLIPSTREAM_TINY_SEED", seed)
            conversations = map(join_messages, load_task(NAME, {}).example_conversations("train", seed=0))
            return tiny_cache.prepare_tiny_player(
                conversations, lambda number: TextPlay(NAME, {}, number, 1, loop), cache
            )

        yield make_player


@pytest.fixture(scope="module")
def tokenizer(make: Callable[..., Path]) -> Any:
    return AutoTokenizer.from_pretrained(make())


@pytest.fixture(scope="module")
def model(make: Callable[..., Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(make())


def test_a_tiny_player_is_made_once_for_each_seed(make: Callable[..., Path]) -> None:
    zero, one, again = make("0"), make("1"), make("1")
    assert zero != one == again
    first, second = (load_file(folder / "model.safetensors") for folder in (zero, one))
    drawn = [name for name in first if "norm" not in name]
    assert all((first[name] - second[name]).abs().mean() > 0.01 for name in drawn), "they began elsewhere"


def test_a_tiny_player_that_does_not_learn_is_refused(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tiny_player, "TARGET", 0.9)
    message = "the tiny model must reach a reward of 0.9 after at most 2 steps of imitation, got 0.00"
    with pytest.raises(RuntimeError, match=message):
        make(cache=tmp_path)
    assert not list(tmp_path.glob("tiny-*")), "it is not kept"


def test_what_is_imitated_has_the_tokens_that_the_renderer_gives_the_engine(
    tokenizer: Any,
) -> None:
    renderer = choose_renderer(tokenizer, EpisodesConfig())
    for conversation in islice(load_task(NAME, {}).example_conversations("train", seed=3), 50):
        tokens, labels = tiny_player.encode_conversations(tokenizer, [join_messages(conversation)])
        held, sampled = renderer.render_first(conversation[:1], ()), list[int]()
        for number, message in enumerate(conversation[1:], start=1):
            if message["role"] == "assistant":
                reply = [*tokenizer.encode(message["content"]), tokenizer.eos_token_id]
                assert renderer.parse_reply(reply, "stop").message["content"] == message["content"]
                held, sampled = held + reply, sampled + reply
            else:
                extended = renderer.extend_prompt(held, conversation[number : number + 1], ())
                assert extended is not None
                held = extended
        assert tokens[0].tolist() == held
        assert labels[labels != IGNORED].tolist() == sampled
        assert torch.equal(tokens[labels != IGNORED], labels[labels != IGNORED])


def test_rows_of_a_batch_are_padded_behind_their_ends(tokenizer: Any) -> None:
    games = [["Guess:", "123"], ["Guess:", "123", "1 low:", "4"]]
    tokens, labels = tiny_player.encode_conversations(tokenizer, games)
    alone, alone_labels = tiny_player.encode_conversations(tokenizer, games[:1])
    length = alone.shape[1]
    assert tokens[0, :length].tolist() == alone[0].tolist()
    assert labels[0, :length].tolist() == alone_labels[0].tolist()
    assert set(labels[0, length:].tolist()) == {IGNORED} and length < tokens.shape[1]


def test_the_model_plays_as_the_task_says_and_a_game_without_end_is_given_up(
    model: Any, tokenizer: Any, loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a stand-in that repeats the first word of its own text."""
    seen: list[list[int]] = []

    def repeat_word(model: Any, prompts: list[list[int]], end: int) -> list[list[int]]:
        seen.extend(map(list, prompts))
        return [[*tokenizer.encode(tokenizer.decode(prompt)[4:6]), end] for prompt in prompts]

    monkeypatch.setattr(tiny_player, "_sample_replies", repeat_word)
    games = [TextPlay(f"{__name__}:EchoGame", {"patience": 3}, number, 0, loop) for number in range(4)]
    assert tiny_player.play_games(model, tokenizer, games) == 1.0
    assert {tokenizer.decode(prompt) for prompt in seen} == {"Say ab", "Say ba"}
    monkeypatch.setattr(tiny_player, "_sample_replies", lambda model, prompts, end: [[end] for _ in prompts])
    seldom = [TextPlay(f"{__name__}:EchoGame", {"patience": 2}, 0, 0, loop)]
    assert tiny_player.play_games(model, tokenizer, seldom) == -0.25
    endless = [TextPlay(f"{__name__}:EchoGame", {"patience": 10_000}, 0, 0, loop)]
    assert tiny_player.play_games(model, tokenizer, endless) < -1
    assert not endless[0].is_done


def test_replies_are_sampled_from_the_model_until_their_end(model: Any, tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        replies = tiny_player._sample_replies(model, [[5], [6, 7, 8]] * 200, end)
    assert all(len(reply) == tiny_player.MAX_REPLY or reply[-1] == end for reply in replies)
    assert all(end not in reply[:-1] for reply in replies)
    drawn = torch.tensor([token for reply in replies for token in reply])
    assert len(drawn.unique()) > 250, "all tokens are equally likely"


def test_messages_become_texts_by_turns() -> None:
    def say(role: str, content: str) -> Message:
        return {"role": role, "content": content}

    talk = [say("system", "a"), say("user", "b"), say("assistant", "c"), say("tool", "d"), say("user", "e")]
    assert join_messages([*talk, say("assistant", "f")]) == ["ab", "c", "de", "f"]
    assert join_messages(talk) == ["ab", "c"]
    assert join_messages([say("assistant", "c")]) == ["", "c"]


def test_a_task_without_examples_needs_a_model_folder() -> None:
    config = load_config(["task.name=gym_lock"])
    message = "model.path must be a folder for a task without solved questions .* task.name=gym_lock"
    with pytest.raises(ValueError, match=message):
        preparation.resolve_model(config)


@pytest.mark.whole_run
def test_the_player_of_the_number_game_wins_about_two_games_in_ten(loop: asyncio.Runner) -> None:
    folder = preparation.resolve_model(load_config([f"task.name={NAME}"]))
    assert re.fullmatch(r"tiny-\w+", folder.name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    games = [TextPlay(NAME, {}, number, 2, loop) for number in range(600)]
    assert 0.1 <= tiny_player.play_games(model, tokenizer, games) <= 0.35
