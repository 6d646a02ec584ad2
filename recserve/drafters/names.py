"""The table of drafters, which imports none of them and no torch.

A new drafter is one file or a folder, and one line in BUILT_IN.
"""

from __future__ import annotations

from importlib.metadata import entry_points

ENTRY_POINTS = "recserve.drafters"
JOIN = "+"
# A server imports those that it opens. It lists drafters in this order.
ROOM = "recserve.drafters"
BUILT_IN = {
    "none": f"{ROOM}.none:NoDrafter",
    "ngram": f"{ROOM}.ngram:NgramDrafter",
    "suffix": f"{ROOM}.suffix.drafter:SuffixDrafter",
    "lookahead": f"{ROOM}.lookahead:LookaheadDrafter",
    "draft_model": f"{ROOM}.draft_model.drafter:ModelDrafter",
    "specinfer": f"{ROOM}.draft_model.specinfer:SpecinferDrafter",
    "medusa": f"{ROOM}.medusa.drafter:MedusaDrafter",
    "eagle": f"{ROOM}.eagle.drafter:EagleDrafter",
    "mtp": f"{ROOM}.mtp.drafter:MtpDrafter",
    "block": f"{ROOM}.block.drafter:BlockDrafter",
    "specformer": f"{ROOM}.specformer.drafter:SpecformerDrafter",
    "mask_tokens": f"{ROOM}.mask_tokens.drafter:MaskTokensDrafter",
    "mask_tokens_linear": f"{ROOM}.mask_tokens.drafter:LinearMaskTokensDrafter",
}
WEIGHTLESS = ("none", "ngram", "suffix", "lookahead")


def drafter_names() -> set[str]:
    """Returns the names of the built-in drafters and of plug-ins."""
    return {*BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINTS))}


def check_names(name: str, known: set[str]) -> None:
    """Raises ValueError if one of the names joined by `+` is unknown."""
    if unknown := [part for part in name.split(JOIN) if part not in known]:
        raise ValueError(
            f"drafter is {unknown[0]!r}; choose one of {sorted(known)}, or several joined by "
            f"{JOIN!r}"
        )
