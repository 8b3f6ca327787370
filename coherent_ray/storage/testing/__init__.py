"""What backends are tested with: a conformance suite, faults, and a storage in memory.

Shipped with the package, so that a third party's backend can inherit the same suite.
"""
