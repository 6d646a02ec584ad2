"""Handlers of the operations, one file for each part of the service."""

from recserve.server.routes import (
    bundle_admin,
    completions,
    encoding,
    events,
    experiments,
    health,
    inference,
    items,
    models,
    rank,
    recommend,
    text_scores,
)

__all__ = [
    "bundle_admin",
    "completions",
    "encoding",
    "events",
    "experiments",
    "health",
    "inference",
    "items",
    "models",
    "rank",
    "recommend",
    "text_scores",
]
