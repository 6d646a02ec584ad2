"""Breaks one property of the program, to show that a check of it fails.

    python -m tests.support.broken_properties PROPERTY MODULE [ARGUMENT ...]

runs a module as `python -m MODULE ARGUMENT ...` does, with the property broken.
"""

from __future__ import annotations

import inspect
import random
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np
import torch

from recserve.features.catalog.filters import ItemFilters
from recserve.features.history.history import Applied
from recserve.features.history.lmdb_store import LmdbStore
from recserve.schemas.api import OPERATIONS, Api, Operation
from recserve.service.histories import EventChanges
from recserve.speculation.verifiers import block, rejection

MODULE = "tests.support.broken_properties"


def rewrite(function: FunctionType, old: str, new: str) -> Any:
    """Returns a function with a piece of its source replaced; the piece must occur once."""
    source = inspect.getsource(function)
    if source.count(old) != 1:
        raise ValueError(f"{function.__name__} has {old!r} {source.count(old)} times; expected 1")
    names = dict(function.__globals__)
    exec(source.replace(old, new), names)  # noqa: S102
    return names[function.__name__]


def with_coins(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """Returns rejection sampling whose coins a function of coins and depths has changed."""
    reject = rejection.reject

    def rejecting(scored: Any, coins: torch.Tensor, noise: torch.Tensor) -> Any:
        return reject(scored, change(coins, scored.tree.depths), noise)

    return rejecting


def forgotten_product() -> Any:
    """Block verification forgets the running product from depth 2 on."""
    broken = rewrite(
        block.accept_block, "(share * ratio[:, 0])", "((share if depth < 2 else 1) * ratio[:, 0])"
    )
    return mock.patch.object(block, "accept_block", broken)


def accepted_tails() -> Any:
    """Rejection accepts every draft from depth 2 on: its coins lie below every threshold."""
    broken = with_coins(lambda coins, depths: torch.where(depths >= 2, -1.0, coins))
    return mock.patch.object(rejection, "reject", broken)


def biased_rejection() -> Any:
    """Rejection accepts 3 % too often at depth 1."""
    broken = with_coins(lambda coins, depths: torch.where(depths == 1, 0.97 * coins, coins))
    return mock.patch.object(rejection, "reject", broken)


def leaking_filters() -> Any:
    """Every seventh item passes every filter."""
    evaluate = ItemFilters.evaluate

    def leaking(self: ItemFilters, tree: Any) -> np.ndarray:
        passes = evaluate(self, tree)
        passes[::7] = True
        return passes

    return mock.patch.object(ItemFilters, "evaluate", leaking)


def with_open(*rows: Operation[Any, Any]) -> Any:
    """Operations need no key, in every application that is made meanwhile."""
    changed = {row.name: replace(row, open=True, counted=False) for row in rows}
    return mock.patch.dict(OPERATIONS, changed)


def open_events() -> Any:
    """Events need no key."""
    return with_open(Api.add_events)


def open_items() -> Any:
    """Items need no key."""
    return with_open(Api.items, Api.put_items)


def lossy_store() -> Any:
    """The LMDB store acknowledges 2 % of its writes without making them."""
    append_many, draw = LmdbStore.append_many, random.Random(0)

    def losing(self: LmdbStore, changes: Mapping[str, Any]) -> Any:
        if draw.random() < 0.02:
            return {user: Applied([True] * len(made), None) for user, made in changes.items()}
        return append_many(self, changes)

    return mock.patch.object(LmdbStore, "append_many", losing)


def short_batches() -> Any:
    """Every tenth event of a batch is dropped."""
    take = EventChanges.take

    def taking(self: EventChanges, index: int, event: Any) -> None:
        if index % 10 != 9:
            take(self, index, event)

    return mock.patch.object(EventChanges, "take", taking)


def shrunken_batches() -> Any:
    """The LMDB store drops every tenth event of a user's batch, and answers for fewer events."""
    append_many = LmdbStore.append_many

    def shrinking(self: LmdbStore, changes: Mapping[str, Any]) -> Any:
        def shrink(own: Any) -> list[Any]:
            return [change for number, change in enumerate(own) if number % 10 != 9]

        return append_many(self, {user: shrink(own) for user, own in changes.items()})

    return mock.patch.object(LmdbStore, "append_many", shrinking)


PROPERTIES = {
    one.__name__: one
    for one in (
        *(forgotten_product, accepted_tails, biased_rejection, leaking_filters),
        *(open_events, open_items, lossy_store, short_batches, shrunken_batches),
    )
}


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Breaks a property for a while; None breaks nothing."""
    if name is None:
        yield
        return
    with PROPERTIES[name]():
        yield


def main() -> None:
    """Runs a module with a broken property."""
    name, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    with broken(name):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
