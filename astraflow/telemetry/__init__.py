"""What processes say of themselves: logs, metrics, traces, tracebacks."""
