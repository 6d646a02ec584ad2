"""Pages of the catalogue: items by popularity, searched by title and id."""

from __future__ import annotations

from recserve.features.catalog.catalog_version import CatalogVersion
from recserve.schemas.browse import ItemPage, ItemsQuery, ListedItem

# A call looks at this many items, which takes about 20 ms. Larger catalogues need several calls.
MAX_SCANNED = 20_000


def item_page(items: CatalogVersion, query: ItemsQuery) -> ItemPage:
    """Returns a page of items whose title or id contains the query.

    The item whose id equals the query comes first. If the catalogue changes between two calls, an
    item can be on both pages or on none.

    Args:
        items: The catalogue version.
        query: The page.
    """
    wanted = query.query.strip().casefold()
    exact = items.visible.get(query.query.strip()) if wanted else -1
    found: list[int] = [exact] if exact >= 0 and not query.after else []
    place, stop = query.after, query.after + MAX_SCANNED
    rows = items.popular(stop + 1)[place : stop + 1].tolist()
    for row in rows[:MAX_SCANNED]:
        if len(found) >= query.limit:
            break
        place += 1
        if row != exact and _matches(items, row, wanted):
            found.append(row)
    more = place - query.after < len(rows)
    return ItemPage(
        items=[_listed(items, row) for row in found],
        next=place if more else None,
        num_items=items.num_rows - items.gone.size,
        catalog_version=items.name,
    )


def _matches(items: CatalogVersion, row: int, wanted: str) -> bool:
    if not wanted:
        return True
    title = items.record(row).title if items.num_records else items.base.items.titles[row]
    return wanted in title.casefold() or wanted in items.item_id(row).casefold()


def _listed(items: CatalogVersion, row: int) -> ListedItem:
    record = items.record(row)
    return ListedItem(
        item_id=items.item_id(row),
        title=record.title or None,
        categories=record.categories,
        semantic_id=items.codes[row].tolist(),
        popularity=items.popularity(row),
    )
