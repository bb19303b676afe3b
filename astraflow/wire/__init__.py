"""The contract in Python: protobuf messages to core types and back.

A file holds what belongs together of one proto package. Parsing is validating: `decode_*` returns a
sound object or raises AstraflowError, with the field's name in the metadata.
"""
