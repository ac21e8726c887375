"""What `scripts/check.sh` tries: each check is a function that does one thing at small size, in a process of its own, and says in a few
words what it has seen.

It raises `NotHere` where the machine lacks what the check needs, and anything else where something that should work does not.
"""

from functools import partial

from slipstream.check_machine import (
    Check,
    buffer,
    compiler,
    cuda,
    disk,
    limits,
    needs,
    ports,
    python_packages,
    ray_cluster,
    shared_memory,
)
from slipstream.check_models import engine, learner, ranks
from slipstream.check_weights import transport_on_gpu, transport_on_host, transport_tcp

CHECKS = [
    Check("packages", python_packages),
    Check("shared memory", shared_memory),
    Check("limits", limits),
    Check("disk", disk),
    Check("C compiler", compiler),
    Check("ports", ports),
    Check("buffer", buffer),
    Check("Ray", ray_cluster),
    Check("GPU", cuda, gpu=True),
    Check("engine, float32", partial(engine, "float32"), deadline_s=180),
    Check("engine, bfloat16", partial(engine, "bfloat16"), deadline_s=180),
    Check("learner, FSDP2, packed_sdpa", partial(learner, attention="packed_sdpa"), deadline_s=120),
    Check("learner, two ranks", ranks, deadline_s=120),
    Check("learner, LoRA", partial(needs, "peft", "learner.lora.rank=16 installs it", partial(learner, rank_of_adapters=4))),
    Check("learner, Megatron", partial(needs, "megatron", "learner.engine=megatron installs it", partial(learner, kind="megatron")), deadline_s=120),
    Check("learner, bfloat16", partial(learner, "bfloat16"), gpu=True, deadline_s=120),
    Check("learner, compiled", partial(learner, "bfloat16", compiled=True), gpu=True, deadline_s=300),
    Check("learner, Liger", partial(needs, "liger_kernel", "learner.fsdp.liger=true installs it", partial(learner, "bfloat16", liger=True)), gpu=True, deadline_s=120),
    Check("attention, varlen", partial(learner, "bfloat16", attention="varlen"), gpu=True, deadline_s=120),
    Check("attention, flash_attention_2", partial(needs, "flash_attn", "extra `flash`", partial(learner, "bfloat16", attention="flash_attention_2")), gpu=True, deadline_s=120),
    Check("weights, shared memory", partial(transport_on_host, True)),
    Check("weights, disk", partial(transport_on_host, False)),
    Check("weights, TCP", partial(transport_tcp, False)),
    Check("weights, TCP with keys", partial(transport_tcp, True)),
    Check("weights, CUDA IPC", partial(transport_on_gpu, False), gpu=True, deadline_s=180),
    Check("weights, NCCL", partial(transport_on_gpu, True), gpu=True, deadline_s=180),
]  # fmt: skip
