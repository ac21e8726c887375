"""`model`: the policy that is trained."""

from dataclasses import dataclass
from enum import StrEnum

from configs.setting import Section, setting


class Dtype(StrEnum):
    """Number format of model weights."""

    float32 = "float32"
    """4 bytes an element."""
    bfloat16 = "bfloat16"
    """2 bytes an element: the range of float32 with 8 bits of precision. For GPUs."""

    @property
    def num_bytes(self) -> int:
        """Bytes of an element."""
        return 2 if self is Dtype.bfloat16 else 4


@dataclass(kw_only=True, slots=True)
class ModelConfig(Section):
    """The policy that is trained."""

    path: str = setting("tiny")
    """Folder of a Hugging Face causal language model. `tiny` is a small Qwen3, which the project makes for
    the task and caches."""
    dtype: Dtype = setting(Dtype.float32)
    """Number format in which generators compute and model weights travel. The learner keeps float32 master
    weights."""
