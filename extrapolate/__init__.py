"""A measured Profile and a Workload in, a predicted Profile out. numpy only: no torch, no files."""
