"""Provide trackers of libraries: TensorBoard, Weights & Biases, MLflow, Trackio, SwanLab."""
