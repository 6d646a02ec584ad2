"""How fast and how good the ranking of given candidates is."""
