"""What `campaign` and `launch` build on: processes, records as they come, reasons of failure, progress."""
