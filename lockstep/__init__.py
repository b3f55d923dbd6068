"""Distributed speculative decoding of mixture-of-experts models with MTP heads."""
