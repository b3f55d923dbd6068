"""The speculative loop: requests, drafting, verification, and what a run returns."""
