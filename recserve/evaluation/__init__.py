"""Evaluation of trained models: leave-one-out cases, slates from the engine, metrics."""
