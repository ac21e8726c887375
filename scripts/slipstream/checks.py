"""The checks that `scripts/check.sh` runs. A check is a function that does one thing at small size, in a
process of its own, and returns a few words about what it has seen.

It raises `NotHere` where the machine lacks something that the check needs, and anything else where something
that should work does not.
"""

from functools import partial

from slipstream.check_machine import (
    Check,
    check_buffer,
    check_compiler,
    check_disk,
    check_gpus,
    check_limits,
    check_packages,
    check_ports,
    check_ray,
    check_shared_memory,
    check_with_package,
)
from slipstream.check_models import check_engine, check_learner, check_ranks
from slipstream.check_weights import check_transport_on_gpu, check_transport_on_host, check_transport_tcp

adapters = partial(
    check_with_package, "peft", "learner.lora.rank=16 installs it", partial(check_learner, rank_of_adapters=4)
)
megatron = partial(
    check_with_package,
    "megatron",
    "learner.engine=megatron installs it",
    partial(check_learner, kind="megatron"),
)
liger = partial(
    check_with_package, "liger_kernel", "learner.fsdp.liger=true installs it",
    partial(check_learner, "bfloat16", liger=True),
)  # fmt: skip
flash = partial(
    check_with_package, "flash_attn", "extra `flash`",
    partial(check_learner, "bfloat16", attention="flash_attention_2"),
)  # fmt: skip

CHECKS = [
    Check("packages", check_packages),
    Check("shared memory", check_shared_memory),
    Check("limits", check_limits),
    Check("disk", check_disk),
    Check("C compiler", check_compiler),
    Check("ports", check_ports),
    Check("buffer", check_buffer),
    Check("Ray", check_ray),
    Check("GPU", check_gpus, gpu=True),
    Check("engine, float32", partial(check_engine, "float32"), deadline_s=180),
    Check("engine, bfloat16", partial(check_engine, "bfloat16"), deadline_s=180),
    Check("engine, transformers", partial(check_engine, "float32", "transformers"), deadline_s=120),
    Check("learner, FSDP2, packed_sdpa", partial(check_learner, attention="packed_sdpa"), deadline_s=120),
    Check("learner, two ranks", check_ranks, deadline_s=120),
    Check("learner, LoRA", adapters),
    Check("learner, Megatron", megatron, deadline_s=120),
    Check("learner, bfloat16", partial(check_learner, "bfloat16"), gpu=True, deadline_s=120),
    Check("learner, compiled", partial(check_learner, "bfloat16", compiled=True), gpu=True, deadline_s=300),
    Check("learner, Liger", liger, gpu=True, deadline_s=120),
    Check(
        "attention, varlen", partial(check_learner, "bfloat16", attention="varlen"), gpu=True, deadline_s=120
    ),
    Check("attention, flash_attention_2", flash, gpu=True, deadline_s=120),
    Check("weights, shared memory", partial(check_transport_on_host, True)),
    Check("weights, disk", partial(check_transport_on_host, False)),
    Check("weights, TCP", partial(check_transport_tcp, False)),
    Check("weights, TCP with keys", partial(check_transport_tcp, True)),
    Check("weights, CUDA IPC", partial(check_transport_on_gpu, False), gpu=True, deadline_s=180),
    Check("weights, NCCL", partial(check_transport_on_gpu, True), gpu=True, deadline_s=180),
]
