"""MTP: a module that was trained with the target drafts a tree, as an EAGLE network does.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2); drafters/mtp/network.py for the modules.
"""

from __future__ import annotations

from pathlib import Path

from recserve.drafters.eagle.drafter import EagleDrafter
from recserve.drafters.mtp.files import load_mtp
from recserve.drafters.mtp.questions import mtp_questions
from recserve.drafters.shared.feature_network import FeatureNetwork
from recserve.models.language_model import LanguageModel
from recserve.speculation.open_question import CheckpointAmbiguity


class MtpDrafter(EagleDrafter):
    """Drafts dynamic trees, or a request's static tree, with an MTP module."""

    name = "mtp"

    @staticmethod
    def _load(folder: Path, target: LanguageModel) -> FeatureNetwork:
        return load_mtp(folder, target)

    @classmethod
    def open_questions(cls, folder: Path, target: LanguageModel) -> tuple[CheckpointAmbiguity, ...]:
        """Returns what the files leave open: the states that go in and what is fed back."""
        return mtp_questions(folder, target)
