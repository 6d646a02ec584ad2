"""DFlash, JetSpec, DFlash2, DSpark: all tokens of a block at once."""
