"""dcpbench measures how much faster dynamic context parallelism trains than fixed context parallelism."""

__version__ = "0.1.0"
