"""A service whose items change: insertions, requests and reads."""

import numpy as np

from recserve.schemas.items import Exclusions, ItemsRequest, RecommendRequest
from recserve.service import Service, ServiceOptions
from tests.support.tiny_bundle import shared_bundle

EVERYTHING = Exclusions(seen=False)


def opened(folder):
    """Opens a service on the shared bundle with its own journal."""
    return Service.open(
        shared_bundle(), f"lmdb:{folder}/store", "cpu", ServiceOptions(journal=folder / "items")
    )


def base_of(service):
    """Returns the base catalogue of the current snapshot."""
    return service.catalog.current.catalog


def put(service, *items):
    """Inserts items through the service."""
    return service.put_items(ItemsRequest(items=list(items)))


def lonely(service):
    """Returns a row whose quantiser codes no other item has."""
    codes = base_of(service).semantic_ids.codes
    _, first, counts = np.unique(codes[:, :2], axis=0, return_index=True, return_counts=True)
    return int(first[counts == 1][0])


def item_like(service, item_id, like=None, **fields):
    """Returns a new item close to the one in row `like`."""
    like = lonely(service) if like is None else like
    vector = base_of(service).vectors[like] + 1e-3
    said = {"title": "Rose lipstick", "categories": ["Care > Lips"], **fields}
    return {"item_id": item_id, "embedding": vector.tolist(), **said}


def slate(service, user="u", history=None, k=700, **fields):
    """Returns all items, as a wide beam finds them."""
    history = base_of(service).items.ids[:3] if history is None else history
    body = RecommendRequest(history=history, k=k, beam_width=k, exclude=EVERYTHING, **fields)
    return service.recommend(body)


def scores(answer):
    """Returns the model's scores by item id."""
    return {item.item_id: item.score for item in answer.items if item.source == "model"}
