"""Code: the share of its tests that a reply's program passes, each in a sandbox of its own.

A test is one of
- `{"input": text, "output": text}`: a program that reads its standard input;
- `{"call": name, "arguments": list, "expected": value}`: a function, also a method of a class `Solution`;
- `{"assert": statement}`, or the statement alone: the statement runs after the code, and must not raise.

What a test expects stays outside the sandbox in the first two. A statement runs beside the code, which can
tamper with it, so prefer those two.
"""

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from generators.environment import Row
from generators.rewards.arguments import check_count, check_flag, check_number, check_text
from generators.rewards.part import Rating
from generators.rewards.rows import read_reference
from generators.rewards.sandbox import Sandbox, SandboxLimits, SandboxMissing, SandboxResult

FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
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
        memory_mb: int = 512,
        disk_mb: int = 64,
        processes: int = 16,
        output_mb: int = 1,
        python: str | None = None,
    ) -> None:
        """`tests`: column of the tests; None: `tests`, or else the right answer's. `partial`: the number is
        the share of tests passed; else 1 if all pass and 0 if one fails. `max_tests`: the first so many run.
        `timeout_s`: for each test. `memory_mb`: of each process. `python`: an interpreter, with its packages.

        Raises ValueError for an argument that breaks its rule, and where this machine has no sandbox.
        """
        self._tests = None if tests is None else check_text("tests", tests)
        self._is_partial = check_flag("partial", partial)
        self._max_tests = check_count("max_tests", max_tests)
        limits = SandboxLimits(
            timeout_s=check_number("timeout_s", timeout_s, above=0),
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
        code, passed = find_code(reply), 0
        for test in tests:
            has_passed = self._pass_test(code, test)
            passed += has_passed
            if not has_passed and not self._is_partial:
                return Rating(0.0)
        return Rating(passed / len(tests))

    def _find_tests(self, row: Row) -> Any:
        if self._tests is None and row.get("tests") is not None:
            return row["tests"]
        return read_reference(row, self._tests)

    def _pass_test(self, code: str, test: CodeTest) -> bool:
        run = self._sandbox.run_program
        if "input" in test:
            result = run({"kind": "program", "code": code}, test["input"].encode())
            return has_ended_well(result) and is_same_output(result.output, test["output"])
        if "call" in test:
            job = {"kind": "call", "code": code, "function": test["call"], "arguments": test["arguments"]}
            result = run(job)
            wanted = [test["expected"], *test.get("or_expected", ())]
            return has_ended_well(result) and any(is_same_answer(result.output, one) for one in wanted)
        # Only the statements' end prints this token, so a program that exits early has not passed.
        token = secrets.token_hex(16)
        result = run({"kind": "statements", "code": code, "statements": [test["assert"]], "token": token})
        return has_ended_well(result) and result.output == token.encode()


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
    an output is the result, or a list with it at the front."""
    inputs, outputs, name = value.get("inputs"), value.get("outputs"), value.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"tests must have as many inputs as outputs, got {str(value)[:200]}")
    pairs = list(zip(inputs, outputs, strict=True))
    if name is None:
        return [{"input": str(given), "output": str(wanted)} for given, wanted in pairs]
    tests: list[CodeTest] = []
    for given, wanted in ((read_lines(given), read_lines(wanted)) for given, wanted in pairs):
        first = wanted[:1] if isinstance(wanted, list) else []
        tests.append({"call": name, "arguments": given, "expected": wanted, "or_expected": first})
    return tests


def read_lines(given: Any) -> Any:
    """Returns the values of a text with one JSON value in each line; anything else as it is."""
    return [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
