"""Measures what episodes cost an engine: turns, tool waits, scores that wait or hang.

    scripts/benchmark_episodes.sh [--groups 8] [--json FILE]

Each ratio is of two runs in this process, one after the other. 1 means that nothing is lost.

    turns            tokens a second of 8-turn episodes, replies of 32 and of 128 tokens; vLLM with the prefix
                     cache, a Qwen3 of 256 x 4, as many episodes side by side. Over those of long single turns
                     (one prompt and one reply with the tokens of all 8: the same contexts), and of short ones
                     (a prompt and a reply each: contexts of an eighth). The three are repeated by turns, and
                     the best of each counts
    tool waits       1,000 episodes side by side whose tool takes 1 s, over as many whose tool takes no time;
                     simulated engine whose slots are the bottleneck
    waiting scores   a score that takes 2 s, over one that takes no time; simulated engine, enough episodes
    slow judge       a judge that takes 20 s a call (`dataset`, over HTTP), over one that answers at once;
                     simulated engine with 8 slots, 160 episodes
    hanging score    one prompt whose score never ends, over a run without it; simulated engine
    gateway          milliseconds that a call through the gateway adds, over a call of the same handler
    own CPU          processor milliseconds of a turn in this process, the engine's steps left out
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.load import load_config
from configs.schema import Config
from generators.engine import Engine
from generators.simulated_engine import SimulatedEngine
from generators.task_episodes import TaskEpisodes
from slipstream_bench.byte_tokenizer import make_byte_tokenizer
from slipstream_bench.episode_driver import EpisodeCost, open_driver
from slipstream_bench.gateway_latency import measure_gateway
from slipstream_bench.slow_judge import serve_judge
from sync.manifest import Manifest
from sync.publisher import Publisher
from sync.snapshot import Snapshot
from sync.stream import whole_parts

TURNS, REPLY_TOKENS, SAMPLES, REPEATS = 8, (32, 128), 4, 2
TASKS = "slipstream_bench.waiting_tasks"
say = Console(stderr=True)


def make_config(task: str, args: dict[str, Any], *overrides: str) -> Config:
    arguments = ", ".join(f"{name}: {'null' if value is None else value}" for name, value in args.items())
    return load_config(
        [
            f"task.name={TASKS}:{task}",
            f"task.args={{{arguments}}}",
            "generators.max_model_len=2048",
            f"sampling.max_tokens={REPLY_TOKENS[0]}",
            "episodes.renderer=plain",
            "episodes.exact=false",
            *overrides,
        ]
    )


def play_groups(engine: Engine, config: Config, num_groups: int, max_episodes: int) -> EpisodeCost:
    """Plays groups of the configured task. A first round, which starts all workers, is left out."""
    episodes = TaskEpisodes(config, make_byte_tokenizer())
    with open_driver(engine, episodes, config.sampling.max_tokens, max_episodes) as driver:
        driver.play_groups(max_episodes // SAMPLES, SAMPLES)
        return driver.play_groups(num_groups, SAMPLES)


# ---- vLLM: turns


def make_engine(folder: Path) -> tuple[Engine, Publisher]:
    """Returns an engine that never samples an end, so that every reply is as long as it may be."""
    from generators.vllm_engine import VllmEngine

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=320,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    model.save_pretrained(folder / "model")
    publisher = Publisher(folder / "weights", "benchmark")
    manifest: Manifest = publisher.publish_version(0, whole_parts(dict(model.state_dict())))
    engine = VllmEngine(
        str(folder / "model"), dtype="float32", max_model_len=2048, max_sequences=32, kv_cache_mb=512,
        prefix_cache=True,
    )  # fmt: skip
    engine.load_version(Snapshot(manifest))
    return engine, publisher


def measure_turns(engine: Engine, reply_tokens: int, num_groups: int) -> dict[str, float]:
    def play_task(task: str, turns: int, max_tokens: int, groups: int) -> EpisodeCost:
        config = make_config(task, {"turns": turns}, f"sampling.max_tokens={max_tokens}")
        return play_groups(engine, config, groups, 32)

    rounds = [
        (
            play_task("WaitingEnvironment", TURNS, reply_tokens, num_groups),
            play_task("WaitingTask", TURNS, TURNS * reply_tokens, num_groups),
            play_task("WaitingTask", 1, reply_tokens, TURNS * num_groups),
        )
        for _ in range(REPEATS)
    ]
    many, long, short = (
        max(costs, key=lambda cost: cost.tokens_per_s) for costs in zip(*rounds, strict=True)
    )
    return {
        "over_long": many.tokens_per_s / long.tokens_per_s,
        "over_short": many.tokens_per_s / short.tokens_per_s,
        "tokens_per_s": many.tokens_per_s,
        "long_tokens_per_s": long.tokens_per_s,
        "short_tokens_per_s": short.tokens_per_s,
        "own_cpu_ms_per_turn": many.cpu_ms_per_turn,
    }


def measure_lengths(folder: Path, num_groups: int) -> dict[str, dict[str, float]]:
    engine, publisher = make_engine(folder)
    found = {f"{TURNS} turns of {n} tokens": measure_turns(engine, n, num_groups) for n in REPLY_TOKENS}
    engine.shutdown()
    publisher.close()
    return found


# ---- simulated engine: waits


def make_simulated(tokens_per_s: float = 100, slots: int = 64) -> SimulatedEngine:
    """Returns an engine that holds a version, which it does not read."""
    engine = SimulatedEngine(tokens_per_s=tokens_per_s, slots=slots, mean_tokens=16, cv=0.5)
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(Path(folder), "benchmark")
        engine.load_version(Snapshot(publisher.publish_version(0, whole_parts({"w": torch.zeros(1)}))))
        publisher.close()
    return engine


def compare(
    task: str,
    slow: dict[str, Any],
    quick: dict[str, Any],
    num_groups: int,
    max_episodes: int,
    *overrides: str,
) -> dict[str, float]:
    """Returns the ratio of tokens a second of two settings of a task, and what each had."""
    costs = [
        play_groups(make_simulated(), make_config(task, args, *overrides), num_groups, max_episodes)
        for args in (slow, quick)
    ]
    return compare_costs(costs)


def compare_costs(costs: list[EpisodeCost]) -> dict[str, float]:
    return {
        "ratio": costs[0].tokens_per_s / costs[1].tokens_per_s,
        "tokens_per_s": costs[0].tokens_per_s,
        "own_cpu_ms_per_turn": costs[0].cpu_ms_per_turn,
        "failed_groups": costs[0].num_failed,
    }


def measure_waits() -> dict[str, dict[str, float]]:
    wide = ["episodes.max_concurrent=1000", "generators.max_sequences=1000"]
    return {
        "tool waits": compare(
            "WaitingEnvironment", {"turns": 4, "wait_s": 1.0}, {"turns": 4, "wait_s": 0.0}, 500, 1000, *wide
        ),
        "waiting scores": compare("WaitingTask", {"wait_s": 2.0}, {"wait_s": 0.0}, 500, 1000, *wide),
        "hanging score": compare(
            "WaitingTask", {"hangs": 60}, {"hangs": None}, 300, 128, "episodes.score_timeout_s=5"
        ),
    }


def measure_judge(wait_s: float = 20.0, num_groups: int = 60) -> dict[str, float]:
    """The engine ends 5 episodes a second, so 100 wait for the slow judge at a time."""
    costs = []
    for each_s in (wait_s, 0.0):
        with serve_judge(each_s) as url:
            rewards = (
                f"[{{use: judge, url: '{url}', model: judge, prompt: 'Grade: {{response}}', "
                f"max_concurrent: 200, attempt_timeout_s: {wait_s + 8}, timeout_s: {wait_s + 9}}}]"
            )
            config = make_config(
                "WaitingTask",
                {},
                "task.name=dataset",
                f"episodes.score_timeout_s={wait_s + 10}",
                "task.args={}",
                f"data.train={{task: '{TASKS}:WaitingTask'}}",
                f"reward.parts={rewards}",
                "episodes.max_concurrent=160",
            )
            engine, episodes = make_simulated(10, slots=8), TaskEpisodes(config, make_byte_tokenizer())
            with open_driver(engine, episodes, config.sampling.max_tokens, 160) as driver:
                costs.append(driver.play_groups(num_groups, SAMPLES))
    return compare_costs(costs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=8, help="groups of 4 episodes that vLLM plays")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    found: dict[str, Any] = measure_waits() | {"slow judge": measure_judge()}
    found["gateway"] = measure_gateway()
    with tempfile.TemporaryDirectory() as folder:
        found.update(measure_lengths(Path(folder), options.groups))
    table = Table("figure", "value")
    for part, figures in found.items():
        for name, value in figures.items():
            table.add_row(f"{part}: {name}", f"{value:.3f}")
    say.print(table)
    text = json.dumps(found, indent=2)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
