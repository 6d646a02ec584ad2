"""The worlds that answer recorded requests: which files each serves, and its settings."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILES = Path(__file__).parent / "files"
API_KEY, OTHER_KEY, ADMIN_KEY = "recorded-key-one-1", "recorded-key-two-2", "recorded-admin-key"
SIGNING_KEY = "recorded-signing-key"


@dataclass(frozen=True)
class World:
    """A server of recorded files.

    Attributes:
        name: Folder of its recorded answers.
        bundle: Bundle that it serves; None for a language model only.
        drafters: Names and folders of drafters; the first is the default of requests.
        settings: Further settings of `recserve serve`.
    """

    name: str
    bundle: str | None
    drafters: dict[str, tuple[str, ...]]
    settings: dict[str, Any] = field(default_factory=dict)

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Copies the files to an empty folder, because a server writes beside them.

        Args:
            folder: The folder.

        Returns:
            Settings of `recserve serve`.
        """
        shutil.copytree(FILES / "llm", folder / "llm")
        settings: dict[str, Any] = {
            "llm": str(folder / "llm"),
            "llm_name": "tiny",
            "device": "cpu",
            "kv_bytes": 1 << 26,
            "load_aware": False,  # the cost of a step on this machine would decide what is drafted
            **self.settings,
        }
        named: list[str] = []
        for name, folders in self.drafters.items():
            for one in folders:
                shutil.copytree(FILES / "drafters" / one, folder / "drafters" / one)
                named.append(f"{name}={folder / 'drafters' / one}")
            named += [] if folders else [name]
        settings["drafters"] = named
        if self.bundle is not None:
            shutil.copytree(FILES / "bundles", folder / "bundles")
            state = FILES / "state" / self.bundle
            if state.is_dir():
                shutil.copytree(state, folder / "state")
            settings["bundle"] = str(folder / "bundles" / self.bundle)
            settings["bundles_dir"] = str(folder / "bundles")
            settings["store"] = f"lmdb:{folder / 'state' / 'history'}"
            settings["journal"] = str(folder / "state" / "journal")
            settings["slate_log"] = str(folder / "state" / "slates")
            settings["signing_key"] = SIGNING_KEY
        return settings


WORLDS = {
    world.name: world
    for world in (
        World(
            "items",
            "items",
            {
                "none": (),
                "eagle": ("eagle3",),
                "block": ("dflash",),
                "medusa": ("medusa",),
                "mtp": ("mtp",),
                "specformer": ("specformer",),
                "mask_tokens": ("mask_tokens",),
                "draft_model": ("draft-one",),
                "ngram+suffix": (),
            },
            {"admin_keys": [ADMIN_KEY], "llm_aliases": ["gpt-tiny"]},
        ),
        World(
            "codes",
            "codes",
            {
                "eagle": ("eagle",),
                "block": ("dspark",),
                "specinfer": ("draft-one", "draft-two"),
                "mask_tokens_linear": ("mask_tokens",),
            },
            {
                "experiments": [
                    {
                        "name": "shelf",
                        "use": "recommend",
                        "guard": None,
                        "arms": [
                            {"name": "control", "fields": {"strategy": "beam"}},
                            {"name": "quick", "fields": {"strategy": "nezha"}},
                        ],
                    }
                ]
            },
        ),
        World("product", "product", {"none": (), "block": ("dflash2",)}),
        World(
            "text",
            None,
            {"block": ("jetspec",), "none": ()},
            {"api_keys": [API_KEY, OTHER_KEY], "max_body_bytes": 2048},
        ),
    )
}
