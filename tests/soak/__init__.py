"""Long runs that look for a lost or mixed checkpoint: `make soak`. Short slices of them are tests of tests/faults."""
