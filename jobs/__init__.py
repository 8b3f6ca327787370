"""Ready tasks and the preparation of their data: readable examples, each by itself."""
