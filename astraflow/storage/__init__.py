"""Storage: what must outlive a process, behind protocols that see bytes."""
