"""EAGLE 1 to 3.1, P-EAGLE: layers that predict the target's states."""
