"""Megatron-core as a training engine.

Megatron warns at every import of libraries that it does without (TransformerEngine, Apex), and logs each
bucket of parameters. Neither helps a user, so both are silenced here.
"""

import logging
import warnings

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\..*")
logging.getLogger("megatron").setLevel(logging.WARNING)
