"""Classes that a setting names: one of those that come with the code, or `module:Class` from anywhere."""

import importlib
from collections.abc import Mapping
from typing import Any


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
    module, _, class_name = known.get(name, name).partition(":")
    try:
        plugin_class = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{setting} must name a class that can be imported, got {name!r}: {error}"
        ) from error
    if not isinstance(plugin_class, type):
        kind = type(plugin_class).__name__
        raise ValueError(f"{setting} must name a class, got {name!r}, which is a {kind}")
    return plugin_class


def call_plugin(plugin_class: type, name: str, args: Mapping[str, Any], args_setting: str) -> Any:
    """Returns an object of the class. Raises ValueError that names `args_setting`, the rule and the value."""
    try:
        return plugin_class(**args)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{args_setting} must suit {name}, got {dict(args)}: {error}") from error
