"""From chat rows to tokens with a loss mask, kept in a memory-mapped store."""
