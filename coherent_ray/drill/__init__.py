"""Failures on purpose, and proofs that a faulted run is the same run."""
