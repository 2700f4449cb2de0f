"""Compiled in PyRep; here it only has to be found."""
