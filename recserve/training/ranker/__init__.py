"""Training of the ranker: batches from event logs, cross-fitted item vectors, ranking quality."""
