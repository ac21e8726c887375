"""The programs that start, watch and inspect a run."""
