"""A serializable description of the models of a job, from which each worker loads them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from recserve.batch.generate import Defaults, Generator, answer_schema
from recserve.batch.part import Task
from recserve.cores import short_waits

Device = Literal["auto", "cpu", "cuda"]
KERNELS = "RECSERVE_KERNELS"
# A group of requests with many texts each enters the queue at once.
MAX_QUEUE = 1_000_000


class WrongOption(ValueError):
    """An option of the job does not fit the models."""


@dataclass(frozen=True)
class SlateRecipe:
    """Opens a bundle and recommends items.

    Attributes:
        bundle: Folder of the bundle.
        defaults: Settings for rows that do not set them.
        store: URL of the history store; None means the LMDB folder next to the bundle.
        device: Device of the models.
        in_flight: Users computed together, 1 to 1024.
        threads: Threads of each process. The last bits of scores may depend on their number.
    """

    bundle: str
    defaults: Defaults = Defaults()
    store: str | None = None
    device: Device = "auto"
    in_flight: int = 64
    threads: int = 1
    suffix = ".parquet"

    def facts(self) -> dict[str, object]:
        """Returns what is known of the output before the bundle is opened."""
        manifest = Path(self.bundle) / "manifest.json"
        if not manifest.is_file():
            raise FileNotFoundError(f"{self.bundle} is not a bundle: it has no manifest.json")
        return {
            "bundle_sha256": hashlib.sha256(manifest.read_bytes()).hexdigest(),
            "store": self.store or "default",
            "in_flight": self.in_flight,
            "threads": self.threads,
            **asdict(self.defaults),
        }

    @contextmanager
    def open(self) -> Iterator[Task]:
        """Opens the bundle.

        Raises:
            WrongOption: If the bundle lacks the strategy or a field of the defaults.
            BundleError: If the bundle is damaged.
        """
        import torch

        from recserve.batch.together import reset, together
        from recserve.kernels import backend
        from recserve.schemas.items import InvalidRequest
        from recserve.service import Service
        from recserve.service.fields import check_fields
        from recserve.service.similar import SIMILARITIES
        from recserve.service.snapshot import LISTS

        torch.set_num_threads(self.threads)
        with Service.open(self.bundle, self.store, self.device) as service:
            engine, strategy = service.engine, self.defaults.strategy
            there = ("auto", *engine.selectable, *LISTS, *SIMILARITIES)
            if strategy not in there:
                listed = ", ".join(there)
                raise WrongOption(f"strategy is {strategy!r}; expected one of {listed}")
            items = service.catalog.current.items
            try:
                check_fields(self.defaults.fields, items)
                says_scoring = service.check_scoring(self.defaults.scoring)
            except InvalidRequest as error:
                raise WrongOption(str(error)) from None
            yield Generator(
                recommend=together(service),
                defaults=self.defaults,
                in_flight=self.in_flight,
                reset=lambda: reset(engine),
                versions={
                    **service.versions(),
                    "device": service.device.type,
                    "kernels": backend.FORCED,
                },
                schema=answer_schema(items.field_schema(self.defaults.fields), says_scoring),
            )


@dataclass(frozen=True)
class TextRecipe:
    """Opens a language model and answers text requests.

    Attributes:
        llm: Folder of the model.
        lines: True for lines in OpenAI's batch format, False for prompts in Parquet.
        name: Name of the model in requests; None means the folder's name.
        dtype: Element type of the weights; None means the type in the folder.
        drafters: `NAME` or `NAME=DIR`; the first is the default of requests.
        chat_template: File of a chat template; None means the folder's own.
        device: Device of the model.
        in_flight: Rows computed together, 1 to 1024.
        threads: Threads of each process.
        seed: Seed from which texts without a seed derive theirs.
    """

    llm: str
    lines: bool = True
    name: str | None = None
    dtype: str | None = None
    drafters: tuple[str, ...] = ()
    chat_template: str | None = None
    device: Device = "auto"
    in_flight: int = 256
    threads: int = 1
    seed: int = 0

    @property
    def suffix(self) -> str:
        """Suffix of the output files."""
        return ".jsonl" if self.lines else ".parquet"

    def facts(self) -> dict[str, object]:
        """Returns what is known of the output before the model is opened."""
        fields = asdict(self)
        del fields["llm"], fields["chat_template"], fields["device"]
        template = self.chat_template and _sha256(Path(self.chat_template))
        return {**fields, "llm_sha256": _folder_sha256(Path(self.llm)), "chat_template": template}

    @contextmanager
    def open(self) -> Iterator[Task]:
        """Opens the model.

        Raises:
            ValueError: If the model or a drafter cannot be loaded.
        """
        import torch

        from recserve.batch.lines import LineTask
        from recserve.batch.prompts import PromptTask
        from recserve.engine.engine_config import EngineConfig
        from recserve.kernels import backend
        from recserve.models.loading import read_folder
        from recserve.service import Service
        from recserve.service.model_loader import resolve_device
        from recserve.service.text.loader import TextSettings, load_text

        torch.set_num_threads(self.threads)
        folder, device = Path(self.llm), resolve_device(self.device)
        # Without a name the loader would measure which type is the fastest.
        dtype = self.dtype or str(read_folder(folder)[1]).removeprefix("torch.")
        settings = TextSettings(
            folder=folder,
            name=self.name,
            dtype=dtype,
            chat_template=None if self.chat_template is None else Path(self.chat_template),
            drafters=self.drafters,
        )
        text = load_text(settings, device)
        with Service.of_text(text, EngineConfig(max_queue=MAX_QUEUE)) as service:
            versions = {"device": device.type, "kernels": backend.FORCED, "weights": dtype}
            kind = LineTask if self.lines else PromptTask
            yield kind(service, self.seed, self.in_flight, versions)


Recipe = SlateRecipe | TextRecipe


def to_json(recipe: Recipe) -> str:
    """Returns a recipe as one line of JSON, for another process."""
    return json.dumps({"kind": type(recipe).__name__, **asdict(recipe)})


def from_json(text: str) -> Recipe:
    """Returns the recipe of `to_json`."""
    fields = json.loads(text)
    if fields.pop("kind") == TextRecipe.__name__:
        return TextRecipe(**{**fields, "drafters": tuple(fields["drafters"])})
    defaults = fields["defaults"]
    defaults = Defaults(**{**defaults, "fields": tuple(defaults["fields"])})
    return SlateRecipe(**{**fields, "defaults": defaults})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder_sha256(folder: Path) -> str:
    """Returns a hash of the files of a folder with their names."""
    if not folder.is_dir():
        raise FileNotFoundError(f"llm is {folder}; there is no such folder")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    content = "\n".join(f"{_sha256(path)} {path.name}" for path in files)
    return hashlib.sha256(content.encode()).hexdigest()


def environment(recipe: Recipe) -> dict[str, str]:
    """Returns the environment variables of a process that opens a recipe.

    Kernels are not chosen by measuring, because two processes could measure differently.
    """
    return {
        KERNELS: os.environ.get(KERNELS, "c"),
        "OMP_NUM_THREADS": str(recipe.threads),
        **short_waits(),
    }
