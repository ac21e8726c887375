"""The small files of a model's folder: its configuration, its tokenizer and its chat templates.

Neither weights nor code are among them. A host that has these files and the published weights can generate.
"""

import shutil
from fnmatch import fnmatchcase
from pathlib import Path

PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm")
LEFT_OUT = ("*.index.json", "trainer_state.json", ".*")
"""Lists of weights, and records of a training before this one."""
FOLDERS = (".", "additional_chat_templates")
"""Folders of such files: transformers keeps all templates but the first in one of their own."""
MAX_BYTES = 64 << 20
"""A larger file is no tokenizer: the largest known have half of that."""


def is_model_file(name: str) -> bool:
    """True for the name of a small file of a model, as a path within the model's folder."""
    path = Path(name)
    return (
        str(path) == name
        and str(path.parent) in FOLDERS
        and any(fnmatchcase(path.name, pattern) for pattern in PATTERNS)
        and not any(fnmatchcase(path.name, pattern) for pattern in LEFT_OUT)
    )


def list_model_files(model: Path) -> list[str]:
    """Returns the names of the small files in a model's folder, in alphabetical order."""
    return sorted(
        name
        for folder in FOLDERS
        for path in (model / folder).glob("*")
        if is_model_file(name := str(path.relative_to(model)))
        and path.is_file()
        and path.stat().st_size <= MAX_BYTES
    )


def copy_model_files(model: Path, folder: Path) -> None:
    """Copies the small files of a model's folder into another folder, which exists."""
    for name in list_model_files(model):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(model / name, folder / name)
