"""The samples of a run's evaluations on disk, in the format of the journal's segments, which any Arrow reader
opens.

    evaluations/<set>/v<version>.arrow          all samples of a result, a record batch for each prompt
    evaluations/<set>/v<version>.unfinished     those of an evaluation that is under way
"""

import os
import re
from pathlib import Path

import numpy as np

from buffers.group_checks import ExpectedGroup, check_groups
from buffers.messages import SubmitEvaluation
from buffers.segments import HEAD, Segment
from buffers.trajectory import MalformedGroup, encode_batch
from buffers.vocabulary import read_routing, read_vocabulary
from configs.disk import write_all
from configs.schema import Config

FILE_NAME = re.compile(r"v(\d+)\.arrow")


class EvaluationSamples:
    """Writes the samples of evaluations as their answers come. Not thread-safe."""

    def __init__(self, config: Config, folder: Path) -> None:
        """Removes what a killed buffer has left unfinished: those evaluations begin anew."""
        self._config, self._folder = config, folder
        self._vocabulary = read_vocabulary(Path(config.model.path))
        self._routing = read_routing(Path(config.model.path), config.learner.moe.router_replay)
        self._open: dict[tuple[str, int], Segment] = {}
        """By set and version."""
        for left in folder.glob("*/*.unfinished"):
            left.unlink()

    def check_rows(self, answer: SubmitEvaluation, data: memoryview, prompt: int, version: int) -> memoryview:
        """Returns the rows of a prompt as they may be written. Raises MalformedGroup with the rule that they
        break."""
        config = self._config
        replies = [config.sampling.max_tokens, *(one.max_tokens or 0 for one in config.eval.sets.values())]
        found = check_groups(
            data,
            [ExpectedGroup(prompt, version, prompt, answer.num_rows)],
            num_samples=len(answer.rewards),
            newest_version=answer.newest_version,
            longest=config.generators.max_model_len + max(replies),
            vocabulary=self._vocabulary,
            routing=self._routing,
            max_turns=config.episodes.max_turns,
        )
        if isinstance(fault := found.verdicts[0], MalformedGroup):
            raise fault
        is_first = found.batch.column("branch").to_numpy() == 0
        rewards = found.batch.column("reward").to_numpy()[is_first]
        if not np.array_equal(rewards, np.array(answer.rewards, np.float32)):
            raise MalformedGroup("its rows must have the rewards that it names")
        return data if found.is_storable else memoryview(encode_batch(found.batch)).cast("B")

    def append_prompt(self, name: str, version: int, data: memoryview) -> None:
        """Writes the rows of a prompt. Raises DiskFull."""
        if (name, version) not in self._open:
            path = self._find_path(name, version).with_suffix(".unfinished")
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
            write_all(file, HEAD, path)
            self._open[name, version] = Segment(0, path, file)
        self._open[name, version].append(data)

    def finish_set(self, name: str, version: int) -> None:
        """Completes the file of a result. Raises DiskFull."""
        if (segment := self._open.pop((name, version), None)) is not None:
            segment.write_footer()
            os.close(segment.file)
            segment.path.rename(self._find_path(name, version))

    def rewind_to(self, step: int) -> None:
        """Removes what is under way, and the samples of versions that are undone."""
        self.close()
        for path in self._folder.glob("*/v*.arrow"):
            if (found := FILE_NAME.fullmatch(path.name)) is not None and int(found[1]) >= step:
                path.unlink()

    def close(self) -> None:
        """Removes what is under way."""
        for segment in self._open.values():
            os.close(segment.file)
            segment.path.unlink(missing_ok=True)
        self._open.clear()

    def _find_path(self, name: str, version: int) -> Path:
        return self._folder / name / f"v{version}.arrow"
