"""Classes that a setting names: one of those that come with the code, or `module:Class` or `path.py:Class`
from anywhere."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class KeyRefused(ValueError):
    """A class refuses the value of a key. The text names the key, the rule and the value."""


def make_plugin(
    name: str, args: Mapping[str, Any], known: Mapping[str, str], setting: str, args_setting: str
) -> Any:
    """Returns an object of the class that `name` names, made with the keyword arguments `args`.

    `known` maps the short names to `module:Class`; `setting` and `args_setting` are the keys that the user
    wrote. Raises ValueError that names one of the two, the rule and the value.
    """
    return call_plugin(find_plugin(name, known, setting), name, args, args_setting)


def find_plugin(name: str, known: Mapping[str, str], setting: str) -> type:
    """Returns the class that `name` names. Raises ValueError that names `setting`, the rule and the value."""
    if ":" not in name and name not in known:
        raise ValueError(f"{setting} must be one of {sorted(known)}, or read module:Class, got {name!r}")
    place, _, class_name = known.get(name, name).rpartition(":")
    try:
        module = import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        plugin_class = getattr(module, class_name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{setting} must name a class that can be imported, got {name!r}: {error}"
        ) from error
    if not isinstance(plugin_class, type):
        kind = type(plugin_class).__name__
        raise ValueError(f"{setting} must name a class, got {name!r}, which is a {kind}")
    return plugin_class


def import_file(path: Path) -> ModuleType:
    """Imports a file, once a process, under a name that follows from its path.

    Raises ImportError where there is none, and whatever its code raises.
    """
    path = path.expanduser().resolve()
    name = f"slipstream_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        if not path.is_file():
            raise ImportError(f"there is no file {path}")
        specification = importlib.util.spec_from_file_location(name, path)
        assert specification is not None and specification.loader is not None, path
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        # It may import files beside it. Later, a folder there would pass for a package of its name.
        is_new = (folder := str(path.parent)) not in sys.path
        if is_new:
            sys.path.append(folder)
        try:
            specification.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        finally:
            if is_new:
                sys.path.remove(folder)
    return sys.modules[name]


def call_plugin(plugin_class: type, name: str, args: Mapping[str, Any], args_setting: str) -> Any:
    """Returns an object of the class. Raises ValueError that names `args_setting`, the rule and the value;
    KeyRefused where the class itself says so."""
    try:
        return plugin_class(**args)
    except KeyRefused:
        raise
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{args_setting} must suit {name}, got {dict(args)}: {error}") from error
