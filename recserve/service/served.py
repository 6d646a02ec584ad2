"""What one process serves: a bundle's items, a language model, or both, on one engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.metrics import Gauges
from recserve.service.errors import UnknownModel
from recserve.service.runtime import gauges_of
from recserve.service.service import Service
from recserve.service.text.text import Texts
from recserve.service.text.text_loading import LoadedText
from recserve.service.text.text_model import TextModel


class Served:
    """The two sides of a server, each of which may be missing."""

    def __init__(
        self,
        items: Service | None = None,
        text: TextModel | None = None,
        engine: Engine | None = None,
    ) -> None:
        """engine: the running one, where there are no items; else theirs is used."""
        self._items = items
        self.engine = items.runtime.engine if items is not None else engine
        self._texts: Texts | None = None
        if text is not None and self.engine is not None:
            context = min(text.context, self.engine.room("text"))
            self._texts = Texts(self.engine, replace(text, context=context))

    @staticmethod
    def of_text(text: LoadedText, config: EngineConfig | None = None) -> Served:
        """A language model alone, its engine running."""
        network, drafters = text.parts
        engine = build_engine(EngineModels(text=network, drafters=drafters), config)
        engine.start()
        return Served(None, text.model, engine)

    @property
    def items(self) -> Service:
        """The bundle's side. Raises UnknownModel where there is none."""
        if self._items is None:
            raise UnknownModel("this server has a language model only; start it with --bundle")
        return self._items

    @property
    def texts(self) -> Texts:
        """The language model's side. Raises UnknownModel where there is none."""
        if self._texts is None:
            raise UnknownModel("this server has no language model; start it with --llm")
        return self._texts

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        if self._items is not None:
            return self._items.alive
        return self.engine is not None and self.engine.alive

    def close(self) -> None:
        """Finish what the engine has, then close everything. May be called again."""
        if self._items is not None:
            self._items.close()
        elif self.engine is not None:
            self.engine.close()

    def models(self) -> list[dict[str, Any]]:
        """The loaded models in OpenAI's form, with what is ours under `recserve`."""
        listed = [] if self._items is None else self._items.models()
        if self._texts is not None:
            listed.append(self._texts.described())
        return listed

    def model(self, name: str) -> dict[str, Any]:
        """One of them. Raises UnknownModel."""
        for model in self.models():
            if model["id"] == name:
                return model
        there = ", ".join(repr(model["id"]) for model in self.models())
        raise UnknownModel(f"the models here are {there}, got {name[:80]!r}")

    def versions(self) -> dict[str, str]:
        """Versions of what is served; a language model's folder has none."""
        return {} if self._items is None else self._items.versions()

    def samples(self, num_users: int, num_items: int) -> dict[str, list[str]]:
        """Some users and popular items to try things with; none without a bundle."""
        if self._items is None:
            return {"users": [], "items": []}
        return self._items.samples(num_users, num_items)

    def gauges(self) -> Gauges | None:
        """The engine's figures for Prometheus."""
        if self._items is not None:
            return self._items.gauges()
        return None if self.engine is None else gauges_of(self.engine.stats())
