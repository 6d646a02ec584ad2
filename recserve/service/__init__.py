"""Answers from a bundle: one object behind HTTP, the commands and batch jobs."""

from recserve.service.service import Service, default_store

__all__ = ["Service", "default_store"]
