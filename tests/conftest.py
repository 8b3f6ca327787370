"""What all tests may ask for: servers of object stores."""

pytest_plugins = ["stores"]
