"""The operations a model runs on: attention over pages and row-exact products."""
