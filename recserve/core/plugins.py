"""Classes that other distributions register under an entry-point group."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar, TypeVar, cast


class Pluggable:
    """A class that requests and settings select by name.

    Attributes:
        name: The name.
    """

    name: ClassVar[str] = ""


T = TypeVar("T", bound=Pluggable)


class PluginError(RuntimeError):
    """An installed distribution registers a plug-in that cannot be used."""


def with_plugins(group: str, base: type[object], built_in: Sequence[type[T]]) -> dict[str, type[T]]:
    """Returns the built-in classes and those of an entry-point group, by attribute `name`.

    Args:
        group: Entry-point group. An entry's name must equal the name of its class.
        base: Class that all of them derive from.
        built_in: Classes of this package.

    Raises:
        PluginError: If an entry cannot be loaded, has another type, or has a name that is taken.
            The message names the distribution.
    """
    classes = {cls.name: cls for cls in built_in}
    for entry in entry_points(group=group):
        if entry.name in classes:
            raise PluginError(
                f"{_source(entry)}: the name {entry.name!r} is already taken; uninstall one"
            )
        classes[entry.name] = cast(type[T], _load(entry, base))
    return classes


def _load(entry: EntryPoint, base: type[object]) -> type[Pluggable]:
    try:
        found = entry.load()
    except Exception as error:
        raise PluginError(f"{_source(entry)} cannot be loaded: {error!r}") from error
    if not (isinstance(found, type) and issubclass(found, base) and issubclass(found, Pluggable)):
        raise PluginError(f"{_source(entry)} is not a class derived from {base.__name__}")
    if found.name != entry.name:
        raise PluginError(
            f"{_source(entry)}: the class has name = {found.name!r}; use the same in both"
        )
    return found


def _source(entry: EntryPoint) -> str:
    dist = "an unknown distribution" if entry.dist is None else entry.dist.name
    return f"plugin of {dist}: entry point {entry.name} = {entry.value} in {entry.group}"
