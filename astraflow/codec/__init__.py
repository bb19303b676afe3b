"""The weight codec: pure functions from two versions to chunks and back.

`docs/codec.md` has the bytes.
"""
