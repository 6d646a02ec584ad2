"""The Python API: one `Service` object serves HTTP, the command line and batch jobs."""

from recserve.service.options import ServiceOptions
from recserve.service.service import Service
from recserve.service.state_files import default_store

__all__ = ["Service", "ServiceOptions", "default_store"]
