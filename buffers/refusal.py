"""A request that a buffer does not take."""


class Refusal(ValueError):
    """A request that does not fit. `reason` is one of a few, the text says which request and why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
