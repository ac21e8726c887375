"""Measures the inference engines beside each other, on the same weights, prompts and lengths.

    scripts/benchmark_engines.sh [--repeats 3] [--json FILE]

Each measurement is a process of its own that samples all replies twice; the second time counts. The engines
take turns, and the best of each counts. A ratio of 2 means that transformers samples twice as many tokens as
vLLM. Models are Qwen3 with random weights in float32, and no reply ends before its length.

    tokens/s         sampled tokens a second of processor time, until the last reply
    start            seconds of processor time to build the engine and take up the first version
    update           milliseconds of processor time to take up a version while all replies are under way

Both engines compute in one thread. The time is the process's own, so that other programs do not count.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ENGINES = ("vllm", "transformers")
MODELS = {"2 layers, hidden 64": (2, 64), "4 layers, hidden 256": (4, 256)}
SIZES = {"64 replies of 16": (64, 12, 16), "32 replies of 128": (32, 64, 128)}
"""(samples, tokens of a prompt, tokens of a reply)"""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    tokens_per_s: float
    start_s: float
    update_ms: float


def make_model(layers: int, hidden: int, folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=320, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=max(32, hidden // 4),
            max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
            pad_token_id=0,
        )
    ).save_pretrained(folder)  # fmt: skip


def open_engine(name: str, model: Path, samples: int, length: int) -> Any:
    sizes: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": length,
        "max_sequences": samples,
        "kv_cache_mb": 256,
    }
    if name == "vllm":
        from generators.vllm_engine import VllmEngine

        return VllmEngine(str(model), **sizes)
    from generators.transformers_engine import TransformersEngine

    return TransformersEngine(str(model), **sizes)


def measure_engine(name: str, model: Path, samples: int, prompt: int, reply: int) -> EngineSpeed:
    """Runs in a process of its own: vLLM changes the one that it is imported in."""
    began = time.process_time()
    engine = open_engine(name, model, samples, prompt + reply)
    from safetensors.torch import load_file

    from generators.engine import Sample
    from sync.publisher import Publisher
    from sync.snapshot import Snapshot
    from sync.stream import whole_parts

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        publisher, weights = Publisher(Path(folder), "benchmark"), load_file(model / "model.safetensors")
        versions = []
        for number in range(3):
            versions.append(Snapshot(publisher.publish_version(number, whole_parts(weights))))
            versions[-1].attest()
        engine.load_version(versions[0])
        start_s = time.process_time() - began
        for turn in range(2):
            began, spent = time.process_time(), 0.0
            for number in range(samples):
                tokens = [(7 * number + 3 * place) % 320 for place in range(prompt)]
                engine.add_sample(
                    Sample(id=str(number), prompt=tokens, max_tokens=reply, seed=number, forced=True)
                )
            steps = 0
            while engine.num_unfinished:
                engine.step()
                steps += 1
                if steps == reply // 2:
                    at = time.process_time()
                    engine.load_version(versions[1 + turn])
                    spent = time.process_time() - at
            tokens_per_s = samples * reply / (time.process_time() - began - spent)
        publisher.close()
    return EngineSpeed(tokens_per_s, start_s, 1000 * spent)


def run_measurement(name: str, model: Path, sizes: tuple[int, int, int]) -> EngineSpeed:
    """Starts a process that measures. Raises CalledProcessError."""
    command = [sys.executable, __file__, "--measure", name, str(model), *map(str, sizes)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return EngineSpeed(**json.loads(said.splitlines()[-1]))


def compare_engines(repeats: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (model_name, (layers, hidden)) in enumerate(MODELS.items()):
            model = Path(folder) / str(number)
            make_model(layers, hidden, model)
            for size_name, sizes in SIZES.items():
                found: dict[str, list[EngineSpeed]] = {name: [] for name in ENGINES}
                for _ in range(repeats):
                    for name in ENGINES:
                        found[name].append(run_measurement(name, model, sizes))
                best = {
                    name: EngineSpeed(
                        max(one.tokens_per_s for one in speeds),
                        min(one.start_s for one in speeds),
                        min(one.update_ms for one in speeds),
                    )
                    for name, speeds in found.items()
                }
                ratio = best["transformers"].tokens_per_s / best["vllm"].tokens_per_s
                rows.append(
                    {"model": model_name, "work": size_name, "ratio": ratio}
                    | {name: asdict(speed) for name, speed in best.items()}
                )
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table()
    for column in ("model", "work", "engine", "tokens/s", "over vLLM", "start s", "update ms"):
        table.add_column(column)
    for row in rows:
        for name in ENGINES:
            speed = row[name]
            table.add_row(
                row["model"], row["work"], name, f"{speed['tokens_per_s']:,.0f}",
                f"{row['ratio']:.2f}" if name == "transformers" else "",
                f"{speed['start_s']:.1f}", f"{speed['update_ms']:.1f}",
            )  # fmt: skip
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each engine (default: 3)")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, model, *sizes = options.measure
        samples, prompt, reply = map(int, sizes)
        print(json.dumps(asdict(measure_engine(name, Path(model), samples, prompt, reply))))
        return
    rows = compare_engines(options.repeats)
    print_rows(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
