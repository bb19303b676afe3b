"""The hub: one process that carries out what the state machine of a run decides."""
