"""A stand-in for PyRep: only what the child asks of it."""
