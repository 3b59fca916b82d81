"""What `manifest` and `redact` build on: the manifest's schema, and the scan for secrets."""
