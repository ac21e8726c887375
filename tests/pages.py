"""Reading the project's pages: code blocks, the files that they go into, links and commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / ".github/SECURITY.md",
        *(ROOT / "docs").glob("*.md"),
    ]
)
BLOCK = re.compile(r"(?:In `(?P<place>[^`\n]+)`:\n+)?```(?P<language>\w*)\n(?P<code>.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class CodeBlock(NamedTuple):
    language: str
    place: str | None
    """The file that the line above names: "In `generators/tasks/reverse.py`:"."""
    code: str


def read_blocks(text: str) -> list[CodeBlock]:
    return [CodeBlock(one["language"], one["place"], one["code"]) for one in BLOCK.finditer(text)]


def read_section(page: str, heading: str) -> str:
    """Returns a section of second level, without its heading."""
    text = f"{(ROOT / page).read_text()}\n## "
    _, _, rest = text.partition(f"\n## {heading}\n")
    assert rest, f"{page} has no section {heading!r}"
    return rest.partition("\n## ")[0]


def list_anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    plain = (re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def list_commands(page: Path) -> Iterator[list[str]]:
    """Yields the words of each command of the page's shell blocks, continued lines joined, comments
    removed."""
    for block in read_blocks(page.read_text()):
        if block.language == "bash":
            for line in block.code.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield words


def apply_diff(path: Path, diff: str) -> None:
    """Adds the lines of a page's diff to the file. Hunks begin with `@@`; a hunk's other lines must stand
    in the file once."""
    text = path.read_text()
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, f"{path} must hold these lines once:\n{old}"
        text = text.replace(old, new)
    path.write_text(text)
