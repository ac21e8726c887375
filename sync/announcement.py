"""The announcement of a version: one line of text that the learner sends through the buffer to the
generators."""

import re
from pathlib import Path
from typing import NamedTuple

from configs.host import boot_id
from sync.manifest import Manifest

VERSION_NAME = r"v\d+-\w+"
"""Stem of the files of a version, `v<k>-<life>`, as a regular expression."""
DIGEST = re.compile(r"[0-9a-f]{32}")
MANIFEST_FILE = re.compile(rf"{VERSION_NAME}\.json")


class TransferFailed(FileNotFoundError):
    """A version cannot be brought to this host: nobody answers, or it is gone. The bytes that have arrived
    are kept for a later try."""


class Announcement(NamedTuple):
    address: str
    """Address at which hosts that do not see the path may fetch the version; empty: all hosts see it."""
    host: str
    """Boot id of the learner's host; empty: no host has the whole file."""
    digest: str
    """Digest of the manifest. Whichever way the version arrives, it has this digest or does not serve."""
    path: str
    """Path of the manifest on the learner's host."""


def announce_version(manifest: Manifest, address: str = "") -> str:
    """Returns the text `ADDRESS#HOST#DIGEST#MANIFEST`. `address`: see `Announcement`."""
    host = boot_id() if manifest.parts is None else ""
    return "#".join(Announcement(address, host, manifest.digest, manifest.locator))


def parse_announcement(text: str) -> Announcement:
    """Raises TransferFailed when the text is no announcement, as in a journal that an older program wrote."""
    fields = text.split("#", 3)
    is_whole = (
        len(fields) == 4 and DIGEST.fullmatch(fields[2]) and MANIFEST_FILE.fullmatch(Path(fields[3]).name)
    )
    if not is_whole:
        raise TransferFailed(f"weights must be announced as ADDRESS#HOST#DIGEST#MANIFEST, got {text[:200]!r}")
    return Announcement(*fields)
