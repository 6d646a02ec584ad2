"""MTP: a module that was trained with the target drafts a tree, as an EAGLE network does.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2); models/drafters/mtp.py for the modules.
"""

from __future__ import annotations

from pathlib import Path

from recserve.models.drafters.feature_network import FeatureNetwork
from recserve.models.drafters.mtp_files import load_mtp
from recserve.models.language_model import LanguageModel
from recserve.speculation.drafters.eagle import EagleDrafter


class MtpDrafter(EagleDrafter):
    """Drafts dynamic trees, or a request's static tree, with an MTP module."""

    name = "mtp"

    @staticmethod
    def _load(folder: Path, target: LanguageModel) -> FeatureNetwork:
        return load_mtp(folder, target)
