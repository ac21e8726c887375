"""The rules of the house that a machine can check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from house import PRODUCT, find_duplicated_classes, find_import_circle, take_census
from rows import RANKS

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "configs": set(),
    "algos": {"configs"},
    "buffers": {"configs"},
    "sync": {"configs"},
    "generators": {"configs", "algos", "buffers", "sync"},
    "learners": {"configs", "algos", "buffers", "sync"},
}
ONLY_IN = {
    "vllm": {
        "generators/rendering/parsing.py",
        "generators/vllm_engine.py",
        "generators/vllm_workers.py",
        "sync/transports/nccl_sender.py",
        "sync/vllm_plugin.py",
        "sync/vllm_ranks.py",
    },
    "ray": {
        "scripts/slipstream/answers.py",
        "scripts/slipstream/buffer_keeper.py",
        "scripts/slipstream/check_nodes.py",
        "scripts/slipstream/cluster.py",
        "scripts/slipstream/cluster_check.py",
        "scripts/slipstream/cluster_nodes.py",
        "scripts/slipstream/node_agents.py",
        "scripts/slipstream/newborn.py",
        "scripts/slipstream/ray_node.py",
        "scripts/slipstream/ray_waits.py",
        "scripts/slipstream/role_failures.py",
        "scripts/slipstream/role_places.py",
        "scripts/slipstream/supervisor.py",
        "scripts/bench/slipstream_bench/buffer_peers.py",
    },
}


def imports(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        wrong = imports(path) & MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_heavy_libraries_are_imported_where_they_belong(library: str) -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in (*MAY_IMPORT, "scripts")
        for path in (ROOT / folder).rglob("*.py")
        if library in imports(path)
    }
    assert found == ONLY_IN[library]


def test_configs_and_buffers_start_without_torch() -> None:
    code = "import sys, buffers.server, buffers.client, configs.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_nothing_from_outside_is_unpickled_or_evaluated() -> None:
    for folder in (*MAY_IMPORT, "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not imports(path) & {"pickle", "cloudpickle", "dill", "marshal"}, path
            calls = [
                node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
            ]
            assert not [f for f in calls if isinstance(f, ast.Name) and f.id in ("eval", "exec")], path


def test_every_file_holds_one_concept() -> None:
    for folder in (*MAY_IMPORT, "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            num_lines = len(path.read_text().splitlines())
            assert num_lines <= 500, f"{path.relative_to(ROOT)} holds two concepts"


@pytest.mark.parametrize("folder", [*PRODUCT, "tests"])
def test_names_and_sentences_of_a_folder_keep_to_the_house_rules(folder: str) -> None:
    """At most 45 % of functions have a name without an object, no docstring is inverted, no line is too
    wide."""
    census = take_census(folder)
    assert not census.inverted_docstrings
    assert not census.wide_lines
    assert folder == "tests" or census.one_word_share < 0.45, census.one_word_functions


def test_no_class_name_stands_in_two_files_without_a_protocol() -> None:
    assert not find_duplicated_classes()


def test_no_two_files_import_each_other() -> None:
    assert not find_import_circle()


def test_one_row_of_tests_alone_imports_what_ranks_need() -> None:
    starting = {path.stem for path in (ROOT / "tests").glob("test_*.py") if "ranks" in imports(path)}
    assert starting and starting <= {f"test_{name}" for name in RANKS.split()}
