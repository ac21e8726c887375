"""Every sampled token of an episode stands in one branch, as the engine sampled it, behind its own prompt."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from generators.branches import EpisodeBranches, merge_experts
from generators.engine import Completion

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
"""Few different tokens, so that prompts begin alike by chance."""


def make_completion(tokens: list[int], turn: int) -> Completion:
    return Completion(
        id="1/0/0",
        tokens=tokens,
        logprobs=[-1.0 - turn - place / 100 for place in range(len(tokens))],
        versions=[turn + place for place in range(len(tokens))],
        finish_reason="stop" if turn % 2 else "length",
    )


@st.composite
def draw_turns(draw: st.DrawFn) -> list[tuple[list[int], Completion]]:
    """Turns whose prompts go on with an earlier turn, with another one than the last, or begin anew."""
    turns: list[tuple[list[int], Completion]] = []
    for number in range(draw(st.integers(1, 6))):
        prompt = draw(TOKENS)
        if turns and draw(st.booleans()):
            before, reply = draw(st.sampled_from(turns))
            prompt = before + reply.tokens + prompt
        turns.append((prompt, make_completion(draw(TOKENS), number)))
    return turns


def build_branches(turns: list[tuple[list[int], Completion]]) -> EpisodeBranches:
    branches = EpisodeBranches()
    for number, (prompt, completion) in enumerate(turns):
        branches.append_turn(prompt, completion, number)
    return branches


@settings(max_examples=300, deadline=None)
@given(draw_turns())
def test_every_turn_stands_once_behind_its_own_prompt(turns: list[tuple[list[int], Completion]]) -> None:
    episode = build_branches(turns)
    found = []
    for branch in episode.branches:
        lengths = {len(branch.tokens), len(branch.sampled), len(branch.logprobs), len(branch.versions)}
        assert lengths == {len(branch.turn)}
        last = [turn for turn in branch.turn if turn >= 0][-1]
        assert branch.finish_reason == turns[last][1].finish_reason
        for turn in sorted({turn for turn in branch.turn if turn >= 0}):
            prompt, completion = turns[turn]
            begin = branch.turn.index(turn)
            places = slice(begin, begin + len(completion.tokens))
            assert branch.tokens[:begin] == prompt
            assert branch.tokens[places] == completion.tokens
            assert branch.logprobs[places] == completion.logprobs
            assert branch.versions[places] == completion.versions
            assert branch.turn.count(turn) == len(completion.tokens)
            found.append(turn)
        context = [place for place, sampled in enumerate(branch.sampled) if not sampled]
        assert all(branch.turn[place] == branch.versions[place] == -1 for place in context)
        assert all(branch.logprobs[place] == 0 for place in context)
    assert sorted(found) == list(range(len(turns)))


@settings(max_examples=100, deadline=None)
@given(draw_turns(), st.data())
def test_rewards_stand_at_the_last_token_of_their_turn(
    turns: list[tuple[list[int], Completion]], data: st.DataObject
) -> None:
    episode = EpisodeBranches()
    rewards = [data.draw(st.integers(-3, 3)) for _ in turns]
    for number, (prompt, completion) in enumerate(turns):
        episode.append_turn(prompt, completion, number)
        episode.pay_last_turn(rewards[number])
    placed = episode.place_rewards()
    assert list(episode.turn_rewards.values()) == rewards
    if any(rewards[:-1]):
        assert sum(map(sum, placed)) == sum(rewards)
        for branch, token_rewards in zip(episode.branches, placed, strict=True):
            for turn in set(branch.turn) - {-1}:
                end = max(place for place, one in enumerate(branch.turn) if one == turn)
                assert token_rewards[end] == rewards[turn]
            assert np.count_nonzero(token_rewards) <= len(set(branch.turn) - {-1})
    else:
        assert placed == [[] for _ in episode.branches]


def test_a_turn_goes_on_with_the_longest_branch_and_a_rewritten_context_begins_one() -> None:
    episode = build_branches(
        [
            ([1], make_completion([2], 0)),
            ([1, 2, 3], make_completion([4], 1)),
            ([1], make_completion([2], 2)),
            ([1, 2, 3, 4, 5], make_completion([6], 3)),
            ([9, 2, 3, 4], make_completion([6], 4)),
        ]
    )
    assert [branch.tokens for branch in episode.branches] == [[1, 2, 3, 4, 5, 6], [1, 2], [9, 2, 3, 4, 6]]
    assert [branch.turn for branch in episode.branches] == [
        [-1, 0, -1, 1, -1, 3],
        [-1, 2],
        [-1, -1, -1, -1, 4],
    ]


def test_experts_of_a_sampled_token_stay_those_that_it_was_sampled_with() -> None:
    first = np.array([[1], [2], [-1]], np.int16)  # the last token has not gone into the model yet
    second = np.array([[7], [7], [3], [4], [-1]], np.int16)
    assert merge_experts(first, second).ravel().tolist() == [1, 2, 3, 4, -1]
    assert merge_experts(None, first) is first
