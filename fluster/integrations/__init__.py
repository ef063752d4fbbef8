"""Other programs' interfaces, over Fluster. Each needs the packages of an extra, and is imported by its own name."""
