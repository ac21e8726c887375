"""The errors of user code, as the generator sees them."""


class UserCodeError(Exception):
    """The task's code has failed. The text says how, in a sentence."""

    def __init__(self, message: str, detail: str = "") -> None:
        """`detail` is for the log: the traceback, and the end of what the code printed."""
        super().__init__(message)
        self.detail = detail


class TaskRefused(UserCodeError):
    """The task cannot be imported or made, or its class lacks a method."""


class CallFailed(UserCodeError):
    """The code raised an error, or returned a value that is refused. Its worker lives on."""


class WorkerDied(UserCodeError):
    """The code missed its deadline, crashed, exited or printed too much. Its worker is gone, with all its
    children."""
