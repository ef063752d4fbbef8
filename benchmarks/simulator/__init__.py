"""A cluster in one process without a bus: the real decisions, a clock that jumps."""
