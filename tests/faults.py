"""Puts faults into workers that are forked.

A forked worker imports a `sitecustomize.py` on its PYTHONPATH before its role, as a new process would do at
its start.
"""

import importlib
import os
import sys
from pathlib import Path


class BeforeRoles:
    """A finder of modules that finds none. It notices when the role is imported."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "slipstream.roles":
            for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
                if folder and Path(folder, "sitecustomize.py").exists():
                    sys.modules.pop("sitecustomize", None)
                    sys.path.insert(0, folder)
                    importlib.import_module("sitecustomize")


sys.meta_path.insert(0, BeforeRoles())  # type: ignore[arg-type]
