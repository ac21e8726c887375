"""The nursery of a host of `chaos_run.py`: all roles of the host are forked from it, so that they start in a
moment. Prints where it is, and ends with the host.

A worker that it does not fork is as good, but starts later, with vLLM and without a witness.
"""

import os
import signal

from configs.load import load_config
from slipstream.cluster import nursery_stages
from slipstream.nursery import FOLDER, Stage, run_nursery

AHEAD = {
    "buffer": [],
    "learner": ["transformers.models.qwen3.modeling_qwen3"],
    "generator": [
        "slipstream_bench.witnessed_generators", "generators.task_episodes", "generators.tasks.sorting",
    ],
}  # fmt: skip


def main() -> None:
    """Imports no Ray: it remembers the raylet of its first import, and a host has one after the other."""
    planned = nursery_stages(load_config([]))
    ahead = {name: [*(stage.ahead), *AHEAD[name]] for name, stage in planned.items()}
    with run_nursery({name: Stage(modules, []) for name, modules in ahead.items()}):
        print(os.environ[FOLDER], flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
