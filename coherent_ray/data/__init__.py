"""What every rank reads next: the dataset's identity, the order, the plan, the batches.

No Ray here, and no torch: a batch is what the task's ``collate`` makes of arrays and lists.
"""
