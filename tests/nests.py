"""A nursery for runs of all kinds: it imports once what the roles of all of them need."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.load import load_config
from slipstream.cluster import nursery_stages
from slipstream.nursery import Stage, run_nursery

ROWS = "SLIPSTREAM_TEST_ROWS"
"""Environment variable of tests that rows.py has started. For them rows.py makes the tiny model."""
SIMULATED = ["generators.engine=simulated", "learner.engine=simulated"]
RAY = ("ray._private.workers.default_worker", "slipstream.roles")
"""Modules that are not imported ahead: Ray remembers the raylet of its first import, and these imports serve
many raylets."""


@contextmanager
def nursery_for_all() -> Iterator[None]:
    """Runs that are started while it lasts fork their workers from it."""
    ahead = {name: stage.ahead for name, stage in nursery_stages(load_config([])).items()}
    ahead |= {"buffer": [*ahead["buffer"], "faults"], "generator": ["import_engines"]}
    nest = run_nursery({name: Stage(modules, []) for name, modules in ahead.items()})
    path = os.environ.get("PYTHONPATH", "")
    # The nursery's own process finds `faults` and `import_engines` here; the workers get the path of their
    # run.
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{path}"
    nest.__enter__()
    os.environ["PYTHONPATH"] = path
    try:
        yield
    finally:
        nest.__exit__(None, None, None)


def import_engines() -> None:
    """Imports what generators need. vLLM looks for Ray and must not find it, so Ray counts as absent
    meanwhile."""
    sys.modules["ray"] = None  # type: ignore[assignment]
    for overrides in ([], SIMULATED):
        for module in nursery_stages(load_config(overrides))["generator"].asked:
            if module not in RAY:
                importlib.import_module(module)
    del sys.modules["ray"]
