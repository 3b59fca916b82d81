"""Lets the tests below share `log_lines.py`: pytest puts this folder on the path."""
