"""The pure floor: types, rules and the run's state machine.

Standard library and numpy only: no I/O, no event loop, no grpc, protobuf or torch. Time
and chance are arguments.
"""
