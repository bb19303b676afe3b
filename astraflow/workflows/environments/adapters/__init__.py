"""Environments of other packages, a thin file each; they run where those packages are installed."""
