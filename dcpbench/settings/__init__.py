"""What `config` builds on: the fields of a spec and their places, YAML as text, the files that come with dcpbench."""
