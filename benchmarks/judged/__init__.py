"""A small job for judges from outside: the product's save and load in processes, without Ray."""
