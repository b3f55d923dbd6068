"""The demo models that ship with the package, their data and their training."""
