"""What the commit protocol is tested by: invariants with names, for every test that has a state."""
