"""The gauntlet: what breaks checkpoints, as experiments; products that make them, as columns.

| file | holds |
|---|---|
| ``column.py`` | what a product must offer to be driven: the interface, nothing else |
| ``ours.py``, ``dcp.py``, ``ray_train.py`` and so on | one product each |
| ``states.py`` | the states that are saved: known in advance, so whoever loads one can be judged |
| ``child.py`` | the process in which a product works |
| ``bench.py`` | the process that starts it, strikes it, watches it |
| ``damage.py`` | what is done to files |
| ``damages.py``, ``crashes.py``, ``promises.py`` | the rows, by what they ask |
| ``rows.py`` | all rows, in order; ``verdict.py``: what a row comes to |

A product is imported in children alone, and only in its own: the judging process knows files.
"""
