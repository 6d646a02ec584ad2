"""Mutants: small faults that the tests of a promise must notice. `make mutants` tries them."""
