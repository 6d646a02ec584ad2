"""Options of an import of a drawn foreign recommender, by one format."""

import json

from recserve.formats.checkpoint_format import ImportOptions

TEMPLATE = "Bought: {{ history | join(' ') }}\n{% if not history %}none{% endif %}Next: "


def options(data, root, name, **changes):
    """Returns the options of an import by one format, whose map and prompt it writes."""
    (root / "ids.index.json").write_text(json.dumps(data.ids))
    (root / "prompt.jinja").write_text(TEMPLATE)
    given = {"folder": data.folder, "items": data.items, "ids": root / "ids.index.json"}
    given |= {"out": root / "bundle", "format": name, "events": data.events, "max_history": 8}
    if name == "generic":
        given |= {"id_format": "<a_{}><b_{}><c_{}>", "prompt": root / "prompt.jinja"}
    return ImportOptions(**{**given, **changes})
