"""The generator's part of the parity probe (`buffers.parity_probe`): the engine samples ends of sequences.

The sequences have many lengths, and their prompts are drawn from a seed. The tokens at their end go through
everything that a rollout goes through: the prompt's forward pass, the cache, decoding in a batch, and the
sampler.
"""

import random
import time
from pathlib import Path

from buffers import messages as m
from buffers.client import BufferClient
from buffers.trajectory import Trajectory, encode_batch, to_batch
from buffers.vocabulary import ANY, read_vocabulary
from configs.generators import EngineKind
from configs.parity_probe import count_sampled, is_probed, probe_lengths
from configs.schema import Config
from generators.engine import Completion, Engine, Sample
from generators.group import make_sample_id, make_sample_seed, parse_sample_index

PROBE_LEASE = -1
"""Lease id in the ids of the probe's samples, which no lease of the buffer has."""
SMALL_VOCABULARY = 256
"""Token ids that any model has. The probe draws from these where a model does not say how many it has."""


class ParityProbe:
    """Probes the first version of each life of the learner that this engine takes up, and versions that are
    always probed.

    The generator's loop drives it. Like evaluation, it stands outside the ledger.
    """

    def __init__(self, config: Config, generator: str) -> None:
        self._config, self._generator = config, generator
        self._life = self._manifest_locator = ""
        self._prompts: list[list[int]] = []
        self._completions: dict[int, Completion] = {}
        """By the prompt's place in the probe."""
        self._began_at = 0.0

    @property
    def num_unfinished(self) -> int:
        """Number of the probe's samples that the engine has not finished."""
        return len(self._prompts) - len(self._completions)

    def begin_if_due(self, engine: Engine, manifest_locator: str, life: str, version: int) -> None:
        """Adds the probe's samples to the engine, which has just loaded the announced version, if that
        version is to be probed."""
        is_due = life != self._life or is_probed(self._config, version)
        if not is_due or self._config.generators.engine is EngineKind.simulated:
            return
        # A probe of an older version that is still under way is worth nothing now.
        engine.abort_samples([make_sample_id(PROBE_LEASE, place) for place in range(len(self._prompts))])
        known, seed = read_vocabulary(Path(self._config.model.path)), self._config.run.seed
        vocabulary = known if known < ANY else SMALL_VOCABULARY
        rng = random.Random(f"parity probe {seed} {version}")
        lengths = probe_lengths(self._config)
        self._prompts = [[rng.randrange(vocabulary) for _ in range(n - count_sampled(n))] for n in lengths]
        self._life, self._manifest_locator, self._completions = life, manifest_locator, {}
        self._began_at = time.time()
        for place, (prompt, length) in enumerate(zip(self._prompts, lengths, strict=True)):
            engine.add_sample(
                Sample(
                    id=make_sample_id(PROBE_LEASE, place),
                    prompt=prompt,
                    max_tokens=length - len(prompt),
                    forced=True,
                    seed=make_sample_seed(seed, "probe", version, place),
                )
            )

    def take_completion(self, completion: Completion, client: BufferClient) -> None:
        """Takes a finished sample of the probe. After the last one all of them go to the buffer."""
        self._completions[parse_sample_index(completion.id)] = completion
        if len(self._completions) == len(self._prompts):
            rows = to_batch([self._make_trajectory(place) for place in range(len(self._prompts))])
            client.send_request(
                m.SubmitParityProbe(generator=self._generator, manifest_locator=self._manifest_locator),
                encode_batch(rows),
            )

    def _make_trajectory(self, place: int) -> Trajectory:
        prompt, completion = self._prompts[place], self._completions[place]
        return Trajectory(
            group=0,
            sample=place,
            due=completion.versions[0],
            prompt_id=0,
            task="parity probe",
            tokens=[*prompt, *completion.tokens],
            sampled=[False] * len(prompt) + [True] * len(completion.tokens),
            logprobs=[0.0] * len(prompt) + completion.logprobs,
            versions=[-1] * len(prompt) + completion.versions,
            reward=0.0,
            finish_reason=completion.finish_reason,
            generator=self._generator,
            started_at=self._began_at,
            finished_at=time.time(),
        )
