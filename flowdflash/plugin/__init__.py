"""The plugin layer: hooks, the registry of stages, and the loader that keeps one broken plugin from stopping the rest."""
