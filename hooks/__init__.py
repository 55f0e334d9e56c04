"""A real run in, a measured Profile and a Workload out. The only room that imports torch."""
