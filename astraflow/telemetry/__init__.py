"""What processes say of themselves: logs."""
