"""Ready tasks and data preparation: readable examples, each a file of its own."""
