"""What the generators say of themselves, added up over all of them and over the lives of each."""

from typing import Any

from buffers import messages as m


class Fleet:
    def __init__(self) -> None:
        self._lives: dict[str, list[m.GeneratorReport]] = {}
        """The latest report of each life, by generator."""

    def join(self, generator: str) -> None:
        """A new life begins."""
        self._lives.setdefault(generator, []).append(m.GeneratorReport())

    def report(self, generator: str, report: m.GeneratorReport) -> bool:
        """Takes in a report; true if the generator has sampled since its last."""
        lives = self._lives.setdefault(generator, [m.GeneratorReport()])
        moved = report.sampled_tokens > lives[-1].sampled_tokens
        lives[-1] = report
        return moved

    def summary(self) -> dict[str, Any]:
        """The fields of `messages.Status` that speak of generators."""
        lives = [life for lives in self._lives.values() for life in lives]
        alive = sum(life.alive_s for life in lives)
        updates = sum(life.updates for life in lives)
        return {
            "generators": {name: lives[-1] for name, lives in self._lives.items()},
            "generator_idle": sum(life.idle_s for life in lives) / alive if alive else 0.0,
            "weight_updates": updates,
            "weight_bytes": sum(life.update_bytes for life in lives),
            "fetched_bytes": sum(life.fetched_bytes for life in lives),
            "prepare_s_mean": sum(life.prepare_s for life in lives) / max(1, updates),
            "pause_s_mean": sum(life.pause_s for life in lives) / max(1, updates),
            "digest_checks": sum(life.digest_checks for life in lives),
            "digest_mismatches": sum(life.digest_mismatches for life in lives),
        }
