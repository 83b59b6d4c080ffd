"""`sbf export`: a finished run as files that others can use, with a card and checksums."""
