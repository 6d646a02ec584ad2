"""The table of drafters, which imports none of them and no torch.

A new drafter is one file, and one line in BUILT_IN.
"""

from __future__ import annotations

from importlib.metadata import entry_points

ENTRY_POINTS = "recserve.drafters"
JOIN = "+"
# A server imports those that it opens. It lists drafters in this order.
DRAFTERS = "recserve.speculation.drafters"
BUILT_IN = {
    "none": f"{DRAFTERS}.none:NoDrafter",
    "ngram": f"{DRAFTERS}.ngram:NgramDrafter",
    "suffix": f"{DRAFTERS}.suffix:SuffixDrafter",
    "lookahead": f"{DRAFTERS}.lookahead:LookaheadDrafter",
    "draft_model": f"{DRAFTERS}.draft_model:ModelDrafter",
    "specinfer": f"{DRAFTERS}.specinfer:SpecinferDrafter",
    "medusa": f"{DRAFTERS}.medusa:MedusaDrafter",
    "eagle": f"{DRAFTERS}.eagle:EagleDrafter",
    "mtp": f"{DRAFTERS}.mtp:MtpDrafter",
    "block": f"{DRAFTERS}.block:BlockDrafter",
    "specformer": f"{DRAFTERS}.specformer:SpecformerDrafter",
    "mask_tokens": f"{DRAFTERS}.mask_tokens:MaskTokensDrafter",
    "mask_tokens_linear": f"{DRAFTERS}.mask_tokens:LinearMaskTokensDrafter",
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
