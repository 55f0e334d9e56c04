"""One file per command of the command line; each prints, none computes."""
