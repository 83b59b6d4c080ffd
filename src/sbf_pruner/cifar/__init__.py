"""CIFAR-10, wherever it is: fetched, read in any form it is published in, verified, and kept as one plain file.

Read in the order fetch, pickled, forms, prepared; `prepared` has the two doors.  Nothing here knows of recipes.
"""
