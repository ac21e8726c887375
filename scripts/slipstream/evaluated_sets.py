"""The sets of an evaluation alone, and the digests of what decides their samples."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from configs.data import DataConfig
from configs.eval import HELD_OUT, EvalConfig
from configs.schema import Config
from generators.data.sources import read_sources
from generators.tasks import load_task
from generators.user_code.task_kinds import read_num_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloSet:
    """One evaluation set, ready to be played."""

    name: str
    config: Config
    """The configuration by which its prompts are made, answered and scored."""
    num_prompts: int
    samples: int = 1
    temperature: float | None = None
    """None: `sampling.temperature`."""
    k: Sequence[int] = (1,)
    passes_at: float = 1.0

    def digest_prompts(self) -> str:
        """Returns a digest of what decides the prompts and their scores, wherever their files are."""
        config = self.config
        rows = describe_rows(config.data) if config.task.name == "dataset" else []
        uses = [config.task.name, config.reward.function, *_list_uses(config.reward.parts)]
        code = {name: digest_code(name) for name in uses if name}
        task = [config.task.name, config.task.args, asdict(config.reward)]
        return digest_value([task, rows, code, config.run.seed])

    def digest_settings(self, model: str) -> str:
        """Returns a digest of all that decides the samples, but for the number of prompts. `model` is a
        digest of the model."""
        config, episodes = self.config, self.config.episodes
        temperature = config.sampling.temperature if self.temperature is None else self.temperature
        sampling = asdict(config.sampling) | {"temperature": temperature, "samples": self.samples}
        rendering = [episodes.renderer, episodes.exact, episodes.tool_parser, episodes.reasoning_parser]
        engine = [config.model.dtype, config.generators.engine, config.generators.max_model_len]
        return digest_value([model, self.digest_prompts(), sampling, rendering, episodes.max_turns, engine])


def list_sets(config: Config) -> list[SoloSet]:
    """Returns the sets of a configuration whose rows are prepared, with the number of their prompts.

    Raises ValueError for a task that cannot be made.
    """
    sets = []
    if config.eval.prompts:
        own = replace(config, eval=EvalConfig())
        task = load_task(config.task.name, config.task_arguments)
        known = read_num_prompts(task, "num_eval_prompts")
        count = config.eval.prompts if known is None else min(known, config.eval.prompts)
        sets.append(SoloSet(name=HELD_OUT, config=own, num_prompts=count))
    for name, one in config.eval.sets.items():
        assert one.num_prompts is not None, f"{name} has not been prepared"
        alone = replace(config.for_evaluation(one), eval=EvalConfig())
        sets.append(
            SoloSet(
                name=name,
                config=alone,
                num_prompts=one.num_prompts,
                samples=one.samples,
                temperature=one.temperature,
                k=one.pass_ks,
                passes_at=one.passes_at,
            )
        )
    return sets


def describe_rows(data: DataConfig) -> list[Any]:
    """Returns what decides the held-out rows, source by source. Files count by their contents."""
    split = "train" if data.eval is None else "eval"
    records = {record["name"]: record for record in data.prepared if record["split"] == split}
    return [
        [
            source.name,
            [source.task, source.args, digest_code(source.task or "")],
            [source.shape, source.chat_template_kwargs],
            [records[source.name][part] for part in ("store", "digest")] if source.path else None,
        ]
        for source in read_sources(asdict(data), split)
    ]


def digest_value(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


def digest_code(name: str) -> str:
    """Returns a digest of the file that `module:name` or `path.py:name` names; empty for a built-in name."""
    module, separator, _ = name.rpartition(":")
    if not separator:
        return ""
    path = Path(module) if module.endswith(".py") else None
    if path is None:
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        path = Path(found.origin) if found is not None and found.origin else None
    return xxhash.xxh3_64_hexdigest(path.read_bytes()) if path is not None and path.is_file() else ""


def _list_uses(parts: Sequence[Any]) -> list[str]:
    return [str(part["use"]) for part in parts if isinstance(part, Mapping) and part.get("use")]
