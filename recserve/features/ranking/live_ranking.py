"""Keeps ranking tables up to date with a live catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recserve.features.catalog.item_records import ItemRecord, RecordLog
from recserve.features.catalog.versions import CatalogVersion
from recserve.features.ranking.item_categories import category_matrix
from recserve.features.ranking.ranking_tables import RankingTables, standardise, unit_rows
from recserve.features.tables.arrays import ExtendedArray, GrowableArray, PatchedArray


class LiveRanking:
    """Makes the ranking tables of each catalogue version. Not thread-safe.

    Versions share their rows, and tables that were returned never change.

    Attributes:
        base: Tables of the bundle's catalogue.
    """

    def __init__(self, base: RankingTables) -> None:
        """base: Tables that are bound to the bundle's catalogue."""
        self.base = base
        self._every = np.arange(base.num_items)
        self._trained_rows = GrowableArray((), np.int64)
        self._counts = GrowableArray((), np.float32)
        self._sums = GrowableArray((), np.float32)
        self._vectors = GrowableArray(base.vectors.shape[1:], np.float32)
        self._log: RecordLog | None = None
        self._start_log()

    def at(self, version: CatalogVersion) -> RankingTables:
        """Returns the tables of a version."""
        if not version.num_tail and not version.num_records:
            return self.base
        self._follow_rows(version)
        if version.log is not self._log:
            self._log = version.log
            self._start_log()
        self._follow_records(version.log.records[self._categories.count : version.num_records])
        base, count = self.base, version.num_tail
        patch = (version.num_rows, version.record_rows, version.record_places)
        return replace(
            base,
            item_counts=ExtendedArray(np.asarray(base.item_counts), self._counts.view(count)),
            value_sums=ExtendedArray(np.asarray(base.value_sums), self._sums.view(count)),
            vectors=ExtendedArray(np.asarray(base.vectors), self._vectors.view(count)),
            trained_rows=ExtendedArray(self._every, self._trained_rows.view(count)),
            categories=PatchedArray(
                np.asarray(base.categories), *patch, self._categories.view(version.num_records)
            ),
            side=PatchedArray(np.asarray(base.side), *patch, self._side.view(version.num_records)),
        )

    def _start_log(self) -> None:
        """Starts empty tables for the records of a new log."""
        self._categories = GrowableArray(self.base.categories.shape[1:], np.int32)
        self._side = GrowableArray(self.base.side.shape[1:], np.float32)

    def _follow_rows(self, version: CatalogVersion) -> None:
        """Appends counts and vectors of rows that are new in this version."""
        first = self._trained_rows.count
        if first >= version.num_tail:
            return
        trained_rows = version.trained_rows[first:]
        fitted = trained_rows >= 0
        known = np.where(fitted, trained_rows, 0)
        rows = first + len(version.base) + np.arange(len(trained_rows))
        self._trained_rows.append(np.where(fitted, trained_rows, rows))
        self._counts.append(np.where(fitted, self.base.item_counts[known], 0))
        self._sums.append(np.where(fitted, self.base.value_sums[known], 0))
        self._vectors.append(unit_rows(version.vectors.tail[first:]))

    def _follow_records(self, records: Sequence[ItemRecord]) -> None:
        """Appends categories and numeric attributes of records that are new in this version."""
        if not records:
            return
        settings = self.base.settings
        names, weights = settings.category_names, settings.category_weights
        found = category_matrix([r.categories for r in records], names, weights)
        width = self.base.categories.shape[1]
        padded = np.full((len(records), max(width, found.shape[1])), len(names), np.int32)
        padded[:, : found.shape[1]] = found
        # Lists are sorted rarest first, so a list that is too long loses its common categories.
        self._categories.append(padded[:, :width])
        side = np.full((len(records), len(settings.side_names)), np.nan)
        for row, record in enumerate(records):
            for column, name in enumerate(settings.side_names):
                side[row, column] = record.attributes.get(name, np.nan)
        self._side.append(standardise(side, settings))
