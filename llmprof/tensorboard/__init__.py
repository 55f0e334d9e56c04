"""Our tab in TensorBoard. Nothing here imports torch or pandas."""
