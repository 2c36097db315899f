"""Who takes part in a step, on which blocks. Pure: no model, no clock, no I/O."""
