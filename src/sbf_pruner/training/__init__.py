"""From a recipe to a pruned network: recipe, data, schedule, feed, scorer, networks, engine, epoch, run, loop.

A `Recipe` enters and a run folder leaves.  Every file here can be read alone; the order above is the order in
which data flows.
"""
