"""ONNX Runtime: engines, sessions, and graphs run as they are."""
