"""The versions of a live catalogue that a rollback can restore."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from recserve.features.catalog.versions import CatalogVersion, VersionName, compact_log
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
        since_s: Time at which a log of several servers stored the version, so that all of them can
            restore the same ones; else the clock value at which it was published.
    """

    items: CatalogVersion
    base_trie: Trie
    since_s: float


class VersionArchive:
    """The versions that a rollback can restore: dense for recent times, sparse before.

    The archive holds three groups of versions:

    - the version of the bundle, always;
    - the MAX_NEWEST newest versions;
    - at most MAX_OLDER earlier versions, published at least MIN_INTERVAL_S apart. They reach two
      hours back when change sets arrive without a pause. Of a log of several servers it is the
      first version in each MIN_INTERVAL_S of the clock, behind the snapshot of the log.

    A version stores only the changes since the bundle. An older version gives up what it does not
    share with later ones:

    - its own base trie, which holds the whole catalogue; it uses the bundle's;
    - its log, which also holds the earlier records of each item; it gets one with the latest only.

    Attributes:
        bundle: The version of the bundle.
    """

    def __init__(
        self,
        items: CatalogVersion,
        base_trie: Trie,
        now: Callable[[], float] = time.monotonic,
        compact: Callable[[CatalogVersion], CatalogVersion] = compact_log,
    ) -> None:
        """Starts an archive with the version of the bundle.

        Args:
            items: The version of the bundle.
            base_trie: Trie of the bundle.
            now: Clock in seconds.
            compact: Returns a version with the same content and a short log.
        """
        self._now, self._compact = now, compact
        self.bundle = ArchivedVersion(items, base_trie, now())
        self._newest: OrderedDict[str, ArchivedVersion] = OrderedDict()
        self._older: OrderedDict[str, ArchivedVersion] = OrderedDict()
        self._left_s = 0.0  # time of the version that left the newest ones last

    def add(self, items: CatalogVersion, base_trie: Trie) -> None:
        """Adds the newest version, or replaces it after its base trie has changed.

        Args:
            items: The version.
            base_trie: Base trie of this version or of an earlier one.
        """
        if not items.number:  # after the loss of a log; it is the version of the bundle
            return
        since_s = items.time_ms / 1e3 if items.epoch else self._now()
        self._newest[items.name] = ArchivedVersion(items, base_trie, since_s)
        while len(self._newest) > MAX_NEWEST:
            name, version = self._newest.popitem(last=False)
            if self._stays(version):
                items = self._compact(version.items)
                self._older[name] = ArchivedVersion(items, self.bundle.base_trie, version.since_s)
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
        if name == self.bundle.items.name:
            return self.bundle
        raise UnknownVersion(
            f"catalog_version {name[:80]!r} is unavailable; {self._name_nearest(name)}"
        )

    def _stays(self, version: ArchivedVersion) -> bool:
        """Whether a version stays when it leaves the newest ones.

        Of a log of several servers, the first one in each interval of the clock stays. So all
        servers have the same ones, wherever in the log they began.
        """
        before_s, self._left_s = self._left_s, version.since_s
        if version.items.epoch:
            return version.since_s // MIN_INTERVAL_S != before_s // MIN_INTERVAL_S
        last = next(reversed(self._older.values()), self.bundle)
        return version.since_s - last.since_s >= MIN_INTERVAL_S

    def oldest(self, recent: bool) -> CatalogVersion:
        """Returns the oldest version behind the bundle, or the oldest of the newest ones."""
        versions = self._newest if recent or not self._older else self._older
        return next(iter(versions.values()), self.bundle).items

    def start_at(self, number: int) -> None:
        """Drops what a server cannot restore that began with the snapshot of a version.

        It has the version itself only while it is one of the newest ones.
        """
        for versions, first in ((self._older, number + 1), (self._newest, number)):
            while versions and next(iter(versions.values())).items.number < first:
                versions.popitem(last=False)

    def clear(self) -> None:
        """Drops all versions except that of the bundle."""
        self._newest.clear()
        self._older.clear()
        self._left_s = 0.0

    def __len__(self) -> int:
        return len({self.bundle.items.name, *self._newest, *self._older})

    def _name_nearest(self, name: str) -> str:
        versions = [self.bundle, *self._older.values(), *self._newest.values()]
        versions.sort(key=lambda version: version.items.number)
        asked = VersionName.parse(name)
        if asked is None or asked.bundle != self.bundle.items.name or not asked.number:
            oldest, newest = versions[0].items.name, versions[-1].items.name
            return f"there are {len(self)} versions, from {oldest} to {newest}"
        number = asked.number
        before = [version for version in versions if version.items.number < number][-1:]
        after = [version for version in versions if version.items.number > number][:1]
        return "the nearest are " + " and ".join(v.items.name for v in before + after)
