"""Offline batch jobs that compute slates for many users, from Parquet to Parquet."""
