"""The octavo command."""
