"""Worker: a continuous batcher over a local paged KV pool."""
