"""`cluster`: the Ray cluster that runs the roles."""

from dataclasses import dataclass

from configs.setting import Section, setting


@dataclass(kw_only=True, slots=True)
class ClusterConfig(Section):
    """The Ray cluster that runs the roles."""

    address: str | None = setting(None)
    """Ray cluster to join (`auto` or host:port). Null starts one inside this run and stops it with the
    run."""
