"""`octavo batch`: files of requests that run in the background."""
