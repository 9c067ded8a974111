"""Provide trackers of libraries: Weights & Biases, MLflow, Trackio, SwanLab, and
TensorBoard.
"""
