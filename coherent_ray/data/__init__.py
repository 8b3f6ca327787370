"""What every rank reads next: dataset, order, plan, sources, loader. No Ray."""
