"""The themes of `BackendContract`, a class of tests for each, and what they share."""
