"""What removal is worth in milliseconds: a table of measured layers, and what it foretells of whole networks."""
