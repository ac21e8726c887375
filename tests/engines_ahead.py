"""What generators need, imported without Ray: Ray remembers the raylet of its first import, and these imports serve runs of many."""

import importlib
import sys

from cluster import stages

from configs.load import load

sys.modules["ray"] = None  # type: ignore[assignment]  # vLLM does without
for engine in ("fsdp", "vllm"), ("simulated", "simulated"):
    for module in stages(load([f"learner.engine={engine[0]}", f"generators.engine={engine[1]}"]))["generator"].asked:
        if module not in ("ray._private.workers.default_worker", "roles"):
            importlib.import_module(module)
del sys.modules["ray"]
