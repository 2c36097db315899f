"""All that two processes must agree on. The only package that speaks Redis."""
