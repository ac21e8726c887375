"""Megatron-core as a training engine. It says at every import what it does without (TransformerEngine, Apex), and lists each bucket of
parameters in the log: neither helps a user."""

import logging
import warnings

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\..*")
logging.getLogger("megatron").setLevel(logging.WARNING)
