"""Mask tokens with gated LoRA in the target itself."""
