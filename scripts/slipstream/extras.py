"""Brings the optional packages that a configuration needs: the script that has started this program installs
them, and starts it again in the same process."""

import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import NoReturn

from configs.extras import list_needs
from configs.schema import Config
from slipstream.stop_signals import STOP_SIGNALS

SCRIPT = "SLIPSTREAM_SCRIPT"
"""Variable with the path of the script that has started this program, and can install extras."""
EXTRAS = "SLIPSTREAM_EXTRAS"
"""Variable with the extras that such a script installs, with a space between them."""


class ExtrasMissing(Exception):
    """The script has to install extras first. Not a ValueError: nothing is wrong with the configuration."""

    def __init__(self, script: str, extras: set[str]) -> None:
        super().__init__(f"{script} must install {', '.join(sorted(extras))}")
        self.script, self.extras = script, extras


def require_extras(config: Config) -> None:
    """Raises ExtrasMissing where the script can install what the configuration lacks, and ValueError where
    there is no script, or it has tried."""
    # Taken out: processes that begin from here on are not that script's program.
    script = os.environ.pop(SCRIPT, None)
    missing = [need for need in list_needs(config) if not is_installed(need.package)]
    tried = set(os.environ.get(EXTRAS, "").split())
    extras = {need.extra for need in missing}
    if script is not None and not extras <= tried:
        raise ExtrasMissing(script, extras | tried)
    if missing:
        raise ValueError(
            "\n".join(
                f"{need.setting} needs the package {need.package} (pip install 'slipstream[{need.extra}]' "
                "brings it), got none"
                for need in missing
            )
        )


def is_installed(package: str) -> bool:
    """True for a package that can be imported; false for a folder that only has its name."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # of the package around it
        return False
    return spec is not None and spec.origin is not None


def run_program(main: Callable[[list[str]], int]) -> NoReturn:
    """Runs a program to its end, and once more where its script has to install extras first."""
    try:
        sys.exit(main(sys.argv[1:]))
    except ExtrasMissing as missing:
        sys.stdout.flush()
        os.environ[EXTRAS] = " ".join(sorted(missing.extras))
        # A signal that this program ignores would be ignored by the next one too.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.execv(missing.script, [missing.script, *sys.argv[1:]])
