"""`python -m dcpbench` is the `dcpbench` command."""

from dcpbench.cli import main

if __name__ == "__main__":
    main()
