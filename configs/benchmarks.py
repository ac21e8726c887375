"""The catalogue of benchmarks: sets that users evaluate on by name.

A benchmark is a set of keys of `eval.sets.NAME`, each of which may be said otherwise. The rows come from the
Hugging Face hub, or from a file with the same columns (`eval.sets.gsm8k.data=test.parquet`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

MATH = {"function": "math"}
ANSWER_LETTER = r"(?i:\banswer(?:\s+is)?)[\s:*($]*([A-Z])\b"
"""The letter in a reply to a multiple-choice question; the last one counts."""
LETTER = {"function": "exact_match", "args": {"find": ANSWER_LETTER}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark of the catalogue."""

    title: str
    rows: int
    """Number of its rows on the hub."""
    columns: tuple[str, ...]
    """Columns that its form reads."""
    settings: Mapping[str, Any]
    """Keys of `eval.sets.NAME`."""
    source: str
    """Where it was published."""


def _describe(
    title: str, rows: int, columns: tuple[str, ...], source: str, data: str, form: str, **settings: Any
) -> Benchmark:
    told = MappingProxyType({"data": data, "form": form, **settings})
    return Benchmark(title=title, rows=rows, columns=columns, settings=told, source=source)


PROBLEM = ("problem", "answer")
GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "gsm8k": _describe(
            "GSM8K, test", 1319, ("question", "answer"), "Cobbe et al., 2021, arXiv 2110.14168",
            "hf:openai/gsm8k:main@test", "gsm8k", reward=MATH, temperature=0.0, max_tokens=1024,
        ),
        "math500": _describe(
            "MATH-500", 500, PROBLEM, "Lightman et al., 2023, arXiv 2305.20050; Hendrycks et al., 2021",
            "hf:HuggingFaceH4/MATH-500@test", "problem", reward=MATH, samples=4, max_tokens=4096,
        ),
        "aime24": _describe(
            "AIME 2024, I and II", 30, PROBLEM, "Mathematical Association of America",
            "hf:HuggingFaceH4/aime_2024@train", "problem", reward=MATH, samples=32, max_tokens=16384,
        ),
        "aime25": _describe(
            "AIME 2025, I and II", 30, PROBLEM, "Mathematical Association of America; MathArena",
            "hf:MathArena/aime_2025@train", "problem", reward=MATH, samples=32, max_tokens=16384,
        ),
        "aime26": _describe(
            "AIME 2026, I and II", 30, PROBLEM, "Mathematical Association of America; MathArena",
            "hf:MathArena/aime_2026@train", "problem", reward=MATH, samples=32, max_tokens=16384,
        ),
        "amc23": _describe(
            "AMC 12, 2023", 40, ("question", "answer"), "Mathematical Association of America",
            "hf:math-ai/amc23@test", "problem", reward=MATH, samples=16, max_tokens=8192,
        ),
        "mmlu_pro": _describe(
            "MMLU-Pro, test", 12032, ("question", "options", "answer"),
            "Wang et al., 2024, arXiv 2406.01574", "hf:TIGER-Lab/MMLU-Pro@test", "mmlu_pro",
            reward=LETTER, temperature=0.0, max_tokens=4096,
        ),
        "gpqa": _describe(
            "GPQA, main", 448, GPQA, "Rein et al., 2023, arXiv 2311.12022",
            "hf:Idavidrein/gpqa:gpqa_main@train", "gpqa", reward=LETTER, samples=4, max_tokens=8192,
        ),
        "gpqa_diamond": _describe(
            "GPQA, diamond", 198, GPQA, "Rein et al., 2023, arXiv 2311.12022",
            "hf:Idavidrein/gpqa:gpqa_diamond@train", "gpqa", reward=LETTER, samples=8, max_tokens=8192,
        ),
    }
)  # fmt: skip
