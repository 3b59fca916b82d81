"""What the ranks do together: gradient reduction."""
