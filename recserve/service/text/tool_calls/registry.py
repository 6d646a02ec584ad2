"""The registry of formats of calls. A new format is one file, and one line in BUILT_IN."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from recserve.core.plugins import with_plugins
from recserve.service.text.tool_calls.call_format import CallFormat
from recserve.service.text.tool_calls.hermes import HermesFormat
from recserve.service.text.tool_calls.llama import LlamaFormat
from recserve.service.text.tool_calls.qwen_coder import QwenCoderFormat

ENTRY_POINTS = "recserve.tool_calls"
BUILT_IN: tuple[type[CallFormat], ...] = (QwenCoderFormat, HermesFormat, LlamaFormat)


@cache
def call_formats() -> Mapping[str, CallFormat]:
    """Returns one object per format by name, installed plugins last.

    Raises:
        PluginError: If an installed distribution registers an unusable format.
    """
    # mypy: the base is abstract
    found = with_plugins(ENTRY_POINTS, CallFormat, BUILT_IN)
    return {name: cls() for name, cls in found.items()}


@cache
def format_of(template: str) -> CallFormat | None:
    """Returns the format of a chat template's calls; plugins are asked first.

    Args:
        template: Jinja source.
    """
    if "tools" not in template:
        return None
    formats = list(call_formats().values())
    own, others = formats[: len(BUILT_IN)], formats[len(BUILT_IN) :]
    return next((one for one in (*others, *own) if one.fits(template)), None)
