"""Durable bytes: the Storage protocol and its backends."""
