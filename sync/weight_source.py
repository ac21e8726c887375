"""A version on its way into an engine: the protocol between the transports and the engines."""

from typing import Any, Protocol

from sync.manifest import EngineMismatch, Manifest
from sync.snapshot import SnapshotLoader, expect_digests


class EngineWeights(SnapshotLoader, Protocol):
    """The weights of an inference engine, as a source sees them. `sync.vllm_plugin.WeightSync` implements it
    inside vLLM's worker, `sync.transformers_weights.TransformersWeights` on a model of transformers.

    Digests are returned by the names of the manifest's tensors.
    """

    @property
    def is_on_cpu(self) -> bool: ...

    def check_manifest(self, manifest: Manifest) -> None:
        """Raises DigestMismatch, the parameters untouched, unless the manifest's tensors make up the engine's
        model."""
        ...

    def receive_update(
        self, manifest: Manifest, update: dict[str, Any], group: dict[str, Any] | None = None
    ) -> None:
        """Lets the engine's own transfer engine receive the tensors that `update` describes, after it has
        joined `group`, if any."""
        ...

    def held_digests(self, manifest: Manifest) -> dict[str, str]:
        """Computes the digests of the parameters as they are now."""
        ...


class WeightSource(Protocol):
    """A version that an engine may take up. `Subscriber.prepare_version` returns it, and
    `Engine.load_version` takes it."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def checks(self) -> int:
        """Number of times that this process has compared the version's bytes with its manifest."""
        ...

    def attest(self) -> None:
        """Verifies beforehand what can be verified without the engine. Raises DigestMismatch."""
        ...

    def load_into(self, engine: EngineWeights) -> dict[str, str]:
        """Puts the version into the engine; returns the digests of the parameters afterwards, which the
        caller compares.

        Raises, the parameters untouched, FileNotFoundError when the version is gone and DigestMismatch when
        it is not what was published or does not fit the model.
        """
        ...


def load_attested(source: WeightSource, engine: EngineWeights) -> None:
    """Puts a version into an engine, and compares what the engine then holds with what was published.

    Raises, the parameters untouched, FileNotFoundError when the version is gone and DigestMismatch when it is
    not what was published or does not fit the model; EngineMismatch, the parameters in an unknown state, when
    they do not end up with the published digests.
    """
    expect_digests(source.manifest, source.load_into(engine), "the engine", EngineMismatch)
