"""The environments and rewards of the recipes: what pays, by hand and against slow references."""

import itertools
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generators.environment import Message
from generators.environments.countdown import Problem, rate_form
from generators.environments.wordle import LETTERS, TRIES, WORDS, mark_guess
from generators.rewards.reversal import rate_reversal
from generators.tasks import load_task


def reply_with(text: str) -> Message:
    return {"role": "assistant", "content": text}


# ---- Wordle


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("eerie", "there", "YXYXG"),
        ("speed", "abide", "XXYXY"),
        ("allay", "llama", "YGYYX"),
        ("geese", "crane", "XXXXG"),
    ],
)
def test_a_letter_is_marked_as_often_as_the_word_has_it(guess: str, secret: str, marks: str) -> None:
    assert mark_guess(guess, secret) == marks


@settings(max_examples=200, deadline=None)
@given(*(st.text("abc", min_size=LETTERS, max_size=LETTERS) for _ in range(2)))
def test_marks_count_each_letter_at_most_as_often_as_guess_and_word_have_it(guess: str, secret: str) -> None:
    marks = mark_guess(guess, secret)
    assert [mark == "G" for mark in marks] == [a == b for a, b in zip(guess, secret, strict=True)]
    for letter in set(guess):
        marked = sum(mark != "X" for mark, one in zip(marks, guess, strict=True) if one == letter)
        assert marked == min(guess.count(letter), secret.count(letter))


def test_wordle_is_won_by_listening() -> None:
    """A player that keeps the words which fit all marks wins most games with the shipped words."""
    task, won = load_task("wordle", {}), 0.0
    for index in range(40):
        row = task.make_row("eval", index, 0)
        game = task.make_environment(row)
        turn, left = game.reset(row, 0), list(WORDS)
        while not turn.done:
            guess = left[len(left) // 2]
            turn = game.step(reply_with(f"Perhaps [{guess}]."))
            if turn.messages:
                letters, marks = turn.messages[0]["content"].split("\n")[:2]
                assert letters == " ".join(guess.upper())
                left = [word for word in left if mark_guess(guess, word) == marks.replace(" ", "")]
        won += turn.components["won"]
        assert turn.reward == 1.0 or turn.reward < 1.0 and not turn.components["won"]
    assert won >= 30


def test_a_reply_that_is_no_guess_costs_a_try_and_the_best_guess_counts_in_the_end() -> None:
    game = load_task("wordle", {}).make_environment({})
    game.reset({"answer": "table"}, 0)
    said = ["no idea", "[tables]", "[cable]", "[cable]", "[stone] and [table]"]
    answers = [game.step(reply_with(text)).messages[0]["content"] for text in said]
    assert [int(re.findall("([0-9]) guesses left", answer)[0]) for answer in answers] == [5, 4, 3, 2, 1]
    assert "square brackets" in answers[0] and "exactly 5 letters" in answers[1]
    assert "X G G G G" in answers[2] and "guessed 'cable' before" in answers[3]
    last = game.step(reply_with("[again]"))
    assert last.done and last.reward == 0.8 and last.components == {"won": 0.0, "tries": float(TRIES)}


def test_wordle_takes_the_words_of_a_file_and_names_the_one_that_is_none(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("crane\nSLATE\n\nadieu\n" + "\n".join(WORDS[:40]))
    known = {"crane", "slate", "adieu", *WORDS[:40]}
    task = load_task("wordle", {"words": str(words)})
    assert {task.make_row("train", index, 0)["answer"] for index in range(200)} <= known
    words.write_text("crane\nsun\n")
    with pytest.raises(ValueError, match="must hold words of 5 letters, got 'sun', word 2 of .*words.txt"):
        load_task("wordle", {"words": str(words)})


# ---- sorted names


def sort_slowly(names: list[str], by_first: bool) -> list[str]:
    """Sorts by inserting; a capital letter divides a name."""
    parts = {name: re.findall("[A-Z][a-z]*", name) for name in names}
    done: list[str] = []
    for name in names:
        place = sum(parts[other][not by_first] <= parts[name][not by_first] for other in done)
        done.insert(place, name)
    return done


@pytest.mark.parametrize("mistakes", [False, True])
def test_right_lists_pay_all_and_a_wrong_one_less(mistakes: bool) -> None:
    args = {"min_turns": 3, "max_turns": 3, "similarity_power": 8, "power_per_turn": False}
    task = load_task("alphabet_sort", args)
    for index in range(20):
        row = task.make_row("train", index, 0)
        talk = task.make_environment(row)
        turn, seen = talk.reset(row, index), list[str]()
        for number, new in enumerate(row["turns"]):
            question = turn.messages[0]["content"]
            shown = question.partition(": ")[2].partition("\n")[0].split(", ")
            assert sorted(shown) == sorted(new)
            by_first = "FIRST name" in question
            assert by_first == row["by_first"] != ("LAST name" in question)
            seen += new
            tag = "combined_alphabetical_sorted" if number else "alphabetical_sorted"
            lines = [
                f"{one} // new name!" if number and one in new else one for one in sort_slowly(seen, by_first)
            ]
            lines = lines[::-1] if mistakes and len(lines) > 1 else lines
            turn = talk.step(reply_with(f"Here:\n<{tag}>\n" + "\n".join(lines) + f"\n</{tag}>"))
        assert turn.done and (turn.reward == 1.0) != mistakes
        assert turn.components["perfect"] == float(not mistakes) and turn.components["similarity"] > 0.0
        assert turn.reward == pytest.approx(turn.components["similarity"] ** 8)


def test_of_several_lists_the_last_counts_and_only_where_each_is_better() -> None:
    row = {"turns": [["ZoeAdams", "BenDiaz"]], "by_first": False}
    right, wrong = "ZoeAdams\nBenDiaz", "ZoeAdams"
    for lists, pays in [
        ([right], True),
        ([wrong, right], True),
        ([right, wrong], False),
        ([right, right], False),
    ]:
        talk = load_task("alphabet_sort", {}).make_environment(row)
        talk.reset(row, 0)
        text = "".join(f"<alphabetical_sorted>{names}</alphabetical_sorted>" for names in lists)
        assert talk.step(reply_with(text)).reward == float(pays)


# ---- countdown


def test_every_countdown_problem_can_be_solved() -> None:
    task = load_task("countdown", {"max_numbers": 3})
    for index in range(10):
        row = task.make_row("eval", index, 0)
        signs = list(itertools.product("+-*/", repeat=2))
        answers = (
            form.format(a, b, c, *sign)
            for a, b, c in itertools.permutations(row["nums"])
            for sign in signs
            for form in ("({0}{3}{1}){4}{2}", "{0}{3}({1}{4}{2})")
        )
        problem = Problem()
        problem.reset(row, 0)
        replies = (f"<think>so</think>\n<answer>{answer}</answer>" for answer in answers)
        assert any(problem.step(reply_with(text)).reward == 1.0 for text in replies), row


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<think>3 * 4 - 2 = 10</think>\n<answer>3 * 4 - 2</answer>", 1.0),
        ("3 * 4 - 2 = 10</think>\n<answer> (3*4) - 2 </answer>", 1.0),
        ("<answer>3 * 4 - 2</answer>", 0.5),
        ("<think>hm</think>\n<answer>3 * 4 - 2 = 10</answer>", 0.25),
        ("<think>hm</think>\n<answer>3 + 4 + 2</answer>", 0.5),
        ("<think>hm</think>\n<answer>10</answer>", 0.5),
        ("<think>hm</think>\n<answer>3 * 4 - 2 + 2 - 2</answer>", 0.5),
        ("<think>hm</think>\n<answer>3 * 4 - 2</answer> Done.", 0.5),
        ("<think>hm<think></think>\n<answer>3 * 4 - 2</answer>", 0.5),
        ("<think>hm</think>\n<answer>4 / (3 - 3) * 2</answer>", 0.5),
        ("", 0.0),
    ],
)
def test_form_and_equation_pay_a_half_each(answer: str, reward: float) -> None:
    problem = Problem()
    problem.reset({"nums": [2, 3, 4], "target": 10}, 0)
    turn = problem.step(reply_with(answer))
    assert turn.done and turn.reward == reward


def test_the_form_of_a_long_reply_is_read_at_once() -> None:
    text = "<think>" + "<" * 50_000 + "</think>\n<answer>" + "1+" * 50_000
    assert rate_form(text) == 0.0


# ---- text backwards


def test_a_reversed_text_is_rated_by_its_likeness() -> None:
    row = {"prompt": "The cat sat."}
    assert rate_reversal(row, "<reversed_text>.tas tac ehT</reversed_text>") == 1.0
    assert (
        rate_reversal(
            {"prompt": [{"role": "user", "content": "ab"}]}, "<reversed_text>\nba\n</reversed_text>"
        )
        == 1.0
    )
    assert 0.0 < rate_reversal(row, "<reversed_text>.tas</reversed_text>") < 1.0
    assert rate_reversal(row, ".tas tac ehT") == 0.0
    drawn = " ".join(random.Random(0).choices(["a", "b", "ab"], k=50))
    assert rate_reversal({"prompt": drawn}, f"<reversed_text>{drawn[::-1]}</reversed_text>") == 1.0
