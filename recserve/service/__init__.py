"""The Python API: one `Service` object serves HTTP, the command line and batch jobs."""

from recserve.features.state_files import default_store
from recserve.service.options import ServiceOptions
from recserve.service.service import Service

__all__ = ["Service", "ServiceOptions", "default_store"]
