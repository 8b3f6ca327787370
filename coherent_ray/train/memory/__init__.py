"""The memory tier: the newest snapshots also stay in host memory, outside the worker processes.

A worker that is killed then resumes from the last update and not from the last generation. What
lies here is never durable, is never called a generation, and is used only where it proves to go on
from the newest generation in the commit log; whoever cannot prove it falls back to that generation.

`slots` is shared memory that a dead worker leaves whole; `words` what a snapshot says of itself;
`shelf` what one node holds; `keeper` the actor round it, `keepers` finds them; `tier` is a rank's
side while it trains; `choice` selects, `offer` makes the proof at admission, `held` reads.
"""
