"""Trackers: the numbers of a run, shown by TensorBoard, Weights & Biases, MLflow or trackio."""
