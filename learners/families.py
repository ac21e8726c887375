"""Families of models (`model_type`) whose packed log-probabilities and gradients are Hugging Face's:
`tests/test_families.py`.

Any other causal LM of transformers starts too, and the console says so; like every model it is compared with
an engine before its first step (`learners.parity`). `learners.attention` and `learners.heads` refuse by name
what packed attention and head cannot do right.
"""

import json
from pathlib import Path

from configs.learner import LearnerKind
from configs.schema import Config

TESTED_FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "granite", "cohere", "cohere2", "phi3", "olmo2", "olmo3", "smollm3", "glm4", "exaone4",
    "deepseek_v3",
)  # fmt: skip


def describe_untested_family(config: Config) -> str | None:
    """Returns a sentence for a model of an untested family, before it is loaded; None for others.

    Megatron's engine refuses the families that it does not know, so nothing is said there.
    """
    path = Path(config.model.path) / "config.json"
    if config.learner.engine is not LearnerKind.fsdp or not path.exists():
        return None
    family = json.loads(path.read_text()).get("model_type")
    if family in TESTED_FAMILIES:
        return None
    return (
        f"{family} (model_type of model.path) is not among the families held to Hugging Face's numbers: "
        f"{', '.join(TESTED_FAMILIES)}; "
        "nothing is trained before the parity probe has compared it with an engine"
    )
