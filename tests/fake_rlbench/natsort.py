"""RLBench needs a package of this name; the stand-in only asks whether it is there."""
