"""A Profile in, numbers or text out."""
