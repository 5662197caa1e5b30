"""The frozen target: where it comes from, how its hidden states are read and kept."""
