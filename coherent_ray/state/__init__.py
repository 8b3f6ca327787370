"""Tensors to shards and back. Torch; no Ray."""
