"""A judge: a model behind an OpenAI-compatible address grades replies.

    template with {prompt}, {response}, {reference} ─▶ POST URL/chat/completions ─▶ text ─▶ grade

A grade that cannot be read is an error, so the attempt fails; it is never a grade of 0.
"""

import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import xxhash

from generators.data.rows import read_reference, write_prompt
from generators.environment import Row
from generators.rewards.arguments import check_count, check_number, check_text
from generators.rewards.part import Rating
from generators.rewards.servers import RequestFailed, check_server
from generators.rewards.slots import SharedSlots

PLACE = re.compile(r"\{(prompt|response|reference)\}")
GRADE = r"(?i)\bgrade\b\W*?(-?\d+(?:\.\d+)?)"
"""Finds `Grade: 7`. The last match counts, because a judge may speak of grades before it gives one."""
HASH_BITS = 24
"""A component is kept in float32, which holds whole numbers of this size exactly."""


class JudgePart:
    """Asks a judge for a grade."""

    is_async = True

    def __init__(
        self,
        url: str,
        model: str,
        prompt: str,
        system: str | None = None,
        grade: str = GRADE,
        grade_field: str | None = None,
        lowest: float | None = None,
        highest: float | None = None,
        reference: str | None = None,
        key_env: str | None = None,
        max_concurrent: int = 8,
        attempts: int = 8,
        attempt_timeout_s: float = 12.0,
        timeout_s: float = 25.0,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        """`url`: address up to `/v1`. `prompt`: template of the question. `grade`: regular expression with
        one group, or none, that finds the grade; its last match counts. `grade_field`: the judge answers with
        a JSON object, and this key of it has the grade. `lowest`, `highest`: bounds of a grade, beyond which
        it is an error. `key_env`: environment variable with the key. `max_concurrent`: requests at a time of
        all worker processes of a generator. `timeout_s`: for one reply, attempts and waits included. `body`:
        further keys of the request.
        """
        self._server = check_server(url, "/chat/completions", key_env, attempts, attempt_timeout_s, timeout_s)
        self._template = check_text("prompt", prompt)
        if "{response}" not in prompt:
            raise ValueError(f"prompt must have the place {{response}}, got {prompt!r}")
        self._system = None if system is None else check_text("system", system)
        self._reference = None if reference is None else check_text("reference", reference)
        self._pattern = compile_pattern(grade)
        self._field = None if grade_field is None else check_text("grade_field", grade_field)
        self._lowest = None if lowest is None else check_number("lowest", lowest)
        self._highest = None if highest is None else check_number("highest", highest)
        if self._lowest is not None and self._highest is not None and self._lowest >= self._highest:
            raise ValueError(f"lowest must be below highest, got {lowest!r} and {highest!r}")
        if not isinstance(body or {}, Mapping):
            raise ValueError(f"body must be keys of a request with their values, got {body!r}")
        self._settings = {
            "model": check_text("model", model),
            "temperature": check_number("temperature", temperature, 0),
            "max_tokens": check_count("max_tokens", max_tokens),
        } | dict(body or {})
        self.max_concurrent = check_count("max_concurrent", max_concurrent)
        self._slots = SharedSlots(self.max_concurrent)
        self.prompt_hash = self._hash_prompt()

    async def rate_reply(self, row: Row, reply: str) -> Rating:
        """Raises RequestFailed where there is no answer, ValueError where it has no grade."""
        messages = self._write_messages(row, reply)
        deadline = time.monotonic() + self._server.timeout_s
        async with self._slots.hold_slot(self._server.timeout_s):
            body = self._settings | {"messages": messages}
            answer = await self._server.post_json(body, max(0.001, deadline - time.monotonic()))
        return Rating(self.read_grade(read_content(answer)), {"prompt_hash": self.prompt_hash})

    def _write_messages(self, row: Row, reply: str) -> list[dict[str, str]]:
        values = {"response": reply}
        if "{prompt}" in self._template:
            values["prompt"] = write_prompt(row)
        if "{reference}" in self._template:
            reference = read_reference(row, self._reference)
            values["reference"] = reference if isinstance(reference, str) else json.dumps(reference)
        # All at once, because a reply may have such a place in it.
        question = PLACE.sub(lambda place: values[place[1]], self._template)
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, {"role": "user", "content": question}]

    def read_grade(self, text: str) -> float:
        """Returns the grade in a judge's answer. Raises ValueError where there is none, or one out of
        bounds."""
        if self._field is None:
            matches = list(self._pattern.finditer(text))
            found: Any = matches[-1][matches[-1].re.groups] if matches else None
        else:
            found = find_field(text, self._field)
        try:
            assert not isinstance(found, bool), found
            grade = float(found)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"a judge must give a grade, got {text[-200:]!r}") from error
        lowest = -math.inf if self._lowest is None else self._lowest
        highest = math.inf if self._highest is None else self._highest
        return check_number("a judge's grade", grade, lowest, highest=highest)

    def _hash_prompt(self) -> float:
        """Returns a number that changes with the judge's instructions and its model."""
        parts = json.dumps([self._system, self._template, self._settings], sort_keys=True, default=str)
        return float(xxhash.xxh3_64_intdigest(parts.encode()) % (1 << HASH_BITS))


def compile_pattern(grade: Any) -> re.Pattern[str]:
    try:
        pattern = re.compile(check_text("grade", grade))
    except re.error as error:
        raise ValueError(f"grade must be a regular expression, got {grade!r}: {error}") from error
    if pattern.groups > 1:
        raise ValueError(f"grade must have at most one group, got {grade!r}")
    return pattern


def find_field(text: str, field: str) -> Any:
    """Returns the value at a key of the last JSON object in a text; None where there is none."""
    decoder, found, start = json.JSONDecoder(), None, text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            found = value.get(field, found)
        start = text.find("{", end)
    return found


def read_content(answer: Any) -> str:
    """Returns the text of a chat completion. Raises RequestFailed for an answer of another form."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (TypeError, KeyError, IndexError):
        content = None
    if not isinstance(content, str):
        raise RequestFailed(f"a judge's answer must have choices[0].message.content, got {str(answer)[:200]}")
    return content
