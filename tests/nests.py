"""A nursery for runs of all kinds: what their roles need, imported once."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.load import load_config
from slipstream.cluster import nursery_stages
from slipstream.nursery import Stage, nursery

ROWS = "SLIPSTREAM_TEST_ROWS"
"""Environment variable of tests that rows.py has started: it makes the tiny model for them."""
SIMULATED = ["generators.engine=simulated", "learner.engine=simulated"]
RAY = ("ray._private.workers.default_worker", "slipstream.roles")
"""Ray remembers the raylet of its first import, and these imports serve runs of many raylets."""


@contextmanager
def nursery_for_all() -> Iterator[None]:
    ahead = {name: stage.ahead for name, stage in nursery_stages(load_config([])).items()}
    ahead |= {"buffer": [*ahead["buffer"], "faults"], "generator": ["import_engines"]}
    nest = nursery({name: Stage(modules, []) for name, modules in ahead.items()})
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = (
        f"{Path(__file__).parent}{os.pathsep}{path}"  # for this process of the nursery alone
    )
    nest.__enter__()
    os.environ["PYTHONPATH"] = path
    try:
        yield
    finally:
        nest.__exit__(None, None, None)


def import_engines() -> None:
    """What generators need, but without Ray, for which vLLM looks."""
    sys.modules["ray"] = None  # type: ignore[assignment]
    for overrides in ([], SIMULATED):
        for module in nursery_stages(load_config(overrides))["generator"].asked:
            if module not in RAY:
                importlib.import_module(module)
    del sys.modules["ray"]
