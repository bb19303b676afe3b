"""Sources of weights: the TransferService of a trainer, and of a relay."""
