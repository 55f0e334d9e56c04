"""Saves and loads runs: a JSON manifest and `.npz` columns without pickle, written atomically, versioned.

A run is a directory:

    RUN/rank-00000/manifest.json   Manifest of one rank class
    RUN/rank-00000/tables.npz      one array per column, "table.column"
    RUN/rank-00000/journal.jsonl   one StepRow a line while the run is going: a killed run stays readable
    RUN/workload.json              the Workload, when it was traced
"""
