"""The tables of samples: a few rows of the journal, decoded by the driver."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from buffers.message_fields import GroupSlice, shorten
from buffers.segments import DamagedGroup, Reader
from configs.schema import Config
from slipstream.tracking.tracker import SampleRow

MAX_TOKENS = 2048
"""Tokens of a prompt, and of a reply, that are decoded: half from the beginning, half from the end."""


class SampleReader:
    """Reads samples where the buffer says that they are. Memory and time are bounded, however long they
    are."""

    def __init__(self, config: Config, journal: Path) -> None:
        """Raises OSError or ValueError where the model's tokenizer cannot be loaded."""
        self._journal = journal
        self._tokenizer = load_tokenizer(Path(config.model.path))
        self._count = config.tracking.samples.count
        self._sources = [source["name"] for source in config.task.sources]

    def read_samples(self, step: int, slices: Sequence[GroupSlice]) -> list[SampleRow]:
        """Returns the samples of a step, one of each group in turn. A group whose bytes are gone is passed
        over."""
        groups: dict[int, list[dict[str, Any]]] = {}
        # A reader keeps segments mapped, which would hold the bytes of those that retention deletes.
        reader = Reader(self._journal)
        for one in slices:
            try:
                batch = reader.read(one)
            except (DamagedGroup, OSError):
                continue
            groups_of_rows, branches = (batch.column(name).to_pylist() for name in ("group", "branch"))
            for row, (group, branch) in enumerate(zip(groups_of_rows, branches, strict=True)):
                if branch == 0:
                    groups.setdefault(group, []).append({"batch": batch, "row": row})
        longest = max(map(len, groups.values()), default=0)
        in_turn = [rows[turn] for turn in range(longest) for rows in groups.values() if turn < len(rows)]
        return [self._read_sample(step, **place) for place in in_turn[: self._count]]

    def _read_sample(self, step: int, batch: Any, row: int) -> SampleRow:
        def read_array(column: str) -> np.ndarray:
            values: np.ndarray = batch.column(column)[row].values.to_numpy(zero_copy_only=False)
            return values

        tokens, sampled, versions = map(read_array, ("tokens", "sampled", "versions"))
        begin = int(sampled.argmax()) if sampled.any() else len(tokens)
        prompt_id = batch.column("prompt_id")[row].as_py()
        num_sources = len(self._sources)
        is_mixture = num_sources > 1
        return SampleRow(
            group=batch.column("group")[row].as_py(),
            source=self._sources[prompt_id % num_sources]
            if is_mixture
            else batch.column("task")[row].as_py(),
            prompt=self._decode_tokens(tokens[:begin]),
            reply=self._decode_tokens(tokens[begin:]),
            reward=batch.column("reward")[row].as_py(),
            components=dict(batch.column("rewards")[row].as_py()),
            staleness=step - int(versions[sampled].min(initial=step)),
            tokens=int(sampled.sum()),
            stop=batch.column("stop")[row].as_py(),
        )

    def _decode_tokens(self, tokens: np.ndarray) -> str:
        half = MAX_TOKENS // 2
        parts = [tokens] if len(tokens) <= MAX_TOKENS else [tokens[:half], tokens[-half:]]
        texts = [self._tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in parts]
        # A tokenizer may give half a surrogate pair, which is no text.
        return shorten(" ... ".join(texts).encode(errors="replace").decode())


def load_tokenizer(model: Path) -> Any:
    """Returns an object with `decode`. Raises OSError or ValueError where there is none."""
    if (path := model / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))
    if not model.is_dir():
        raise FileNotFoundError(f"{model} is no folder with a tokenizer")
    # Here, because the library takes seconds to import.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)
