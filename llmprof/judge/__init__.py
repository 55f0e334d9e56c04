"""The judge: tables of published measurements scored against what our own forecasts say."""
