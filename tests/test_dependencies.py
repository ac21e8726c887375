"""Every package that the product imports is declared in pyproject.toml."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = [ROOT / name for name in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
NOT_HERE = {
    "flash_attn": "flash-attn",
    "liger_kernel": "liger-kernel",
    "mlflow": "mlflow-skinny",
    "peft": "peft",
    "vllm": "vllm",
}
"""Distributions of packages that not every machine has."""


def list_imports(path: Path) -> Iterator[str]:
    """Yields the top-level packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_every_package_that_the_product_imports_is_declared() -> None:
    project = PROJECT["project"]
    requirements = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    declared = {re.split(r"[^A-Za-z0-9_.-]", one)[0].lower().replace("_", "-") for one in requirements}
    distributions = packages_distributions()
    own = {folder.name for folder in FOLDERS}
    missing = {
        f"{package} ({path.relative_to(ROOT)})"
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        for package in set(list_imports(path)) - own - sys.stdlib_module_names
        if declared.isdisjoint(
            name.lower().replace("_", "-")
            for name in [*distributions.get(package, []), NOT_HERE.get(package, package)]
        )
    }
    assert not missing, f"not declared in pyproject.toml: {sorted(missing)}"
