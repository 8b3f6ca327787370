"""What the state plane's benchmark is made of; `benchmarks/state_plane.py` runs it.

One process a rank and an interpreter holds the state, and every product that it measures; the
benchmark's own process tells all ranks at once what to do next, and measures nothing itself.
"""
