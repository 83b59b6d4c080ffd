"""From a recipe to a trained, pruned network: recipe, data, schedule, engine, loop, checkpoints.

A `Recipe` enters and a run folder leaves.  Every file here can be read alone; the order above is the order in
which data flows.
"""
