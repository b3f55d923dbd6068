"""Layouts, the conversions between them, strategies, the ledger, and the ranks that run them."""
