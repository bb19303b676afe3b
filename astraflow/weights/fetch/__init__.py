"""The receiver's side: pull a version, verify it, hold it."""
