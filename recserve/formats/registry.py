"""The formats by name. A new format is one file here and one line in `BUILT_IN`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from recserve.core.plugins import with_plugins
from recserve.formats.checkpoint_format import CheckpointFormat, ImportFault, ImportOptions
from recserve.formats.generic import Generic
from recserve.formats.lc_rec import LcRec
from recserve.formats.minionerec import MiniOneRec
from recserve.formats.openonerec import OpenOneRec

ENTRY_POINTS = "recserve.formats"
BUILT_IN: tuple[type[CheckpointFormat], ...] = (Generic, MiniOneRec, LcRec, OpenOneRec)


@cache
def formats() -> Mapping[str, type[CheckpointFormat]]:
    """Returns all formats by name, those of installed plug-ins last. Raises PluginError."""
    return with_plugins(ENTRY_POINTS, CheckpointFormat, BUILT_IN)


def open_format(options: ImportOptions) -> CheckpointFormat:
    """Returns the format of an import.

    Raises:
        ImportFault: If there is no such format, or its options do not fit.
    """
    name = options.format
    if name is None and options.id_format is not None:
        name = Generic.name
    if name is None or name not in formats():
        given = "no format is given" if name is None else f"format is {name[:80]!r}"
        raise ImportFault(f"{given}; choose --format {' or '.join(formats())}")
    return formats()[name](options)
