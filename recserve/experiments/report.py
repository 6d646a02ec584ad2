"""The report page (being written)."""

from recserve.experiments.document import Document


def page(document: Document) -> str:
    """Returns the page."""
    return document.title
