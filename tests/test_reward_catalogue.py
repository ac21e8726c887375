"""The built-in rewards beside slow references, and beside the rewards that other systems ship."""

import re
import string
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generators.environment import EpisodeRecord
from generators.rewards.answers import FINDERS, AnswerFinder
from generators.rewards.composition import PartFailed, make_reward
from generators.rewards.exact_match import normalize_words, read_number
from generators.rewards.length import share_repeated
from generators.rewards.structure import FormatPart

PIECES = ["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n", "<b>", "\\boxed{", "{", "}", "####"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def rate(use: str, row: dict, reply: str, **args: Any) -> float:
    return make_reward({"function": use, "args": args}).rate_reply(row, reply).reward


def rate_group(use: str, replies: Sequence[tuple[str, Sequence[int]]], **args: Any) -> list[float]:
    records = [
        EpisodeRecord(
            row={"prompt": "?"},
            messages=[{"role": "assistant", "content": text}],
            reward=0.0,
            components={},
            stop="completed",
            num_tokens=len(tokens),
            tokens=tokens,
        )
        for text, tokens in replies
    ]
    return [score.reward for score in make_reward({"function": use, "args": args}).score_group(records)]


# ---- finding an answer


def find_boxed_slowly(text: str) -> str | None:
    """Grows the last box until its braces are balanced."""
    start = text.rfind("\\boxed{")
    for end in range(start + 1, len(text) + 1):
        box = text[start:end]
        if start >= 0 and box.startswith("\\boxed{") and box.count("{") == box.count("}"):
            return box[len("\\boxed{") : -1]
    return None


@given(TEXTS)
def test_the_last_box_is_found_as_a_slow_search_finds_it(text: str) -> None:
    assert FINDERS["boxed"](text) == find_boxed_slowly(text)


@given(TEXTS)
def test_the_last_tag_is_found_as_a_regular_expression_finds_it(text: str) -> None:
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    assert FINDERS["answer_tag"](text) == (found[-1] if found else None)


@pytest.mark.parametrize(
    ("find", "reply", "answer"),
    [
        ("all", " 42\n", "42"),
        ("boxed", r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", None),
        ("answer_tag", "<answer>1</answer> no, <answer>\n2 </answer>", "2"),
        ("answer_tag", "<answer>1", None),
        ("hashes", "#### 1\nno\n#### 1,234\nbye", "1,234"),
        ("number", "It is 3, not $1,234.50.", "$1,234.50"),
        ("number", "none", None),
        (r"(?i)answer\s*:\s*([^\n]+)", "Answer: 3\nanswer: four\n", "four"),
    ],
)
def test_the_last_answer_of_a_reply_counts(find: str, reply: str, answer: str | None) -> None:
    assert AnswerFinder(find).find_answer(reply) == answer


def test_after_thinking_only_the_conclusion_counts() -> None:
    row = {"prompt": "2 + 2?", "answer": "4"}
    for use in ("math", "exact_match"):
        found = [rate(use, row, reply, after_thinking=True) for reply in ["5</think>4", "4</think>5", "4"]]
        assert found == [1.0, 0.0, 0.0]
    assert rate("math", row, "I think 5, so 4") == 1.0


# ---- exact match


def test_gsm8k_as_verl_scores_it() -> None:
    row = {"answer": "Half of 96 is 48.\n#### 1,048"}
    args = {"find": "hashes", "compare": "number"}
    replies = ["#### 1048", "#### 1,048.", "It is 1048", "#### 48", "#### 1 #### 2", ""]
    assert [rate("exact_match", row, reply, **args) for reply in replies] == [1, 1, 0, 0, 0, 0]


def test_search_answers_as_verl_scores_them() -> None:
    row = {"reward_model": {"ground_truth": {"target": ["The Beatles", "Beatles, the band"]}}}
    args = {"reference": "reward_model.ground_truth.target", "find": "answer_tag", "compare": "words"}
    replies = [
        "<answer>beatles!</answer>",
        "beatles",
        "<answer>a Beatles band</answer>",
        "<answer>x</answer>",
    ]
    assert [rate("exact_match", row, reply, **args) for reply in replies] == [1, 0, 1, 0]
    assert rate("exact_match", row, "<answer>I say Beatles</answer>", **args, contains=True) == 1.0
    with pytest.raises(PartFailed, match=r"a right answer must be a text or a number, .* got \{'target'"):
        rate("exact_match", row, "beatles", compare="words")


def normalize_words_slowly(text: str) -> str:
    """SQuAD's evaluation script, step by step."""
    lowered = "".join(character for character in text.lower() if character not in set(string.punctuation))
    without = re.sub(r"\b(a|an|the)\b", " ", lowered)
    return " ".join(without.split())


@given(st.text(alphabet="aAn theT.,!-é\n", max_size=30))
def test_words_are_compared_as_squads_script_does(text: str) -> None:
    assert normalize_words(text) == normalize_words_slowly(text)


@given(
    st.integers(-(10**12), 10**12),
    st.integers(0, 6),
    st.sampled_from(["{}", "${}", "{}%", "{}.", " {} ", "$ {}."]),
)
def test_a_number_is_the_same_however_it_is_written(digits: int, places: int, form: str) -> None:
    number = Decimal(digits).scaleb(-places)
    written = form.format(f"{number:,f}")
    assert Fraction(read_number(written) or 0) == Fraction(digits, 10**places)
    for other in (written, f"{number:f}", f"{number:.8f}"):
        assert rate("exact_match", {"answer": str(number)}, other, compare="number") == 1.0
    assert rate("exact_match", {"answer": str(number + 1)}, written, compare="number") == 0.0


@pytest.mark.parametrize("answer", ["nan", "Infinity", "1-2", "", "four", "1e"])
def test_what_is_no_number_equals_no_number(answer: str) -> None:
    assert read_number(answer) is None
    assert rate("exact_match", {"answer": 4}, answer, compare="number") == 0.0
    with pytest.raises(PartFailed, match="must have something to compare as number"):
        rate("exact_match", {"answer": answer}, "4", compare="number")


def test_a_right_answer_with_nothing_to_compare_is_left_out_unless_it_is_the_only_one() -> None:
    row = {"answer": ["Matt Johnson", "The The", "!!!"]}
    assert rate("exact_match", row, "matt johnson", compare="words") == 1.0
    assert rate("exact_match", row, "", compare="words") == 0.0
    assert rate("exact_match", row, "anyone", compare="words", contains=True) == 0.0
    with pytest.raises(PartFailed, match=r"something to compare as words, got \['The The'\]"):
        rate("exact_match", {"answer": "The The"}, "The The", compare="words")


def test_one_of_several_right_answers_is_enough() -> None:
    row = {"answer": ["4", "four"]}
    assert [rate("exact_match", row, reply) for reply in ["four", "4", " 4 ", "44"]] == [1, 1, 1, 0]
    assert [rate("math", {"answer": ["4", "5"]}, reply) for reply in ["5.0", "6"]] == [1, 0]
    with pytest.raises(PartFailed, match=r"must be a text or a number, .* got \[\]"):
        rate("math", {"answer": []}, "4")


# ---- form


def has_form_slowly(text: str, tags: Sequence[str], rest: bool, opened: bool) -> bool:
    """Reads the tags one after the other."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")][opened:]
    if any(text.count(mark) != 1 for mark in marks):
        return False
    for mark in marks:
        before, found, text = text.partition(mark)
        is_outside = not mark.startswith("</")
        if not found or (is_outside and before.strip()):
            return False
    return rest or not text.strip()


@settings(max_examples=400)
@given(
    TEXTS, st.sampled_from([["think", "answer"], ["think"], ["answer", "b"]]), st.booleans(), st.booleans()
)
def test_a_form_is_what_reading_tag_by_tag_finds(text: str, tags: list, rest: bool, opened: bool) -> None:
    part = FormatPart(tags, rest=rest, opened=opened)
    assert part.rate_reply({}, text).value == float(has_form_slowly(text, tags, rest, opened))


def test_open_r1s_and_trls_good_forms_are_good_here_too() -> None:
    both = "<think>\nHm.\n</think>\n<answer>\n4\n</answer>"
    assert rate("format", {}, both) == rate("format", {}, both, partial=True) == 1.0
    assert rate("format", {}, "<think>Hm.</think>4", tags=["think"], rest=True) == 1.0
    assert rate("format", {}, "Hm.</think>4", tags=["think"], rest=True, opened=True) == 1.0
    assert rate("format", {}, "<think>Hm.</think><answer>4", partial=True) == 0.75
    assert rate("format", {}, both + both, partial=True) == 0.0
    assert [rate("format", {}, text) for text in (both + "!", "4" + both, "</think><think>", "")] == [0] * 4


def test_a_long_reply_is_rated_in_one_pass() -> None:
    reply = "<think>" + "</answe " * 200_000 + " " * 200_000
    assert rate("format", {}, reply) == 0.0
    assert rate("format", {}, reply + "</think><answer></answer>") == 1.0
    assert rate("exact_match", {"answer": 4}, "<answer>" * 200_000, find="answer_tag") == 0.0


@pytest.mark.parametrize(
    ("args", "reply", "number"),
    [
        ({"pattern": r"\\boxed\{.*\}"}, r"so \boxed{4}", 1.0),
        ({"pattern": r"\d+"}, "four", 0.0),
        ({"pattern": r"\d+", "full": True}, "44", 1.0),
        ({"pattern": r"\d+", "full": True}, "44.", 0.0),
        ({"pattern": r"Step \d+:", "count": 3}, "Step 1: a\nStep 2: b", 2 / 3),
        ({"pattern": r"(?m)^- ", "count": 2}, "- a\n- b\n- c", 1.0),
    ],
)
def test_a_regular_expression_matches_somewhere_everywhere_or_so_often(
    args: dict, reply: str, number: float
) -> None:
    assert rate("regex", {}, reply, **args) == pytest.approx(number)


# ---- length and repetition


@given(
    st.lists(st.text("ab ", max_size=20), min_size=1, max_size=5),
    st.sampled_from(["tokens", "words", "characters"]),
    st.one_of(st.none(), st.integers(0, 8)),
    st.one_of(st.none(), st.integers(8, 16)),
    st.one_of(st.none(), st.floats(0.5, 10)),
)
def test_length_falls_linearly_beyond_its_bounds(
    texts: list[str], unit: str, least: int | None, most: int | None, falloff: float | None
) -> None:
    has_bounds = least is not None or most is not None
    args = {"unit": unit, "least": least, "most": most, "falloff": falloff if has_bounds else None}
    rewards = rate_group("length", [(text, range(len(text) // 2)) for text in texts], **args)
    for text, reward in zip(texts, rewards, strict=True):
        length = {"tokens": len(text) // 2, "words": len(text.split()), "characters": len(text)}[unit]
        if not has_bounds:
            assert reward == length
            continue
        low, high = least or 0, 1000 if most is None else most
        beyond = next(
            step for step in range(100) if low <= length + step <= high or low <= length - step <= high
        )
        wanted = (1.0 if beyond == 0 else 0.0) if falloff is None else max(0.0, 1 - beyond / falloff)
        assert reward == pytest.approx(wanted, abs=1e-9)


@given(st.lists(st.integers(0, 2), max_size=20), st.integers(1, 4))
def test_repetition_counts_each_ngram_that_has_been_there(tokens: list[int], ngram: int) -> None:
    ngrams = [tokens[i : i + ngram] for i in range(max(0, len(tokens) - ngram + 1))]
    again = sum(one in ngrams[:i] for i, one in enumerate(ngrams))
    assert share_repeated(tokens, ngram) == pytest.approx(again / len(ngrams) if ngrams else 0.0)


def test_repetition_reads_tokens_or_words() -> None:
    replies = [("a a a a a", [1, 2, 3, 4]), ("A b a B", [5, 5, 5, 5, 5])]
    assert rate_group("repetition", replies, ngram=2) == [0.0, 0.75]
    assert rate_group("repetition", replies, ngram=2, unit="words") == [0.75, pytest.approx(1 / 3)]
    assert make_reward({"function": "repetition"}).needs_tokens
    assert not make_reward({"function": "repetition", "args": {"unit": "words"}}).needs_tokens
    assert not make_reward({"function": "length"}).needs_tokens


def test_a_shorter_right_reply_is_worth_more_and_a_short_wrong_one_nothing() -> None:
    section = {
        "parts": [
            {"use": "exact_match"},
            {"use": "length", "only_if": "exact_match", "most": 2, "falloff": 4, "weight": 0.5},
        ]
    }
    parts, row = make_reward(section), {"answer": "4"}
    replies = [("4", 2), ("4", 4), ("4", 9), ("5", 1)]
    records = []
    for text, num_tokens in replies:
        score = parts.rate_reply(row, text)
        message = {"role": "assistant", "content": text}
        records.append(
            EpisodeRecord(
                row=row,
                messages=[message],
                reward=score.reward,
                components=score.components,
                stop="completed",
                num_tokens=num_tokens,
            )
        )
    assert [score.reward for score in parts.score_group(records)] == [1.5, 1.25, 1.0, 0.0]


# ---- refusals


@pytest.mark.parametrize(
    ("use", "args", "sentence"),
    [
        ("exact_match", {"find": "box"}, r"find must be one of all, boxed, .* with one group, got 'box'"),
        ("exact_match", {"find": "("}, r"find must be a regular expression, got '\('"),
        ("exact_match", {"compare": "maths"}, "compare must be one of text, words, number, got 'maths'"),
        (
            "exact_match",
            {"contains": True, "compare": "number"},
            "contains must be false with compare=number",
        ),
        ("exact_match", {"after_thinking": "yes"}, "after_thinking must be true or false, got 'yes'"),
        ("math", {"after_thinking": 1}, "after_thinking must be true or false, got 1"),
        ("format", {"tags": []}, r"tags must be a list of different names of tags, got \[\]"),
        ("format", {"tags": "think"}, "tags must be a list of different names of tags, got 'think'"),
        ("format", {"tags": ["a", "a"]}, "tags must be a list of different"),
        ("format", {"tags": ["<a>"]}, "tags must be a list of different"),
        ("format", {"rest": None}, "rest must be true or false, got None"),
        ("regex", {}, r"pattern must be given for regex, got nothing"),
        ("regex", {"pattern": "("}, r"pattern must be a regular expression, got '\('"),
        ("regex", {"pattern": "a", "count": 0}, "count must be a whole number of at least 1, got 0"),
        ("regex", {"pattern": "a", "count": 2, "full": True}, "count must be null with full=true, got 2"),
        ("length", {"unit": "lines"}, "unit must be one of tokens, words, characters, got 'lines'"),
        ("length", {"least": 5, "most": 4}, "most must be a whole number of at least 5, got 4"),
        ("length", {"falloff": 4}, "falloff must be null without least and most, got 4"),
        ("length", {"most": 4, "falloff": 0}, r"falloff must be a finite number, above 0, got 0"),
        ("repetition", {"unit": "characters"}, "unit must be one of tokens, words, got 'characters'"),
        ("repetition", {"ngram": 0}, "ngram must be a whole number of at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_key(use: str, args: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^reward\.args.*{sentence}"):
        make_reward({"function": use, "args": args})
