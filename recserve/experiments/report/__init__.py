"""Results of a run as a JSON document and as one HTML page."""
