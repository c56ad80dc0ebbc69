"""TensorRT and TensorRT-RTX: one code path, the vendor's module passed in (:mod:`flavours` imports it)."""
