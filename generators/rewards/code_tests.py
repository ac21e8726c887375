"""Code: the share of its tests that a reply's program passes, each in a sandbox of its own.

A test is one of
- `{"input": text, "output": text}`: a program that reads its standard input;
- `{"call": name, "arguments": list, "expected": value}`: a function, also a method of a class `Solution`;
- `{"assert": statement}`, or the statement alone: the statement runs after the code, and must not raise.

What a test expects stays outside the sandbox in the first two, and where a statement compares with a literal
(`code_assertions.py`). Any other statement runs beside the code, which can tamper with it.
"""

import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from generators.data.rows import read_reference
from generators.environment import Row
from generators.rewards.arguments import check_count, check_flag, check_number, check_text
from generators.rewards.code_assertions import hold_assertions, read_assertions
from generators.rewards.part import Rating
from generators.rewards.sandbox import Sandbox, SandboxLimits, SandboxMissing, SandboxResult

FENCE = re.compile(r"```[ \t]*+(?:python3?|py)?[ \t]*+\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
MAX_TESTS = 1000
RELATIVE_ERROR = 1e-6
"""By which numbers of a call's result may differ."""
CodeTest = Mapping[str, Any]


class CodePart:
    """Runs a reply's last block of code against the tests of its row."""

    is_async = False

    def __init__(
        self,
        tests: str | None = None,
        partial: bool = False,
        max_tests: int = 20,
        timeout_s: float = 5.0,
        total_timeout_s: float | None = None,
        memory_mb: int = 512,
        disk_mb: int = 64,
        processes: int = 16,
        output_mb: int = 1,
        python: str | None = None,
    ) -> None:
        """`tests`: column of the tests; None: `tests`, or else the right answer's. `partial`: the number is
        the share of tests passed; else 1 if all pass and 0 if one fails. `max_tests`: the first so many run.
        `timeout_s`: for each test. `total_timeout_s`: for all of a reply's tests together, of which those
        that come later have failed; None: four times `timeout_s`. `memory_mb`: of each process. `python`: an
        interpreter, with its packages.

        Raises ValueError for an argument that breaks its rule, and where this machine has no sandbox.
        """
        self._tests = None if tests is None else check_text("tests", tests)
        self._is_partial = check_flag("partial", partial)
        self._max_tests = check_count("max_tests", max_tests)
        longest_s = check_number("timeout_s", timeout_s, above=0)
        self._total_s = (
            4 * longest_s
            if total_timeout_s is None
            else check_number("total_timeout_s", total_timeout_s, longest_s)
        )
        limits = SandboxLimits(
            timeout_s=longest_s,
            memory_bytes=check_count("memory_mb", memory_mb, 64) << 20,
            disk_bytes=check_count("disk_mb", disk_mb) << 20,
            processes=check_count("processes", processes),
            output_bytes=check_count("output_mb", output_mb) << 20,
        )
        try:
            self._sandbox = Sandbox(limits, None if python is None else check_text("python", python))
        except SandboxMissing as error:
            raise ValueError(
                f"use must name a part that this machine can run, got 'code': {error}"
            ) from error

    def rate_reply(self, row: Row, reply: str) -> Rating:
        """Raises ValueError where the row has no tests that can be read, SandboxFailed where a sandbox does
        not start."""
        tests = read_tests(self._find_tests(row))[: self._max_tests]
        code, passed, left_s = find_code(reply), 0, self._total_s
        for test in tests:
            # A reply that is slow in each of many tests is a bad reply, and no error: it meets this bound
            # before its worker meets `episodes.score_timeout_s`.
            has_passed, seconds = self._pass_test(code, test, min(left_s, self._sandbox.limits.timeout_s))
            passed += has_passed
            left_s -= seconds
            if left_s <= 0 or not (has_passed or self._is_partial):
                break
        return Rating(passed / len(tests) if self._is_partial else float(passed == len(tests)))

    def _find_tests(self, row: Row) -> Any:
        if self._tests is None and row.get("tests") is not None:
            return row["tests"]
        return read_reference(row, self._tests)

    def _pass_test(self, code: str, test: CodeTest, timeout_s: float) -> tuple[bool, float]:
        """Returns whether the code passes, and the seconds that it took."""
        job, given, is_right = make_job(test)
        result = self._sandbox.run_program({"code": code} | job, given, timeout_s)
        return has_ended_well(result) and is_right(result.output), result.seconds


def make_job(test: CodeTest) -> tuple[dict[str, Any], bytes, Callable[[bytes], bool]]:
    """Returns what the sandbox gets of a test, the program's input, and the check of what it answers."""
    if "input" in test:
        return (
            {"kind": "program"},
            test["input"].encode(),
            lambda output: is_same_output(output, test["output"]),
        )
    if "call" in test:
        job = {"kind": "call", "function": test["call"], "arguments": test["arguments"]}
        wanted = [test["expected"], *test.get("or_expected", ())]
        return job, b"", lambda output: any(is_same_answer(output, one) for one in wanted)
    if assertions := read_assertions(test["assert"]):
        job = {"kind": "values", "expressions": [one.expression for one in assertions]}
        return job, b"", lambda output: hold_assertions(assertions, output)
    # Only the statements' end prints this token, so a program that exits early has not passed.
    token = secrets.token_hex(16)
    job = {"kind": "statements", "statements": [test["assert"]], "token": token}
    return job, b"", lambda output: output == token.encode()


def find_code(reply: str) -> str:
    """Returns the last fenced block of a reply, or the whole reply where there is none."""
    blocks = FENCE.findall(reply)
    return str(blocks[-1]) if blocks else reply


def has_ended_well(result: SandboxResult) -> bool:
    return result.verdict == "ended" and result.exit_code == 0


def is_same_output(output: bytes, wanted: str) -> bool:
    """True when the lines are the same, apart from white space at their ends and empty lines at the end."""
    given = [line.rstrip() for line in output.decode(errors="replace").rstrip().splitlines()]
    return given == [line.rstrip() for line in wanted.rstrip().splitlines()]


def is_same_answer(output: bytes, wanted: Any) -> bool:
    """True when the JSON of a call's result is the value, where numbers may differ by rounding."""
    try:
        return is_equal(json.loads(output), wanted)
    # The code may have written there too.
    except (ValueError, RecursionError):
        return False


def is_equal(given: Any, wanted: Any) -> bool:
    if isinstance(given, list) and isinstance(wanted, list | tuple):
        return len(given) == len(wanted) and all(map(is_equal, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, Mapping):
        names = {str(name): value for name, value in wanted.items()}
        return given.keys() == names.keys() and all(is_equal(given[name], names[name]) for name in names)
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, int | float) and isinstance(wanted, int | float):
        if isinstance(given, int) and isinstance(wanted, int):
            return given == wanted
        return math.isclose(given, wanted, rel_tol=RELATIVE_ERROR, abs_tol=RELATIVE_ERROR)
    return type(given) is type(wanted) and bool(given == wanted)


def read_tests(value: Any) -> list[CodeTest]:
    """Returns the tests of a row: a list of them, or APPS's `{"inputs", "outputs", "fn_name"}`; either may be
    JSON. Raises ValueError for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"tests must be JSON, got {value[:200]!r}: {error}") from error
    if isinstance(value, Mapping):
        value = list_apps_tests(value)
    if not isinstance(value, Sequence) or not 1 <= len(value) <= MAX_TESTS:
        raise ValueError(f"tests must be a list of 1 to {MAX_TESTS}, got {str(value)[:200]}")
    return [read_test(test) for test in value]


def read_test(test: Any) -> CodeTest:
    if isinstance(test, str):
        return {"assert": test}
    if isinstance(test, Mapping):
        # Parquet gives each test the keys of all, with None where it has none.
        keys = {key: value for key, value in test.items() if value is not None or key == "expected"}
        is_program = isinstance(keys.get("input"), str) and isinstance(keys.get("output"), str)
        is_call = isinstance(keys.get("call"), str) and isinstance(keys.get("arguments"), list)
        if is_program or (is_call and "expected" in keys) or isinstance(keys.get("assert"), str):
            return keys
    raise ValueError(
        "a test must have input and output (texts), call, arguments and expected, or assert (a text), got "
        f"{str(test)[:200]}"
    )


def list_apps_tests(value: Mapping[str, Any]) -> list[CodeTest]:
    """Returns the tests of APPS's form. With `fn_name`, an input is a list of arguments or lines of JSON, and
    an output is the result, or a list with it at the front. Without it, both are texts or lists of lines."""
    inputs, outputs, name = value.get("inputs"), value.get("outputs"), value.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"tests must have as many inputs as outputs, got {str(value)[:200]}")
    pairs = list(zip(inputs, outputs, strict=True))
    if name is None:
        return [{"input": join_lines(given), "output": join_lines(wanted)} for given, wanted in pairs]
    tests: list[CodeTest] = []
    for given, wanted in ((read_lines(given), read_lines(wanted)) for given, wanted in pairs):
        first = wanted[:1] if isinstance(wanted, list) else []
        tests.append({"call": name, "arguments": given, "expected": wanted, "or_expected": first})
    return tests


def join_lines(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def read_lines(given: Any) -> Any:
    """Returns the values of a text with one JSON value in each line; anything else as it is."""
    return [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
