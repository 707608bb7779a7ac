"""What `LayoutContract` is made of: states to save, ranks that are threads, and a store that fails."""
