"""Trainers: batches become optimizer steps, and every step a version of the weights."""

from astraflow.trainers.engine import TrainEngine
from astraflow.trainers.main import run_engine

__all__ = ["TrainEngine", "run_engine"]
