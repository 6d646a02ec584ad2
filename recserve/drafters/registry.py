"""The registry of drafters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import cache
from importlib import import_module
from pathlib import Path

from recserve.core.plugins import plugins
from recserve.drafters.merged import MergedDrafter
from recserve.drafters.names import (
    BUILT_IN,
    ENTRY_POINTS,
    JOIN,
    WEIGHTLESS,
    check_names,
)
from recserve.models.language_model import LanguageModel
from recserve.models.loading import UnsupportedModel
from recserve.speculation.drafter import Drafter
from recserve.speculation.sampling_params import Speculation
from recserve.speculation.verifier import UnfitDraft
from recserve.speculation.verifiers.registry import verifiers


class DrafterClasses(Mapping[str, type[Drafter]]):
    """All drafter classes by name. A built-in one is imported when it is read.

    Args:
        plugins: Classes of other distributions.
    """

    def __init__(self, plugins: Mapping[str, type[Drafter]]) -> None:
        self._plugins = plugins

    def __getitem__(self, name: str) -> type[Drafter]:
        if name not in BUILT_IN:
            return self._plugins[name]
        module, _, cls = BUILT_IN[name].partition(":")
        found: type[Drafter] = getattr(import_module(module), cls)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter((*BUILT_IN, *self._plugins))

    def __len__(self) -> int:
        return len(BUILT_IN) + len(self._plugins)


@cache
def drafter_classes() -> Mapping[str, type[Drafter]]:
    """Returns all drafter classes by name, installed plugins last.

    Raises:
        PluginError: If an installed distribution registers an unusable drafter.
    """
    return DrafterClasses(plugins(ENTRY_POINTS, Drafter, tuple(BUILT_IN)))


def weightless_drafters() -> list[str]:
    """Returns the names of the drafters that need no weights; every server offers them."""
    classes = drafter_classes()
    own = [name for name in classes if name not in BUILT_IN and not classes[name].needs_weights]
    return [*WEIGHTLESS, *own]


def build_drafter(name: str, target: LanguageModel, folders: Seq[Path] = ()) -> Drafter:
    """Builds a drafter for a target model.

    Args:
        name: A drafter's name, or several names joined by `+`, which draft one tree together.
        target: The model that verifies.
        folders: Folders of weights. Among joined drafters, one with `num_folders` takes its own
            from the front; the others share the rest.

    Raises:
        ValueError: If the name is unknown, or weights are missing or do not fit the target
            (UnsupportedModel for files). The message names the expected and the given value.
    """
    classes, names = drafter_classes(), name.split(JOIN)
    check_names(name, set(classes))
    if len(names) > 1 and (len(set(names)) < len(names) or any(classes[n].idle for n in names)):
        raise ValueError(f"drafter is {name!r}; joined drafters must differ and exclude 'none'")
    rest, own = list(folders), dict[str, list[Path]]()
    for part in names:
        count = classes[part].num_folders
        if count is not None:
            own[part], rest = rest[:count], rest[count:]
    built = []
    for part in names:
        used = own.get(part, rest)
        try:
            built.append(classes[part].from_folders(used, target))
        except ValueError as error:
            if not used:
                raise
            where = ", ".join(map(str, used))
            raise UnsupportedModel(f"drafter {part} in {where}: {error}") from error
    return built[0] if len(built) == 1 else MergedDrafter(built)


def check_speculation(speculation: Speculation, drafter: Drafter, greedy: bool) -> None:
    """Checks that the drafter of a request suits its tree and its acceptance rule.

    Args:
        speculation: Drafting options with a known rule.
        drafter: The drafter that they name.
        greedy: Whether the temperature is 0. Then every draft suits every rule.

    Raises:
        UnfitDraft: If the rule needs drawn drafts, and the drafter may choose its drafts.
        ValueError: If the drafter cannot fill the tree.
    """
    rule = verifiers()[speculation.verifier]
    if rule.needs_probs and not (greedy or drafter.idle or drafter.always_draws):
        raise UnfitDraft(
            f"the rule {rule.name!r} needs drawn drafts with their distributions; the drafter "
            f"{speculation.drafter!r} chooses drafts (top-k, lookup), so the rule would be "
            "biased; use 'sample', or temperature 0"
        )
    if speculation.tree is None:
        return
    if not drafter.takes_tree:
        takers = [repr(n) for n, cls in drafter_classes().items() if cls.takes_tree]
        raise ValueError(
            f"a tree of choices is for the drafter {' or '.join(takers)}, "
            f"not for {speculation.drafter!r}"
        )
    drafter.check_tree(speculation)
