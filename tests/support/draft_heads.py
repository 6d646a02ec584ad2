"""Draft heads for the recommenders of recommenders.py: good, bad and calibrated."""

import torch

from recserve.models.item_heads import Calibration, DraftPlan, SelfDraftConfig, SelfDraftHead

NOTHING = DraftPlan(0.0, 24.0, 2.0, 0.0)


CALIBRATION = Calibration(
    {(10, 10): (NOTHING, DraftPlan(1.0, 26.0, 1.0, 0.4), DraftPlan(50.0, 200.0, 0.0, 1.0))}
)


def make_head(model, kind: str) -> SelfDraftHead:
    """Returns a draft head of this kind."""
    torch.manual_seed(1)
    head = SelfDraftHead(SelfDraftConfig(32, model.config.codebook_sizes))
    if kind == "from-target":
        head.start_from(model)
    if kind == "adversarial":
        head.start_from(model)
        head.head.weight.data.neg_()
    if kind == "calibrated":
        head.calibration = CALIBRATION
    if kind == "constant":
        for weight in head.parameters():
            weight.data.zero_()
    return head.eval()


def make_nezha_head(model, placeholders: bool = True) -> SelfDraftHead:
    """Returns a random head for `nezha`."""
    torch.manual_seed(2)
    config = SelfDraftConfig(
        model.config.decoder.hidden_size, model.config.codebook_sizes, placeholders
    )
    head = SelfDraftHead(config)
    head.head.weight.data.mul_(4)
    return head.eval()
