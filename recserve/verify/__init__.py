"""One file per way of turning a scored tree into an answer."""
