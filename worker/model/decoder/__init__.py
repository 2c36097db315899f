"""One decoder for many families: described by a model's configuration, run by the native kernels."""
