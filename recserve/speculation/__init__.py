"""How text is drafted and verified."""
