"""Answers from a bundle: one object behind HTTP, the commands and batch jobs."""

from recserve.service.model_loader import default_store
from recserve.service.options import ServiceOptions
from recserve.service.service import Service

__all__ = ["Service", "ServiceOptions", "default_store"]
