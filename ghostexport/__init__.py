"""Removes decoder blocks of an LLM, repairs the cut in closed form, and builds TensorRT engines."""
