"""Gateway: takes calls, checks them, tokenizes, routes, submits and relays answers. Holds no model."""
