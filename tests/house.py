"""The census of the code: counts names, sentences and sizes that the house rules bound.

python tests/house.py              one line for each folder, then the places that break a rule
python tests/house.py FOLDER ...   the same for these folders alone
"""

import ast
import graphlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("algos", "buffers", "configs", "generators", "learners", "sync", "scripts")
MAX_COLUMNS = 110
INVERTED = re.compile(r"(Of|What|Who|Whose|Whom|Which|Whatever|Whoever)\b")
"""No docstring begins with one of these words, because none of them is a subject."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Census:
    """Counts over the Python files of one folder. Places are `path:line`."""

    num_functions: int = 0
    one_word_functions: list[str] = field(default_factory=list)
    inverted_docstrings: list[str] = field(default_factory=list)
    wide_lines: list[str] = field(default_factory=list)
    num_lines_over_100: int = 0
    num_format_skips: int = 0
    longest_function: tuple[int, str] = (0, "")
    longest_file: tuple[int, str] = (0, "")
    most_public_methods: tuple[int, str] = (0, "")

    @property
    def one_word_share(self) -> float:
        return len(self.one_word_functions) / max(self.num_functions, 1)


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def is_one_word(name: str) -> bool:
    """True for a name without an object, such as `take` or `_check`.

    Dunder methods count as named by Python.
    """
    return "_" not in name.strip("_") and not name.startswith("__")


def find_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and text of each docstring, those below fields and assignments included."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_text and isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value


def take_census(*folders: str) -> Census:
    census = Census()
    for path in python_files(*folders):
        text, place = path.read_text(), str(path.relative_to(ROOT))
        lines, tree = text.splitlines(), ast.parse(text)
        census.longest_file = max(census.longest_file, (len(lines), place))
        census.num_format_skips += sum("fmt: skip" in line for line in lines) if path != Path(__file__) else 0
        census.num_lines_over_100 += sum(len(line) > 100 for line in lines)
        numbered = enumerate(lines, 1)
        census.wide_lines += [f"{place}:{number}" for number, line in numbered if len(line) > MAX_COLUMNS]
        for line_number, docstring in find_docstrings(tree):
            if INVERTED.match(docstring.strip()):
                census.inverted_docstrings.append(f"{place}:{line_number}: {docstring.strip()[:60]}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [
                    one for one in node.body if isinstance(one, Function) and not one.name.startswith("_")
                ]
                census.most_public_methods = max(
                    census.most_public_methods, (len(methods), f"{place}:{node.name}")
                )
            elif isinstance(node, Function) and not node.name.startswith("__"):
                census.num_functions += 1
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                census.longest_function = max(census.longest_function, (num_lines, f"{place}:{node.name}"))
                if is_one_word(node.name):
                    census.one_word_functions.append(f"{place}:{node.lineno}: {node.name}")
    return census


def find_duplicated_classes() -> dict[str, list[str]]:
    """Returns class names that two files define, where none of them defines the Protocol of that name.

    Files of one folder that are each other's alternatives (`generators/tasks/*.py`) implement the Protocol
    that their folder's neighbor defines, so one Protocol of the name is enough.
    """
    places: dict[str, list[str]] = defaultdict(list)
    protocols: set[str] = set()
    for path in python_files(*PRODUCT, "tests"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
                if any("Protocol" in ast.unparse(base) for base in node.bases):
                    protocols.add(node.name)
    return {name: found for name, found in places.items() if len(found) > 1 and name not in protocols}


def find_import_circle() -> list[str]:
    """Returns files that import each other in a circle, or nothing. Imports inside functions count."""
    modules: dict[str, str] = {}
    for path in python_files(*PRODUCT, "tests"):
        place = path.relative_to(ROOT)
        parts = list(place.with_suffix("").parts)
        for prefix in (["scripts", "bench"], ["scripts"], ["tests"]):
            if parts[: len(prefix)] == prefix:
                parts = parts[len(prefix) :]
                break
        modules[".".join(part for part in parts if part != "__init__")] = str(place)
    graph: dict[str, set[str]] = {}
    for module, place in modules.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse((ROOT / place).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= named & modules.keys() or {node.module}
        graph[place] = {modules[name] for name in imported if name in modules and name != module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def main(folders: list[str]) -> None:
    for folder in folders or [*PRODUCT, "tests"]:
        census = take_census(folder)
        print(
            f"{folder}: {census.num_functions} functions, {census.one_word_share:.0%} of one word; "
            f"{len(census.inverted_docstrings)} inverted docstrings; "
            f"{len(census.wide_lines)} lines over {MAX_COLUMNS} columns, "
            f"{census.num_lines_over_100} over 100; "
            f"{census.num_format_skips} `fmt: skip`; longest function {census.longest_function}, "
            f"file {census.longest_file}, most public methods {census.most_public_methods}"
        )
        if folders:
            print(*census.one_word_functions, *census.inverted_docstrings, *census.wide_lines, sep="\n")
    print("classes of one name:", find_duplicated_classes())
    print("import circle:", find_import_circle())


if __name__ == "__main__":
    main(sys.argv[1:])
