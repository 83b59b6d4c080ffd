"""Accuracy against size, for many sizes, from one trained set of scores: a run's folder in, figures out.

`scored` reads what a run kept when its cycles ended, `sweep` cuts it to each size and looks how good it is,
`picture` draws that.
"""
