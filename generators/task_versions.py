"""Versions of the packages that make a task's prompts, which another version may make otherwise."""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def read_versions(task: Any) -> dict[str, str]:
    """Returns the versions of the `packages` that a task names, by package."""
    return {name: find_version(name) for name in getattr(task, "packages", ())}


def find_version(package: str) -> str:
    """Returns the version of a package in this process; `none` where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def compare_versions(recorded: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence for each package that is not of the version with which the run began."""
    for package, before in recorded.items():
        if (now := find_version(package)) != before:
            yield (
                f"{package} has version {now} here, and {before} when the run began: it may make other "
                "prompts and scores"
            )
