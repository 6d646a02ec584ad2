"""Training of the ranker: batches from event logs, cross-fitted vectors, ranking quality."""
