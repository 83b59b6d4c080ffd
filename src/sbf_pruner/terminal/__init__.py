"""What a terminal shows: progress on stderr, results on stdout."""
