"""The whole fleet in containers, killed under load: a transcript that checks itself."""
