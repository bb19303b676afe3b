"""The weight codec: pure functions from two versions to chunks and back.

`docs/weights.md` has the bytes.
"""
