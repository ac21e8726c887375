"""Packs what generators on other hosts fetch: a copy of the model's small files, and a list of the rows."""

import shutil
from pathlib import Path

from buffers.files import UNFINISHED, naming_full_disk
from buffers.parcel_messages import Parcel
from buffers.parcels import MODEL, PARCELS, PackedParcel, describe_files, write_parcels
from configs.schema import Config
from generators.data.cache import find_cache, list_cached_files, read_meta
from generators.data.run_data import name_folders
from sync.model_files import copy_model_files, list_model_files


def pack_parcels(config: Config, folder: Path) -> None:
    """Writes the list of parcels into the run's folder, and the small files of the model beside it.

    A resumed run takes the model as it is now. Where its folder is gone, the copy stays as it was. Raises
    DiskFull.
    """
    packed = []
    copy = folder / MODEL
    _copy_model(Path(config.model.path), copy)
    if copy.is_dir():
        files = describe_files(copy, list_model_files(copy))
        packed.append(PackedParcel(MODEL, Parcel(name=MODEL, files=files)))
    for name in name_folders(config):
        rows = find_cache() / name
        if read_meta(rows) is not None:
            packed.append(
                PackedParcel(str(rows.absolute()), Parcel(name=name, files=list_cached_files(rows)))
            )
    write_parcels(folder / PARCELS, packed)


def _copy_model(model: Path, copy: Path) -> None:
    """Makes the copy hold the small files of the model as they are now."""
    names = list_model_files(model)
    if "config.json" not in names or describe_files(model, names) == describe_files(
        copy, list_model_files(copy)
    ):
        return
    unfinished = copy.with_name(f"{copy.name}{UNFINISHED}")
    for leftover in (unfinished, copy):
        shutil.rmtree(leftover, ignore_errors=True)
    with naming_full_disk(unfinished):
        unfinished.mkdir()
        copy_model_files(model, unfinished)
        unfinished.rename(copy)
