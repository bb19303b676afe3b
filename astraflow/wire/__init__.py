"""The contract in Python: protobuf messages to core types and back.

One file per proto package. Parsing is validating: `decode_*` returns a sound object or raises
AstraflowError, with the field's name in the metadata.
"""
