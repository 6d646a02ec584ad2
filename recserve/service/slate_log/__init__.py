"""The log of slates and their outcomes as Parquet, for training and off-policy evaluation."""
