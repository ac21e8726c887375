"""The bytes of versions that hosts keep in shared memory, by arithmetic. This file does not need torch.

    a host of the learner      the rows of its ranks: two versions and the spare, which the next one is
                               written over
    a host of generators       that lacks rows: the newest version, whole, and one that comes in over the
                               spare
    a host that merges         adapters travel, and each host merges them: two whole models

Patches are not counted: they are dropped where a version needs their room.
"""

from configs.parallel import LoraPublish
from configs.schema import Config
from configs.transports import Transport

KEPT = 2
"""Versions that the learner keeps (`sync.publisher.Publisher`)."""
SPARES = 1
FETCHED = 2
"""Versions that a host keeps of what it fetches, or merges."""


def count_kept_bytes(
    config: Config, version_bytes: int, model_bytes: int, *, share: float, has_engines: bool
) -> dict[str, float]:
    """Returns bytes in the shared memory of one host, by part.

    `share`: the part of a version's rows that the ranks on this host publish. `model_bytes`: bytes of a whole
    model as engines load it.
    """
    transport = config.sync.transport
    published = 0.0 if transport.row.shares_folder else (KEPT + SPARES) * share * version_bytes
    lora = config.learner.lora
    merges = lora.rank is not None and lora.publish is LoraPublish.adapter
    fetched = 0.0
    if has_engines and merges:
        fetched = float(FETCHED * (version_bytes + model_bytes))
    elif has_engines and transport is not Transport.nccl and not transport.row.shares_folder:
        fetched = FETCHED * (share < 1.0) * float(version_bytes)
    return {"published versions": published, "merged versions" if merges else "fetched versions": fetched}
