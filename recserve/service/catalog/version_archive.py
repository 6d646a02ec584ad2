"""The catalogue versions that a rollback can restore: dense for recent times, sparse before."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from recserve.features.catalog.catalog_version import CatalogVersion
from recserve.features.catalog.live_catalog import with_short_log
from recserve.kernels.trie.trie import Trie
from recserve.service.errors import UnknownVersion

MAX_NEWEST = 32
MAX_OLDER = 120
MIN_INTERVAL_S = 60.0


@dataclass(frozen=True)
class ArchivedVersion:
    """A catalogue version in the archive.

    Attributes:
        items: The version.
        base_trie: Base trie of this version or of an earlier one.
        since_s: Clock value at which the version was published.
    """

    items: CatalogVersion
    base_trie: Trie
    since_s: float


class VersionArchive:
    """Keeps the versions of a catalogue that a rollback can restore.

    The archive holds three groups of versions:

    - the version of the bundle, always;
    - the MAX_NEWEST newest versions;
    - at most MAX_OLDER earlier versions, published at least MIN_INTERVAL_S apart. They reach two
      hours back when change sets arrive without a pause.

    A version stores only the changes since the bundle. An older version gives up what it does not
    share with later ones:

    - its own base trie, which holds the whole catalogue; it uses the bundle's;
    - its log, which also holds the earlier records of each item; it gets one with the latest only.
    """

    def __init__(
        self,
        items: CatalogVersion,
        base_trie: Trie,
        now: Callable[[], float] = time.monotonic,
        shortened: Callable[[CatalogVersion], CatalogVersion] = with_short_log,
    ) -> None:
        """Starts an archive with the version of the bundle.

        Args:
            items: The version of the bundle.
            base_trie: Trie of the bundle.
            now: Clock in seconds.
            shortened: Returns a version with the same content and a short log.
        """
        self._now, self._shortened = now, shortened
        self._first = ArchivedVersion(items, base_trie, now())
        self._newest: OrderedDict[str, ArchivedVersion] = OrderedDict()
        self._older: OrderedDict[str, ArchivedVersion] = OrderedDict()

    @property
    def bundle(self) -> ArchivedVersion:
        """The version of the bundle."""
        return self._first

    def add(self, items: CatalogVersion, base_trie: Trie) -> None:
        """Adds the newest version, or replaces it after its base trie has changed.

        Args:
            items: The version.
            base_trie: Base trie of this version or of an earlier one.
        """
        self._newest[items.name] = ArchivedVersion(items, base_trie, self._now())
        while len(self._newest) > MAX_NEWEST:
            name, version = self._newest.popitem(last=False)
            last = next(reversed(self._older.values()), self._first)
            if version.since_s - last.since_s >= MIN_INTERVAL_S:
                items = self._shortened(version.items)
                self._older[name] = ArchivedVersion(items, self._first.base_trie, version.since_s)
        while len(self._older) > MAX_OLDER:
            self._older.popitem(last=False)

    def get(self, name: str) -> ArchivedVersion:
        """Returns a version by name.

        Raises:
            UnknownVersion: If the archive does not have it; the message names the nearest versions.
        """
        for versions in (self._newest, self._older):
            if name in versions:
                return versions[name]
        if name == self._first.items.name:
            return self._first
        raise UnknownVersion(f"catalog_version {name[:80]!r} is unavailable; {self._nearest(name)}")

    def __len__(self) -> int:
        return len({self._first.items.name, *self._newest, *self._older})

    def _nearest(self, name: str) -> str:
        versions = [self._first, *self._older.values(), *self._newest.values()]
        versions.sort(key=lambda version: version.items.number)
        bundle, _, last = name.rpartition(".")
        if bundle != self._first.items.name or not (last.isascii() and last.isdigit()):
            oldest, newest = versions[0].items.name, versions[-1].items.name
            return f"there are {len(self)} versions, from {oldest} to {newest}"
        number = int(last[:18])
        before = [version for version in versions if version.items.number < number][-1:]
        after = [version for version in versions if version.items.number > number][:1]
        return "the nearest are " + " and ".join(v.items.name for v in before + after)
