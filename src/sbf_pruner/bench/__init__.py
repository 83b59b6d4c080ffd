"""What a pruned network is worth in real time: dense against compact, in turns, on every runtime there is."""
