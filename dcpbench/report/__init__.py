"""One writer per format; none of them computes."""
