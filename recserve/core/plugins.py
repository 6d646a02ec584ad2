"""Classes that other distributions register under an entry-point group, and what they may raise."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Collection, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, TypeVar


class Pluggable:
    """A class that requests and settings select by name.

    Attributes:
        name: The name.
    """

    name: ClassVar[str] = ""


T = TypeVar("T", bound=Pluggable)
OWN = ("recserve", "torch", "threading", "concurrent", "asyncio")


class PluginError(RuntimeError):
    """An installed distribution registers a plug-in that cannot be used."""


class PluginExit(RuntimeError):
    """Code that ran for a request raised an error that would end a thread, such as SystemExit."""


def request_error(error: BaseException) -> Exception:
    """Returns the error that a request fails with, whatever the code that ran for it has raised.

    An Exception stays what it is. SystemExit and its like would end the engine's thread or the
    event loop, and with it the requests of others: they become a PluginExit, which names the code
    that raised them.

    Raises:
        BaseException: On the main thread, an error that ends the program, such as Ctrl-C.
    """
    if isinstance(error, Exception):
        return error
    exits = isinstance(error, SystemExit | GeneratorExit)
    if not exits and threading.current_thread() is threading.main_thread():
        raise error
    found = PluginExit(f"{_raiser(error)} raised {error!r}")
    found.__cause__ = error
    return found


def _raiser(error: BaseException) -> str:
    """Returns the name of the first function outside of this package that an error came through,
    or of the last one of this package.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [f"{f.f_globals.get('__name__', '?')}.{f.f_code.co_qualname}" for f in frames]
    outside = [name for name in names if name.split(".")[0] not in OWN]
    return (outside or names[-1:] or ["unknown code"])[0]


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
    return classes | plugins(group, base, classes)


def plugins(group: str, base: type[object], taken: Collection[str]) -> dict[str, Any]:
    """Returns the classes of an entry-point group; arguments and errors as in `with_plugins`.

    Args:
        group: Entry-point group.
        base: Class that all of them derive from.
        taken: Names that no entry may have.
    """
    classes: dict[str, Any] = {}
    for entry in entry_points(group=group):
        if entry.name in classes or entry.name in taken:
            raise PluginError(
                f"{_source(entry)}: the name {entry.name!r} is already taken; uninstall one"
            )
        classes[entry.name] = _load(entry, base)
    return classes


def _load(entry: EntryPoint, base: type[object]) -> type[Pluggable]:
    try:
        found = entry.load()
    except BaseException as error:
        raise PluginError(f"{_source(entry)} cannot be loaded: {request_error(error)!r}") from error
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
