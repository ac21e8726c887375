"""The generator's part of the parity probe (`buffers.probe`): sequences of many lengths, whose last tokens its engine samples.

Prompts are drawn from a seed. What is sampled at their end has been through all that a rollout goes through: the prompt's forward
pass, the cache, decoding in a batch, the sampler.
"""

import random
import time
from pathlib import Path

from buffers import messages as m
from buffers.client import BufferClient
from buffers.probe import is_probed, num_sampled, probe_lengths
from buffers.trajectory import Trajectory, encode, to_batch
from buffers.vocabulary import ANY, read_vocabulary
from configs.generators import EngineKind
from configs.schema import Config
from generators.engine import Completion, Engine, Sample
from generators.group import sample_of, sample_seed

PROBE = -1
"""Stands in the ids of samples where others have their lease."""
FEW = 256
"""Token ids that any model has: for one that does not say how many it has."""


class ParityProbe:
    """An engine's probe of the first version that it takes up of each life of the learner, and of those that are probed in any case. It
    is driven by the generator's loop, and stands outside the ledger, as evaluation does."""

    def __init__(self, config: Config, generator: str) -> None:
        self._config, self._generator = config, generator
        self._life = self._weights = ""
        self._prompts: list[list[int]] = []
        self._done: dict[int, Completion] = {}
        self._began_at = 0.0

    @property
    def num_unfinished(self) -> int:
        """Samples of a probe that the engine has not finished."""
        return len(self._prompts) - len(self._done)

    def begin(self, engine: Engine, weights: str, life: str, version: int) -> None:
        """Puts the probe into the engine, which has taken up `weights`, if they are to be probed."""
        is_due = life != self._life or is_probed(self._config, version)
        if not is_due or self._config.generators.engine is EngineKind.simulated:
            return
        engine.abort([_name(place) for place in range(len(self._prompts))])
        known, seed = read_vocabulary(Path(self._config.model.path)), self._config.run.seed
        vocabulary = known if known < ANY else FEW
        drawn = random.Random(f"parity probe {seed} {version}")
        lengths = probe_lengths(self._config)
        self._prompts = [[drawn.randrange(vocabulary) for _ in range(n - num_sampled(n))] for n in lengths]
        self._life, self._weights, self._done, self._began_at = life, weights, {}, time.time()
        for place, (prompt, length) in enumerate(zip(self._prompts, lengths, strict=True)):
            engine.add(
                Sample(
                    id=_name(place), prompt=prompt, max_tokens=length - len(prompt), forced=True,
                    seed=sample_seed(seed, "probe", version, place),
                )
            )  # fmt: skip

    def take(self, completion: Completion, client: BufferClient) -> None:
        """Takes a finished sample of the probe; the last one sends all of them to the buffer."""
        self._done[sample_of(completion.id)] = completion
        if len(self._done) == len(self._prompts):
            rows = to_batch([self._row(place) for place in range(len(self._prompts))])
            client.post(
                m.SubmitParityProbe(generator=self._generator, manifest_locator=self._weights), encode(rows)
            )

    def _row(self, place: int) -> Trajectory:
        prompt, completion = self._prompts[place], self._done[place]
        unsampled = len(prompt)
        return Trajectory(
            group=0, sample=place, due=completion.versions[0], prompt_id=0, task="parity probe",
            tokens=[*prompt, *completion.tokens], sampled=[False] * unsampled + [True] * len(completion.tokens),
            logprobs=[0.0] * unsampled + completion.logprobs, versions=[-1] * unsampled + completion.versions, reward=0.0,
            finish_reason=completion.finish_reason, generator=self._generator, started_at=self._began_at,
            finished_at=time.time(),
        )  # fmt: skip


def _name(place: int) -> str:
    return f"{PROBE}/{place}"
