"""Speed of the model's steps: slices at released width, what they must do, and what they reach.

`counts` has FLOP and bytes from the config; `slices` the programs; `measure` times them against
ceilings of the same run; `idle` reads profiles; `records` and `plots` keep and draw the results.
"""
