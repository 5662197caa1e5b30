"""The built-in stages, one file each, registered through the same hook as those of any plugin."""
