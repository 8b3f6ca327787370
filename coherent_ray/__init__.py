"""Coherent Ray: data-parallel PyTorch training on Ray clusters that fail.

The public face. Everything else is found by its own name, one layer at a time:
``cli, drill -> train -> data, state -> commit -> storage -> errors``.
"""

__version__ = "0.1.0"
