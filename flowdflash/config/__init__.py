"""From a YAML file to a checked pipeline, with every problem placed in the file."""
