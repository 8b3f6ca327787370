"""What all tests may ask for: servers of object stores. And no test starts a Ray by accident."""

import os

# A call of Ray's without a cluster would start one, and leave it behind.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

pytest_plugins = ["stores"]
