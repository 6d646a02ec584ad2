"""What MkDocs calls for every page of the site (`hooks` in mkdocs.yml).

Links to source files become plain text, because the site does not carry the sources.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:)([^)#\s]+)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Removes the links of a page to files outside the site."""
    pages = Path(__file__).resolve().parents[1]
    folder = (pages / page.file.src_path).parent

    def shown(link: re.Match[str]) -> str:
        inside = (folder / link[2]).resolve().is_relative_to(pages)
        return link[0] if inside else link[1]

    return LINK.sub(shown, markdown)
