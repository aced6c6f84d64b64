"""Several processes that serve the same models behind one address, on Ray Serve (the extra `replicas`)."""
