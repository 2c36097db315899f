"""Choosing tokens: what the engine asks for, and the draws themselves. Knows nothing of blocks and lines."""
