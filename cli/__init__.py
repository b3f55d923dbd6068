"""The `lockstep` command: what it takes, how it starts ranks, and what the terminal shows."""
