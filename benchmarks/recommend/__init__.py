"""How fast and how good recommendations are: strategies, catalogues, quantisers."""
