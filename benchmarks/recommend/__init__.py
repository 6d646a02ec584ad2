"""Speed and quality of recommendations: strategies, catalogues, quantisers."""
