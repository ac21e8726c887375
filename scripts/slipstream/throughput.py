"""How many tokens a run makes a second."""

from dataclasses import dataclass

from buffers.run_status import RunStatus


@dataclass(frozen=True, slots=True)
class TokenRates:
    """Tokens a second since the first version of this command was published."""

    generated: float
    trained: float


class Throughput:
    """Takes the tokens of earlier lives of a run away: a run that is resumed has their ledger, and a clock of
    its own."""

    def __init__(self, *, is_resumed: bool) -> None:
        self._before = None if is_resumed else (0, 0)
        """Tokens generated and trained when this command began; None until the buffer has told."""

    def note_status(self, status: RunStatus) -> None:
        """Takes each status of the run; the first one says what earlier lives have made."""
        if self._before is None:
            self._before = (status.tokens.total, status.tokens.trained)

    def measure(self, status: RunStatus) -> TokenRates:
        self.note_status(status)
        assert self._before is not None, "it has been noted"
        generated, trained = self._before
        tokens, seconds = status.tokens, max(status.elapsed_s, 1e-9)
        # A learner may go back to a checkpoint from before this command.
        return TokenRates((tokens.total - generated) / seconds, max(0, tokens.trained - trained) / seconds)
