"""Measures what publishing only the adapters saves, and what merging them costs a host.

    scripts/measure_adapters.sh [--rounds 8] [--rank 8]

The comparison is with publishing the merged model. A Qwen3 of 50 M parameters, adapted in all its linear
layers, is trained for one update and published, again and again. A host that is the learner's own prepares
each version up to the point where an engine would map it. So does a host that fetches it over ZeroMQ (on this
machine: the seconds have no network in them). All figures are medians; the first round, in which files are
made and sized, is left out.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from configs.host import boot_id
from configs.model import Dtype
from configs.parallel import LoraConfig, LoraPublish
from learners.fsdp import FsdpEngine
from learners.packing import Batch, pack_rows
from sync.adapters import describe_adapters
from sync.folders import shared_memory_folder
from sync.publisher import Publisher
from sync.subscriber import Subscriber
from sync.transports.fetcher import Fetcher
from sync.transports.server import SnapshotServer
from sync.transports.tcp import FetchingEnd

TOKENS = 32


def make_model(folder: Path) -> int:
    """Saves a random model; returns its number of parameters."""
    config = Qwen3Config(
        vocab_size=32000, hidden_size=576, intermediate_size=1728, num_hidden_layers=8, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def make_batch() -> Batch:
    return Batch(
        tokens=torch.arange(TOKENS),
        sampled=torch.ones(TOKENS, dtype=torch.bool),
        behavior_logprobs=torch.zeros(TOKENS),
        versions=torch.zeros(TOKENS, dtype=torch.int32),
        offsets=torch.tensor([0, TOKENS]).numpy(),
        rewards=torch.zeros(1),
        groups=torch.zeros(1, dtype=torch.int64),
        group_weights=torch.ones(1),
        truncated=torch.zeros(1, dtype=torch.bool),
        greedy_rewards=torch.full((1,), float("nan")),
    )


def measure_publishing(
    model: Path, publish: LoraPublish, dtype: Dtype, rank: int, rounds: int
) -> dict[str, float]:
    lora = LoraConfig(rank=rank, publish=publish)
    engine = FsdpEngine(model, dtype=dtype, lora=lora)
    name = shared_memory_folder(f"measure-{publish}-{dtype}")
    adapter = (
        describe_adapters(model, str(dtype), lora.alpha / rank) if publish is LoraPublish.adapter else None
    )
    publisher = Publisher(name, "measure", ends=[SnapshotServer(name)], adapter=adapter)
    near, far = (
        Subscriber(),
        Subscriber(FetchingEnd(Fetcher(shared_memory_folder(f"measure-far-{publish}-{dtype}")))),
    )
    seen: dict[str, list[float]] = {"bytes": [], "publish": [], "near": [], "far": []}
    for version in track(range(rounds + 1), f"{publish} {dtype}", transient=True):
        engine.update(
            [pack_rows(make_batch(), [0])], lambda logprobs, entropy, packed: -logprobs.mean(), 1e-4
        )
        manifest, before = publisher.publish_version(version, engine.stream_weights()), far.fetched_bytes
        seen["publish"].append(publisher.seconds)
        announced = publisher.announce_version(manifest)
        for where, subscriber, host in (("near", near, boot_id()), ("far", far, "another")):
            began = time.perf_counter()
            subscriber.prepare_version(announced.replace(boot_id(), host))
            seen[where].append(time.perf_counter() - began)
        seen["bytes"].append(far.fetched_bytes - before)
        for subscriber in (near, far):
            subscriber.refresh_spare()
    for closing in (near, far, publisher):
        closing.close()
    return {key: median(values[1:]) for key, values in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        dist.init_process_group("gloo", init_method=f"file://{temporary}/rendezvous", rank=0, world_size=1)
        model = Path(temporary) / "model"
        table = Table(title=f"{make_model(model) / 1e6:.1f} M parameters, adapters of rank {options.rank}")
        for column in ("dtype", "publish", "MB fetched", "publish s", "learner's host s", "another host s"):
            table.add_column(column)
        for dtype in (Dtype.float32, Dtype.bfloat16):
            for publish in LoraPublish:
                found = measure_publishing(model, publish, dtype, options.rank, options.rounds)
                table.add_row(
                    dtype, publish, f"{found['bytes'] / 1e6:.2f}",
                    *(f"{found[key]:.3f}" for key in ("publish", "near", "far")),
                )  # fmt: skip
        dist.destroy_process_group()
    Console().print(table)


if __name__ == "__main__":
    main()
