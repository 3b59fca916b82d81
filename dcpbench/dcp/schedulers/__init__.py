"""One module per scheduler behind one protocol; run without torch."""
