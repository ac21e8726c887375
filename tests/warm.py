"""Imports, once, what the ranks of tests need. The server that they fork from does so (`ranks.py`); no thread
may start here."""

import atexit
import gc
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "scripts"), str(Path(__file__).parents[1])]

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import peft  # noqa: F401
import pyarrow  # noqa: F401
import pytest  # noqa: F401
import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import configs.load
import learners.fsdp
import learners.megatron.engine
import learners.models
import learners.step  # noqa: F401

torch.set_num_threads(1)
# Compiles hundreds of patterns, once a process.
get_checkpoint_conversion_mapping("qwen3")
# Reads the schema, once a process.
configs.load.load_config([])
gc.collect()
# Without it nanobind reports as leaks what the end of the interpreter does not collect.
atexit.register(gc.unfreeze)
# No collection of a rank looks at these objects, so none copies their pages.
gc.freeze()
