"""The runtime: bounded channels, one worker loop, an executor that starts, watches and stops everything."""
