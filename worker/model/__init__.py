"""Models: how weights are found, converted, loaded and run."""
