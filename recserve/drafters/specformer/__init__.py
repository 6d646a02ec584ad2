"""SpecFormer: heads with attention over the target's states."""
