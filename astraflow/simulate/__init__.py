"""Simulation: discrete events over the run that the hub runs, without processes or GPUs."""
